"""Rows: the form in which events are chained, stored, exported and verified."""
