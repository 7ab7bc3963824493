"""The terminal of ``cairn chat``: its keys, its signals, and how answers look on it."""
