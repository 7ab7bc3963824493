"""
What changes, and who owns it: trio actors around the pure core.

``server`` wires the room and is what the HTTP layer holds; ``messages`` is what the two say to each
other. ``sequencer`` decides and appends, ``writer`` commits, ``engine`` runs the thread that owns
MLX, ``session`` owns one conversation's cache, ``memory`` makes room for slabs and blocks.
"""
