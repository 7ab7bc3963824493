"""Agents: conversations whose history the server stores."""
