"""The actors: supervisor, sequencer, sessions, block store and journal writer, on trio."""
