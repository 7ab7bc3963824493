"""From a conversation to token ids and to its chain of parts."""
