"""
Fire drills: damage a private server on purpose, and check that the damage is caught.

Rules of this package:

1. Arrays, slabs, orders and stored rows are damaged, by wrappers around the methods of one running
   instance (``faults/damage.py``). No drill appends a wrong event, and the product knows nothing of
   drills.
2. What follows is observed from outside: over HTTP, in the metrics, in the log, and with
   `ops replay` on the journal that the server left.
3. Each expected consequence is a named check, which can fail.

``outcome.py`` defines the terms, ``table.py`` lists the drills, and ``running.py``, ``stored.py``,
``files.py`` and ``unseen.py`` run them.
"""
