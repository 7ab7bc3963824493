"""The shapes of passes that give the same bits: rows of several sessions, and any cut of one."""
