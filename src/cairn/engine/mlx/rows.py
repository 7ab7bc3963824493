"""
Decoding with a fixed number of rows: W sessions in one pass, each over its own KV.

The bits of a row of a matrix product depend on how many rows there are, and neither on its place
nor on its neighbours. So a decode pass always has W rows: linear layers run over all of them
together, empty rows are dummies, and attention runs for each session over its own keys and
values, through the one function that mlx-lm's models import by name. That function is replaced, in
the model's module, by ``attend``, which knows rows by the type of their keys.

Latent attention (DeepSeek's) scores a part of each query itself, by one product with the keys
turned over, and hands the scores to that function as its mask: ``RowsTurned`` makes that product
row by row.

Whatever asks more of the cache than this meets ``RowsOnly``, which is no array, and raises: such a
model decodes with one row (``mlx_selftest`` finds out).
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
    """The keys, or the values, of the sessions in a pass: arrays of different lengths. No array."""

    def __init__(self, rows: list[mx.array | None]) -> None:
        self.rows = rows

    def swapaxes(self, one: int, other: int) -> RowsTurned:
        """The same with two axes exchanged, good for a product from the left."""
        return RowsTurned(self.rows, (one, other))


class RowsTurned(mx.array):
    """
    Keys turned over. ``queries @ this`` gives the scores row by row; Python asks the right operand
    first only where its class is derived from the left one's, hence an array. One without an
    element, so that another use of it fails or gives nothing.
    """

    def __new__(cls, rows: list[mx.array | None], axes: tuple[int, int]) -> RowsTurned:
        """An array that is not filled yet."""
        made: RowsTurned = mx.array.__new__(cls)
        return made

    def __init__(self, rows: list[mx.array | None], axes: tuple[int, int]) -> None:
        super().__init__([])
        # MLX's arrays have no place for further attributes but this one.
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
    """Scores that a model made before it attends, for each row of another length. No array."""

    def __init__(self, rows: list[mx.array | None]) -> None:
        self.rows = rows


class RowsCache(KVCache):  # type: ignore[misc]  # mlx-lm has no types
    """One layer's view of the caches of W sessions; None where a row is a dummy."""

    def __init__(self, caches: Sequence[Any | None]) -> None:
        super().__init__()
        self._caches = tuple(caches)
        self._offsets = mx.array([cache.offset if cache else 0 for cache in caches])

    @property
    def offset(self) -> mx.array:
        """The position of each row, ``(W,)``: rotary embeddings take one offset a row."""
        return self._offsets

    @offset.setter
    def offset(self, value: int) -> None:
        if value != 0:  # KVCache.__init__ sets 0
            raise AttributeError("the rows of a pass move by their own caches")

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """
        One query a row sees all keys that its session's cache shows: no mask.

        Raises:
            TypeError: the model wants less than that to be seen.
        """
        for cache in self._caches:
            held = getattr(cache, "window", None)
            if cache is not None and window_size is not None and window_size != held:
                raise TypeError(
                    f"a window of {window_size} over a cache that shows {held or 'all'}"
                )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsOnly, RowsOnly]:
        """
        Add one token to each session's own cache. Changes them.

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
    ``mlx_lm.models.base.scaled_dot_product_attention``, row by row where the keys are rows. Takes
    its arguments by place too, as some models give them.
    """
    if not isinstance(keys, RowsOnly):
        plain: mx.array = _plain_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask, **kwargs
        )
        return plain
    if mask is not None and not isinstance(mask, RowsScores):
        raise TypeError("a mask was made for rows of different lengths")
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
    """Put ``attend`` in the place of mlx-lm's attention in all model modules that are loaded."""
    for name, module in list(sys.modules.items()):
        models = name.startswith("mlx_lm.models.") and module is not base
        if models and getattr(module, "scaled_dot_product_attention", None) is _plain_attention:
            module.scaled_dot_product_attention = attend  # type: ignore[attr-defined]


def row_caches(slabs: Sequence[Sequence[Any] | None]) -> list[RowsCache]:
    """
    The caches of a pass: for each layer a view over the sessions' caches of that layer.

    Args:
        slabs: W lists of layer caches, None for a dummy row; at least one is not None.
    """
    layers = len(next(caches for caches in slabs if caches is not None))
    return [
        RowsCache([caches[layer] if caches is not None else None for caches in slabs])
        for layer in range(layers)
    ]
