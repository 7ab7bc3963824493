"""
What happened, what follows from it, and what must hold: the pure core.

Read in this order: ``events`` (what can happen), ``lifecycle`` (what may follow what), ``state``
(what it implies), ``paths`` (what is decided), ``invariants`` (what must hold), ``ledger`` (how
events come in), ``codec`` and ``store`` (how they are kept), ``replay`` (how they are read again),
``base`` and ``retention`` (how old ones go). ``windows`` and ``checkpoints`` say what a slab and
its blocks hold of layers that let tokens go or have states. ``keys`` and ``tenants`` say how things
are called and whose they are. ``store_sql`` alone knows a database.
"""
