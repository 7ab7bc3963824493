"""Sealed blocks in files: in a folder of one server, or in the folder of a fleet."""
