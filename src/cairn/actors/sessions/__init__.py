"""Sessions: one actor each, and the steps of a request in it."""
