"""
What changes, and who owns it: trio actors around the pure core.

``server`` is what the HTTP layer holds, and ``boot`` wires the room. ``requests/`` has a request up
to its session (``admission`` lists where it can wait), ``sessions/`` its steps there and what is
computed before the next turn (``prewarm``), ``threads/`` the threads of the engine and of the
journal writer, ``models/`` loading and swapping, ``idle/`` expiry and shadow checks, ``agents/``
stored histories. ``sequencer`` decides and appends; ``memory`` makes room for slabs and blocks.
"""
