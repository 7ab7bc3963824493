"""The commands for a fleet: servers whose journals are in one database."""
