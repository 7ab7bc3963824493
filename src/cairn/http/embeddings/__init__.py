"""OpenAI's embeddings: vectors of texts."""
