"""
The head of a model, the layer from the last hidden state to logits, over few rows.

A prefill pass needs the logits of one row, and the head is often the largest layer of a small
model. With a row class it therefore runs over the fewest rows that the class allows, the wanted
one among them. Like all products of a pass it is under test when the class is searched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class Narrowed:
    """
    What the class of a head derives from, before its own class.

    Attributes:
        rows: those over which it runs next; None for all.
    """

    rows: slice | None = None

    def narrowed(self, hidden: mx.array) -> mx.array:
        """Those rows of ``(1, rows, columns)``."""
        return hidden if self.rows is None else hidden[:, self.rows]


def heads(model: Any) -> list[Narrowed]:
    """
    The layers of a model that can be its head: ``lm_head``, and embeddings, which some models use
    as their head. Modifies their class, once.
    """
    found: list[Narrowed] = []
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "lm_head":
            method = "__call__"
        elif hasattr(module, "as_linear"):
            method = "as_linear"
        else:
            continue
        if not isinstance(module, Narrowed):
            module.__class__ = _narrowed(type(module), method)
        found.append(module)
    return found


def _narrowed(kind: type[Any], method: str) -> type[Any]:
    """A class of layers that compute some rows alone in one of its methods."""
    whole = getattr(kind, method)

    def over_rows(layer: Any, hidden: mx.array) -> mx.array:
        computed: mx.array = whole(layer, layer.narrowed(hidden))
        return computed

    return type(kind.__name__, (Narrowed, kind), {method: over_rows})


@contextmanager
def over(layers: Sequence[Narrowed], rows: slice | None) -> Iterator[None]:
    """Let these layers run over some rows alone."""
    for layer in layers:
        layer.rows = rows
    try:
        yield
    finally:
        for layer in layers:
            layer.rows = None
