"""
The recurrent state of a layer in the slab of a session.

``StateCache`` is mlx-lm's ``ArraysCache`` for a layer with a recurrent state, which every pass
replaces. It can be cut back only to a position at which a copy was kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from cairn.engine.errors import EngineFault


@attrs.frozen(kw_only=True)
class StateShape:
    """
    What one layer with a recurrent state keeps.

    Attributes:
        arrays: (shape, dtype) of each of its arrays.
    """

    arrays: tuple[tuple[tuple[int, ...], mx.Dtype], ...]

    @property
    def window(self) -> None:
        """None: such a layer does not attend."""
        return

    @property
    def token_bytes(self) -> int:
        """0: the size does not depend on the number of tokens."""
        return 0

    @property
    def state_bytes(self) -> int:
        """The size of the state in bytes."""
        return sum(math.prod(shape) * dtype.size for shape, dtype in self.arrays)

    @property
    def dtypes(self) -> tuple[mx.Dtype, ...]:
        """The dtypes of its arrays."""
        return tuple(dtype for _, dtype in self.arrays)


class StateCache(ArraysCache):  # type: ignore[misc]  # mlx-lm has no types
    """
    One layer's state, and a copy of an earlier one.

    Models see None until they have written a state, as in mlx-lm's class. Until then placeholders
    of the same size are allocated, so that the memory that is counted is in use.

    Attributes:
        start: 0, because a state covers all tokens.
        tokens: how many tokens the state covers. Only a pass that wrote every array of the state
            changes it.
    """

    start = 0

    def __init__(self, shape: StateShape) -> None:
        super().__init__(len(shape.arrays))
        self.cache: list[mx.array | None] = [None] * len(shape.arrays)
        self._shape = shape
        self._written: set[int] = set()
        self.tokens = 0
        self._stored: list[mx.array] = []
        self._stored_tokens = 0
        self._spare = self._zeros()
        self._spare_stored = self._zeros()

    def __setitem__(self, place: int, array: mx.array) -> None:
        super().__setitem__(place, array)
        self._written.add(place)

    def passed(self, rows: int) -> None:
        """
        Take note of a pass over this many rows, before it is evaluated.

        Raises:
            EngineFault: it did not write every array of the state, or changed a shape or dtype.
        """
        found = [(one.shape, one.dtype) if one is not None else None for one in self.cache]
        if self._written != set(range(len(found))) or found != list(self._shape.arrays):
            raise EngineFault(f"a pass left {found} as a state, not all of {self._shape.arrays}")
        if self.lengths is not None or self.left_padding is not None:
            raise EngineFault("a recurrent state does not support padding")
        self._written.clear()
        # A slice would keep the whole array alive that it was taken from. States from a block are
        # contiguous too.
        self.cache = [mx.contiguous(array) for array in self.arrays]
        self._spare = []
        self.tokens += rows

    def keep(self) -> None:
        """Keep a copy of the current state to cut back to. Replaces the previous copy."""
        if not self.tokens:
            return
        # Copies, because a model may modify the arrays that it gets.
        self._stored = [mx.contiguous(array) for array in self.arrays]
        mx.eval(self._stored)
        self._stored_tokens = self.tokens
        self._spare_stored = []

    def can_be_cut_back(self, end: int) -> bool:
        """Whether the state of the first ``end`` tokens is available."""
        return end in (0, self.tokens) or (bool(self._stored) and end == self._stored_tokens)

    def cut_back(self, end: int) -> None:
        """Go back to the state of the first ``end`` tokens, which must be available."""
        if end == self.tokens:
            return
        self._written.clear()
        self.tokens = end
        if end:
            self.cache = [mx.contiguous(array) for array in self._stored]
            return
        self.cache = [None for _ in self.cache]
        self._stored, self._stored_tokens = [], 0
        self._spare, self._spare_stored = self._zeros(), self._zeros()

    def put(self, arrays: Sequence[mx.array], end: int) -> None:
        """
        Replace the state by one from a block, which covers ``end`` tokens, and keep a copy.

        Raises:
            EngineFault: its shapes or dtypes are different.
        """
        found = tuple((one.shape, one.dtype) for one in arrays)
        if found != self._shape.arrays:
            raise EngineFault(f"a block carries {found} as a state, not {self._shape.arrays}")
        self.cache = [mx.contiguous(array) for array in arrays]
        self._written.clear()
        self._spare = []
        self.tokens = end
        self.keep()

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of the state; empty if it covers no token."""
        return [array for array in self.cache if array is not None]

    @property
    def places(self) -> int:
        """How many arrays a state has."""
        return len(self._shape.arrays)

    @property
    def nbytes(self) -> int:
        """The size of the state, of the copy, and of the placeholders for them."""
        held = [*self.arrays, *self._stored, *self._spare, *self._spare_stored]
        return sum(array.nbytes for array in held)

    def _zeros(self) -> list[mx.array]:
        made = [mx.zeros(shape, dtype) for shape, dtype in self._shape.arrays]
        mx.eval(made)
        return made
