"""Which model is in memory: the queue for it, loading, and swapping."""
