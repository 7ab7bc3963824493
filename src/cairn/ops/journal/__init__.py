"""The commands that read a journal, and the ones that maintain it."""
