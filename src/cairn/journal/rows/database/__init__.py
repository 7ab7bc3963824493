"""Journals in a PostgreSQL database: the lock, the lease, the keys, and the other nodes."""
