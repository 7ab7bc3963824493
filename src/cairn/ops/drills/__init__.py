"""
Fire drills: the real thing is damaged in a private server, and what follows is looked at.

Rules of this package:

1. Damage is done to arrays, slabs, orders and stored rows, through wrappers around the methods of
   one running instance (``damage.py``). No wrong event is ever made, and the product knows nothing
   of drills.
2. What a drill shows is asked of the outside: over HTTP, in the metrics, in the log, and of
   `ops replay` over the journal that the server left.
3. Everything that is to be seen is a named check, which can fail.

Read ``outcome.py`` for the words, ``table.py`` for the drills, ``running.py``, ``stored.py``,
``files.py`` and ``unseen.py`` for how they go.
"""

from cairn.ops.drills.outcome import CHECKS, Check, Drill, Outcome
from cairn.ops.drills.server.conversation import Reference, reference
from cairn.ops.drills.table import DRILLS

__all__ = ["CHECKS", "DRILLS", "Check", "Drill", "Outcome", "Reference", "reference"]
