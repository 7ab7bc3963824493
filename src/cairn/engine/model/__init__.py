"""Model directories: their files, fingerprint and recommended settings."""
