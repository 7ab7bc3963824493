"""
Decoding with a fixed number of rows: W sessions in one pass, each over its own KV.

The bits of a row of a matrix product depend on the number of rows, but not on its position or its
neighbours. A decode pass therefore always has W rows. Linear layers run over all of them together,
with dummies for empty rows. Attention runs for each session over its own keys and values, through
the one function that mlx-lm's models import by name. ``install`` replaces that function in the
model's module by ``attend``, which recognises rows by the type of their keys.

Latent attention (DeepSeek's) computes the scores of a part of each query itself, as one product
with the transposed keys, and passes the scores to that function as its mask. ``RowsTurned``
computes that product row by row.

A model that uses the keys in any other way fails, because ``RowsOnly`` is not an array. Such a
model decodes with one row; the self-test (``mlx.selftest``) detects it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

_plain_attention = base.scaled_dot_product_attention


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
            queries: (W, heads, 1, head_dim).
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
    """One layer's view of the caches of W sessions; None for a dummy row."""

    def __init__(self, caches: Sequence[Any | None]) -> None:
        super().__init__()
        self._caches = tuple(caches)
        self._offsets = mx.array([cache.offset if cache else 0 for cache in caches])

    @property
    def offset(self) -> mx.array:
        """The position of each row, ``(W,)``; rotary embeddings take one offset for each row."""
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
        Add one token to the cache of each session. Modifies the caches.

        Args:
            keys: (W, kv_heads, 1, head_dim).
            values: likewise.
        """
        all_keys: list[mx.array | None] = []
        all_values: list[mx.array | None] = []
        for row, cache in enumerate(self._caches):
            fetched = (None, None)
            if cache is not None:
                fetched = cache.update_and_fetch(keys[row : row + 1], values[row : row + 1])
            all_keys.append(fetched[0])
            all_values.append(fetched[1])
        return RowsOnly(all_keys), RowsOnly(all_values)


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    **kwargs: Any,
) -> mx.array:
    """
    ``mlx_lm.models.base.scaled_dot_product_attention``, but row by row if the keys are rows. Takes
    its arguments by position too, because some models pass them so.
    """
    if not isinstance(keys, RowsOnly):
        plain: mx.array = _plain_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, **kwargs
        )
        return plain
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
                _plain_attention(
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


def install() -> None:
    """Replace mlx-lm's attention by ``attend`` in all loaded model modules."""
    for name, module in list(sys.modules.items()):
        models = name.startswith("mlx_lm.models.") and module is not base
        if models and getattr(module, "scaled_dot_product_attention", None) is _plain_attention:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]


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
