"""Hypercorn on trio, and the life of a connection."""
