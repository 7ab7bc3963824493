"""
The pure core: what happened, what follows from it, and what must hold.

Read in this order: ``events`` (what can happen), ``lifecycle`` (what may happen next), ``state``
(what the events imply), ``paths`` (what is decided), ``invariants`` (what must hold), ``ledger``
(how events are appended), ``codec`` and ``store`` (how they are stored), ``replay`` (how they are
read again), ``verification`` and ``stories`` (what can be learned from them), ``base``,
``retention`` and ``pruning`` (how old ones are removed). In ``cache``, ``eviction`` decides what
leaves memory, in the order that ``eviction_order`` keeps; ``windows`` and ``checkpoints`` say what
slabs and blocks contain for layers with a window or with recurrent states. ``keys`` and ``tenants``
give names to blocks, messages and sessions. Only ``rows.store_sql`` and ``rows.database`` know a
database.
"""
