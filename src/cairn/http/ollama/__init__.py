"""Ollama's API: the chat part, and the part that reads: ``/api/chat``, ``/api/tags`` and others."""
