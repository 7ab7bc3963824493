"""The database of a journal: URLs, connections, schema, errors; what a fleet has in it."""
