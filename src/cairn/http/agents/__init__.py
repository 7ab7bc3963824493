"""Cairn's own agents: ``/v1/agents``."""
