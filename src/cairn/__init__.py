"""
Cairn: a session server for local language models on MLX.

The rooms, and the one way in which imports point::

    ops > http > actors > engine > journal

``journal`` is pure: what happened, what follows from it, and what must hold. ``engine`` computes
on the device. ``actors`` own what changes. ``http`` speaks to clients, ``ops`` to operators.
``migrations`` is read by Alembic alone.
"""

__version__ = "0.1.0"
