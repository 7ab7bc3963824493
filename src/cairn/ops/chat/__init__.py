"""``cairn chat``."""
