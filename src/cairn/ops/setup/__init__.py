"""Commands that set Cairn up on a machine."""
