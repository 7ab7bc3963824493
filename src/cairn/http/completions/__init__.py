"""OpenAI's older completions: ``/v1/completions``."""
