"""``ops serve``."""
