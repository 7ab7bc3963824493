"""
Decoding several sessions in one pass, each over its own KV.

The bits of a row of a matrix product depend on the number of rows, but not on its position or its
neighbours. A decode pass therefore has a number of rows that gives the bits of W rows
(``decode_shapes.py``). Linear layers run over all of them together, with dummies for empty rows.
Attention (``attention.py``) runs for each session over its own keys and values, and recognises rows
by the type of their keys.

A session has several rows if a draft of its next tokens is checked: these are at consecutive
positions, and each attends to the keys up to its own. So a row of a draft computes what a pass of
its token alone would.

Latent attention (DeepSeek's) computes the scores of a part of each query itself, as one product
with the transposed keys, and passes the scores to that function as its mask. ``RowsTurned``
computes that product row by row.

A model that uses the keys in any other way fails, because ``RowsOnly`` is not an array. Such a
model decodes with one row; the self-test (``mlx.selftest``) detects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


class RowsOnly:
    """
    The keys or the values of the sessions in a pass: one array for each row, of different lengths.
    Not an array itself.
    """

    def __init__(self, rows: list[mx.array | None]) -> None:
        self.rows = rows

    def swapaxes(self, one: int, other: int) -> RowsTurned:
        """The same with two axes exchanged; supports only ``queries @ this``."""
        return RowsTurned(self.rows, (one, other))


class RowsTurned(mx.array):
    """
    Transposed keys. ``queries @ this`` gives the scores row by row.

    It derives from ``mx.array`` because Python calls ``__rmatmul__`` of the right operand first
    only if its class is a subclass of the left one's. The array is empty, so that any other use of
    it fails or gives nothing.
    """

    def __new__(cls, rows: list[mx.array | None], axes: tuple[int, int]) -> RowsTurned:
        """An array without contents; ``__init__`` fills it."""
        made: RowsTurned = mx.array.__new__(cls)
        return made

    def __init__(self, rows: list[mx.array | None], axes: tuple[int, int]) -> None:
        super().__init__([])
        # An attribute of an MLX array can only be set through __dict__.
        self.__dict__["turned"] = [None if row is None else row.swapaxes(*axes) for row in rows]

    def __rmatmul__(self, queries: mx.array) -> RowsScores:  # type: ignore[misc]  # no array's product
        """
        Args:
            queries: (rows, heads, 1, head_dim).
        """
        turned: list[mx.array | None] = self.__dict__["turned"]
        return RowsScores(
            [
                None if keys is None else queries[row : row + 1] @ keys
                for row, keys in enumerate(turned)
            ]
        )


class RowsScores:
    """
    Scores that a model computed before attention: one array for each row, of different lengths. Not
    an array itself.
    """

    def __init__(self, rows: list[mx.array | None]) -> None:
        self.rows = rows


class RowsCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """One layer's view of the caches of a pass's sessions; None for a dummy row."""

    def __init__(self, caches: Sequence[Any | None]) -> None:
        """
        Args:
            caches: of each row; the rows of one session are next to each other.
        """
        super().__init__()
        self._caches = tuple(caches)
        self._sessions = [
            (cache, len(list(rows)))
            for (_, cache), rows in groupby(
                caches, key=lambda cache: (id(cache) if cache is not None else 0, cache)
            )
        ]
        self._offsets = mx.array(
            [
                cache.offset + place if cache is not None else 0
                for cache, rows in self._sessions
                for place in range(rows)
            ]
        )

    @property
    def offset(self) -> mx.array:
        """The position of each row, ``(rows,)``; rotary embeddings take one offset for each row."""
        return self._offsets

    @offset.setter
    def offset(self, value: int) -> None:
        if value != 0:  # KVCache.__init__ sets 0
            raise AttributeError("the position of each row is that of its cache, and cannot be set")

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """
        No mask: the one query of each row attends to all keys that its session's cache shows.

        Raises:
            TypeError: the model's window differs from that of the cache.
        """
        for cache in self._caches:
            held = getattr(cache, "window", None)
            if cache is not None and window_size is not None and window_size != held:
                raise TypeError(
                    f"a window of {window_size} over a cache that shows {held or 'all'}"
                )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsOnly, RowsOnly]:
        """
        Add the tokens of each session to its cache. Modifies the caches.

        Args:
            keys: (rows, kv_heads, 1, head_dim).
            values: likewise.
        """
        all_keys: list[mx.array | None] = []
        all_values: list[mx.array | None] = []
        row = 0
        for cache, rows in self._sessions:
            own = slice(row, row + rows)
            row += rows
            if cache is None:
                fetched: Sequence[tuple[Any, Any]] = [(None, None)] * rows
            elif rows == 1:
                fetched = [cache.update_and_fetch(keys[own], values[own])]
            else:
                # All rows before any of them is shown: a slice that is held would copy the slab.
                added = (keys[own].swapaxes(0, 2), values[own].swapaxes(0, 2))
                fetched = cache.update_and_fetch_each(*added)
            all_keys.extend(one for one, _ in fetched)
            all_values.extend(one for _, one in fetched)
        return RowsOnly(all_keys), RowsOnly(all_values)


def attend(
    plain: Callable[..., mx.array],
    queries: mx.array,
    keys: RowsOnly,
    values: Any,
    *,
    scale: float,
    mask: Any,
    **kwargs: Any,
) -> mx.array:
    """
    Attention of a decode pass, row by row.

    Args:
        plain: mlx-lm's attention.
        queries: (rows, heads, 1, head_dim).

    Raises:
        TypeError: the model has a mask of its own.
    """
    if mask is not None and not isinstance(mask, RowsScores):
        raise TypeError("the model made a mask of its own for rows of different lengths")
    scores = mask.rows if mask is not None else [None] * len(keys.rows)
    attended: list[mx.array | None] = []
    for row, (own_keys, own_values) in enumerate(zip(keys.rows, values.rows, strict=True)):
        query = queries[row : row + 1]
        if own_keys is None:
            attended.append(None)
        else:
            attended.append(
                plain(
                    query,
                    own_keys,
                    own_values,
                    cache=None,
                    scale=scale,
                    mask=scores[row],
                    **kwargs,
                )
            )
    shape = next(found for found in attended if found is not None)
    dummy = mx.zeros_like(shape)
    return mx.concatenate([dummy if found is None else found for found in attended], axis=0)


def row_caches(slabs: Sequence[Sequence[Any] | None]) -> list[RowsCache]:
    """
    The caches of a pass: for each layer a view over the sessions' caches of that layer.

    Args:
        slabs: W lists of layer caches; None for a dummy row. At least one is not None.
    """
    layers = len(next(caches for caches in slabs if caches is not None))
    return [
        RowsCache([caches[layer] if caches is not None else None for caches in slabs])
        for layer in range(layers)
    ]
