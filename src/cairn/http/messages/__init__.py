"""Anthropic's messages: ``/v1/messages``."""
