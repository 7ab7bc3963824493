"""Text to tokens and back, and facts about the model, as llama.cpp's server and vLLM have them."""
