"""Pebble's first chat with a stranger: openings, a rubric, a transcript, and verdicts."""
