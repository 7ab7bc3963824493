"""``ops chat``."""
