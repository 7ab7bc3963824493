"""
What must hold, as pure functions over the state before an event and the event.

Rules of these modules:

1. A check compares what the state implies with what engine, store or session *reported* in the
   event. It never compares a number with itself.
2. A check returns violations and raises nothing; it reads, and changes nothing.
3. The same code runs before an event is committed and again on replay.

``check`` runs all of them. Legality (INV-6, ``lifecycle.py``) comes first: an event that may not
happen now is not checked further.

``http/wire/errors.py`` says how a violation becomes an HTTP error.
"""

from __future__ import annotations

from cairn.journal.invariants.checks import CHECKS, check, check_step
from cairn.journal.invariants.sentences import SENTENCES, Scope, Violation

__all__ = ["CHECKS", "SENTENCES", "Scope", "Violation", "check", "check_step"]
