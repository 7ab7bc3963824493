"""
What an engine raises, by whose fault it is.

::

    EngineFault          Cairn's or the model's: the session ends with a bug id
      |- CannotTrim      a slab cannot be cut back that far
      |- NotFinite       a log-probability is not a number
    GrammarDeadEnd       the client's schema's, or the vocabulary's
    ModelRefused         the operator's: choose another model, or other settings
      |- ModelTooLarge   it does not fit in memory
"""

from __future__ import annotations


class EngineFault(Exception):
    """
    A pass gave something impossible: a log-probability that is not finite, a slab overrun. A bug of
    Cairn or of the model; the session that asked for the pass ends with a bug id.
    """


class CannotTrim(EngineFault):
    """
    A slab cannot be cut back that far: KV that its window has dropped would be needed, or a state
    that was not kept.
    """


class NotFinite(EngineFault):
    """A drawn token has a log-probability that is not a finite number."""


class GrammarDeadEnd(Exception):
    """
    The grammar allows no token, or takes more steps than one token may. The fault of the client's
    schema or of the vocabulary; no cache has changed.
    """


class ModelRefused(Exception):
    """The model cannot be served. The message says what, where and what to do."""


class ModelTooLarge(ModelRefused):
    """The model does not fit in memory."""
