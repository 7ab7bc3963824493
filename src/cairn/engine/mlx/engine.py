"""
The engine that runs models with MLX: passes over slabs, and sealed blocks. For one thread alone.

Rules of this module:

1. The rules of ``cairn.engine.contract``: reports are measured, and nothing here decides.
2. A prefill or settling pass is one call of the model. It has the rows of the canonical schedule
   and no others, or those of the row class; a decode pass has a number of rows that gives the bits
   of W rows. The self-test has shown that these shapes agree.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from cairn.engine.contract import Engine
from cairn.engine.errors import EngineFault, GrammarDeadEnd, NotFinite
from cairn.engine.growth import Growth
from cairn.engine.machine.heap import give_back_free_memory
from cairn.engine.mlx import blocks as mlx_blocks
from cairn.engine.mlx.blocks import BlockStore, SealedBlock
from cairn.engine.mlx.cache import HeldSlab, SlabPool
from cairn.engine.mlx.files.block_files import BlockFiles
from cairn.engine.mlx.files.counted import NoRoom, Rejected
from cairn.engine.mlx.files.shared_files import SharedFiles
from cairn.engine.mlx.passes.head import heads, over
from cairn.engine.mlx.passes.low_rank import low_rank_layers, padded
from cairn.engine.mlx.passes.rows import row_caches
from cairn.engine.mlx.passes.segments import Cut, segment_caches, unsupported
from cairn.engine.mlx.sampling import adjusted, draw_token, likeliest, log_probabilities, only
from cairn.engine.reports import (
    NOT_COMPARED,
    DecodeRow,
    Drawn,
    DrawSpec,
    EvictReport,
    FileReport,
    LoadReport,
    MemoryReport,
    PassReport,
    RejectReport,
    RowReport,
    ScanReport,
    SealReport,
    ShareReport,
    SlabReport,
    TrimReport,
    UnremovedReport,
    UnwrittenReport,
    rows_of,
)
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import token_key
from cairn.journal.cache.checkpoints import Checkpoints
from cairn.journal.cache.windows import SinkWindow

if TYPE_CHECKING:
    from cairn.engine.mlx.model import LoadedModel

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LOST = (errno.EROFS, errno.ENOENT, errno.EACCES, errno.ESTALE, errno.ENOTCONN)


class MlxEngine(Engine):
    """
    A loaded model with its slabs and blocks.

    Attributes:
        files: the block files, after ``open_files``.
        positions: how many positions the model has; a row class has no row beyond them if it can.
        without_drafts: why a decode pass has no draft rows: see ``passes/draft_rows.py``.
    """

    without_drafts: str = NOT_COMPARED

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        decode_rows: int,
        own_classes: bool = True,
        policy: SinkWindow | None = None,
        checkpoints: Checkpoints | None = None,
        growth: Growth | None = None,
    ) -> None:
        """
        Args:
            own_classes, policy, growth: see ``SlabPool``.
            checkpoints: which blocks carry recurrent states; None if no layer has one.
        """
        self._checkpoints = checkpoints
        self._model = loaded.model
        self._heads = heads(loaded.model)
        self._low_rank = low_rank_layers(loaded.model)
        self._rows = decode_rows
        self._shapes: Sequence[int] = (decode_rows,)
        self._row_class: RowClass | None = None
        self.positions = loaded.context_tokens
        parameters: Any = tree_flatten(loaded.model.parameters())
        self._weights_bytes = sum(array.nbytes for _, array in parameters)
        self.pool = SlabPool(
            loaded.shapes,
            own_classes=own_classes,
            growing=lambda: make_prompt_cache(loaded.model),
            growth=growth,
            policy=policy,
            together=loaded.together,
        )
        self._grows = not loaded.shapes
        # If a slab drops tokens, each block is hashed while it is still complete.
        self._at_once = 1 if policy is not None else None
        self.blocks = BlockStore()
        self.files: BlockFiles | SharedFiles | None = None

    @property
    def decode_rows(self) -> int:
        """W."""
        return self._rows

    @property
    def decode_shapes(self) -> Sequence[int]:
        """W alone, until others are set: see ``passes/decode_shapes.py``."""
        return self._shapes

    @decode_shapes.setter
    def decode_shapes(self, shapes: Sequence[int]) -> None:
        ascending = list(shapes) == sorted({*shapes, self._rows})
        if not (ascending and 1 <= shapes[0] <= shapes[-1] == self._rows):
            raise EngineFault(f"decode passes of {shapes} rows, and not of 1 to {self._rows}")
        self._shapes = tuple(shapes)

    @property
    def has_low_rank(self) -> bool:
        """Whether the model has low-rank layers that a prefill pass can pad."""
        return bool(self._low_rank)

    @property
    def row_class(self) -> RowClass | None:
        """None, until one is set: see ``passes/search.py``."""
        return self._row_class

    @row_class.setter
    def row_class(self, row_class: RowClass | None) -> None:
        if row_class is not None and (why := self.without_cuts) is not None:
            raise EngineFault(f"no row class for this model: {why}")
        self._row_class = row_class

    @cached_property
    def without_cuts(self) -> str | None:
        """Why a prefill pass cannot begin anywhere, whatever its rows; None if it may."""
        if self._grows:
            return "its caches are mlx-lm's own"
        slab = self.pool.open(1)
        try:
            return unsupported(slab.caches)
        finally:
            self.pool.close(slab.id)

    @property
    def grows(self) -> bool:
        """Whether caches grow with the tokens in them, in decode passes too."""
        return self._grows

    def open_slab(self, capacity_tokens: int) -> SlabReport:
        """Allocate a slab."""
        return self._slab_report(self.pool.open(capacity_tokens))

    def close_slab(self, slab: int) -> SlabReport:
        """
        Release a slab. Its memory stays in the process for later allocations.

        Raises:
            EngineFault: it is not open.
        """
        return self._slab_report(self.pool.close(slab))

    def give_back_memory(self) -> None:
        """Return freed memory to the operating system. Modifies no cache."""
        mx.clear_cache()
        give_back_free_memory()

    def memory(self) -> MemoryReport:
        """
        What is held now: by the arrays of slabs and blocks, and by MLX's own count. Modifies
        nothing.
        """
        return MemoryReport(
            slab_bytes=self.pool.live_bytes(),
            block_bytes=self.blocks.measure()[1],
            weights_bytes=self._weights_bytes,
            active_bytes=mx.get_active_memory(),
            cache_bytes=mx.get_cache_memory(),
        )

    def held_tokens(self, slab: int) -> int:
        """The position after the last token that a slab holds."""
        return self.pool.get(slab).end

    def trim(self, slab: int, end: int) -> TrimReport:
        """
        Cut a slab back to ``[0, end)``. The arrays keep the old rows after the end.

        Raises:
            CannotTrim: KV or a state that is needed at the end is gone.
        """
        held = self.pool.get(slab)
        before = held.end
        held.trim(end)
        return TrimReport(cached_tokens=before, coverage=held.coverage())

    def share(
        self,
        slab: int,
        keys: Sequence[str],
        start: int,
        places: Sequence[int] | None = None,
        *,
        rows: int | None = None,
    ) -> ShareReport:
        """
        Copy sealed blocks into a slab, and hash what the slab then holds. The digest shows a block
        that changed in memory, or a copy that went wrong.

        Args:
            start: where the slab ends.
            places: the position of each block, if there are gaps between them (``sink_window``
                only).
            rows: copy only so many of the first rows of the block. The digest is that of the copied
                rows and the block's other rows together, so that it shows both.

        Raises:
            EngineFault: a block is not in memory, the slab does not end at ``start``, or ``rows``
                are not the first of one block of a model that can begin a pass anywhere.
        """
        began = time.perf_counter_ns()
        held = self.pool.get(slab)
        blocks = [self.blocks.get(key) for key in keys]
        if rows is not None:
            if (
                len(blocks) != 1
                or not 0 < rows <= blocks[0].tokens
                or self.without_cuts is not None
            ):
                raise EngineFault(f"no first {rows} rows of {len(blocks)} blocks")
            mlx_blocks.paste(held, [mlx_blocks.first_rows(blocks[0], rows)], start)
            found = mlx_blocks.digest(mlx_blocks.pasted_in_part(held, blocks[0], start, rows))
            return ShareReport(
                digests=(found,), coverage=held.coverage(), duration_us=_since_us(began)
            )
        size = self._at_once or len(blocks)
        digests: list[str] = []
        for place in range(0, len(blocks), size):
            if places is not None and places[place] != start:
                start = places[place]
                for cache in held.caches:
                    cache.resume(start)
            batch = blocks[place : place + size]
            end = mlx_blocks.paste(held, batch, start)
            for block in batch:
                digests.append(mlx_blocks.digest(mlx_blocks.pasted(held, block, start)))
                start += block.tokens
            start = end
        return ShareReport(
            digests=tuple(digests), coverage=held.coverage(), duration_us=_since_us(began)
        )

    def let_go(self, slab: int, start: int) -> None:
        """Drop all KV of a slab between the sinks and a position (``sink_window`` only)."""
        for cache in self.pool.get(slab).caches:
            cache.let_go(start)

    def run_chunk(
        self,
        slab: int,
        ids: Sequence[int],
        draw: DrawSpec | None,
        *,
        again: int | None = None,
    ) -> PassReport:
        """
        Run one prefill or settling pass: add the KV of ``ids`` to the slab.

        Args:
            ids: 1 to C token ids; with a row class, 1 to ``row_class.most_tokens(start)``.
            draw: how to draw a token from the last row; None to draw none.
            again: the token of the slab's last row, to compute that row again. The slab keeps the
                row that it has.

        Raises:
            EngineFault: the rows do not fit, a log-probability is not finite, growing caches exceed
                what was reserved for them, there are more ids than the row class allows, or there
                is no row or no row class to compute one again.
            GrammarDeadEnd: the grammar allows no token. Nothing was run.
        """
        began = time.perf_counter_ns()
        held = self.pool.get(slab)
        allowed = _allowed(draw) if draw is not None else None
        start = held.end
        fed = list(ids) if again is None else [again, *ids]
        caches, front, rows = self._as_seen(held, len(fed), len(fed) > len(ids))
        end = front + len(fed)
        tokens = mx.array([*[0] * front, *fed, *[0] * (rows - end)])
        last, wanted = end - 1, None
        if self._row_class is not None:
            wanted = self._row_class.rows_for_one(last, rows)
        least = self._row_class.low_rank if self._row_class is not None else 0
        with over(self._heads, wanted), padded(self._low_rank, least):
            logits = self._model(tokens[None], cache=caches)
        if wanted is not None and logits.shape[1] < rows:
            last -= wanted.start
        held.passed(len(ids))
        drawn, arrays = None, held.arrays()
        if again is not None:
            computed = mlx_blocks.joined([array for cache in caches for array in cache.first])
            arrays = [*arrays, computed]
        if draw is None:
            mx.eval(arrays)
        else:
            position = start + len(ids)
            drawn = self._drawn(logits[0, last], draw, allowed, position, arrays)
        row = None
        if again is not None:
            row = mlx_blocks.row_digest(held, start - 1), mlx_blocks.octets_digest(computed)
        held.compact()
        held.stay_within()
        return PassReport(
            start=start,
            end=held.end,
            ran=tuple(np.array(tokens)[end - len(ids) : end].tolist()),
            coverage=held.coverage(),
            drawn=drawn,
            duration_us=_since_us(began),
            again=row,
        )

    def _as_seen(self, held: HeldSlab, tokens: int, again: bool) -> tuple[Sequence[Any], int, int]:
        """
        What a prefill pass runs over: (the caches for the model, dummies before the tokens, all
        rows).

        Args:
            tokens: of the pass.
            again: whether the first of them is the last that the slab has.

        Raises:
            EngineFault: there are more tokens than the row class allows, or there is no row or no
                row class to compute one again.
        """
        if self._row_class is None:
            if again:
                raise EngineFault("without a row class no row is computed again")
            return held.caches, 0, tokens
        start = held.end - again
        if start < 0:
            raise EngineFault(f"slab {held.id} has no row to compute again")
        front, rows = self._row_class.rows(start, tokens, self.positions)
        cut = Cut(self._row_class, start=start, tokens=tokens, front=front, rows=rows, again=again)
        return segment_caches(held.caches, cut), front, rows

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        """
        Run one decode pass: add one token's KV to the slab of each row.

        The tokens of a draft have rows of their own. Those that the pass did not draw are cut off
        again.

        A row gets its fault as its report if its slab is not open or full, if no token is allowed,
        if its log-probability is not finite, or if its caches have grown too far. The others are
        not affected.

        Args:
            rows: as many as one of ``decode_shapes``, those of drafts included; None for one
                without a session.

        Raises:
            EngineFault: the number of rows is not among ``decode_shapes``, or there may be no
                drafts.
        """
        count = rows_of(rows)
        if count not in self._shapes:
            shapes = " or ".join(map(str, self._shapes))
            raise EngineFault(f"a decode pass has {shapes} rows, not {count}")
        if self.without_drafts and count > len(rows):
            raise EngineFault(f"a decode pass has no draft rows: {self.without_drafts}")
        began = time.perf_counter_ns()
        reports: list[RowReport] = [None] * len(rows)
        fed: list[_Fed] = []
        for place, row in enumerate(rows):
            if row is not None:
                try:
                    fed.append(self._fed(place, row))
                except (EngineFault, GrammarDeadEnd) as fault:
                    reports[place] = fault
        if not fed:
            return reports
        dummies = count - sum(len(one.tokens) for one in fed)
        # A row without a session stays at its place, and those that a draft did not need follow.
        sessions = self._in_places(rows, fed, dummies)
        ids = [token for one in sessions for token in (one.tokens if one is not None else (0,))]
        tokens = mx.array(ids)[:, None]
        caches: list[Any]
        if self.decode_rows == 1:
            caches = fed[0].held.caches
        else:
            caches = row_caches(
                [
                    one.held.caches if one is not None else None
                    for one in sessions
                    for _ in (one.tokens if one is not None else (0,))
                ]
            )
        logits = self._model(tokens, cache=caches)
        for one in fed:
            one.held.passed(len(one.tokens))
        first, pending = 0, []
        for part in sessions:
            if part is None:
                first += 1
                continue
            part.first = first
            part.pending = [
                _pending(logits[first + place, -1], draw, allowed, part.start + place + 1)
                for place, (draw, allowed) in enumerate(zip(part.draws, part.allowed, strict=True))
            ]
            pending.extend(part.pending)
            first += len(part.tokens)
        mx.eval(pending, [array for one in fed for array in one.held.arrays()])
        ran = np.array(tokens)[:, 0].tolist()
        took = _since_us(began)
        for one in fed:
            try:
                drawn = _accepted(one)
                _cut_back(one, len(drawn))
                _adopt(one, len(drawn))
                one.held.stay_within()
            except EngineFault as fault:
                _cut_back(one, 1)
                reports[one.place] = fault
                continue
            reports[one.place] = PassReport(
                start=one.start,
                end=one.held.end,
                ran=tuple(ran[one.first : one.first + len(drawn)]),
                coverage=one.held.coverage(),
                drawn=drawn[-1],
                duration_us=took,
                accepted=tuple(drawn[:-1]),
                drafted=len(one.tokens) - 1,
            )
        return reports

    def _fed(self, place: int, row: DecodeRow) -> _Fed:
        """
        What a session's rows of a pass are fed, and how their tokens are drawn.

        Raises:
            EngineFault: the slab is not open, or has no room.
            GrammarDeadEnd: no token is allowed after the first one.
        """
        allowed = [_allowed(row.draw)]
        held = self.pool.get(row.slab)
        if held.end + 1 + len(row.draft) > held.capacity_tokens:
            raise EngineFault(f"slab {row.slab} is full at {held.end} tokens")
        draws = [row.draw]
        for token in row.draft:
            mask = allowed[-1]
            if mask is not None and not (token < len(mask) and mask[token]):
                break
            draw = _forked(draws[-1]).after(token)
            try:
                allowed.append(_allowed(draw))
            except GrammarDeadEnd:
                break  # the pass that is fed this token alone reports it
            draws.append(draw)
        tokens = (row.token, *row.draft[: len(draws) - 1])
        return _Fed(place, row.draw.top, held, held.end, tokens, draws, allowed)

    @staticmethod
    def _in_places(
        rows: Sequence[DecodeRow | None], fed: Sequence[_Fed], dummies: int
    ) -> list[_Fed | None]:
        """The sessions of a pass in the order of its rows, with None for each dummy."""
        by_place = {one.place: one for one in fed}
        found: list[_Fed | None] = []
        for place in range(len(rows)):
            if place in by_place:
                found.append(by_place[place])
            else:
                found.append(None)
                dummies -= 1
        return found + [None] * dummies

    def seal(
        self,
        slab: int,
        key: str,
        start: int,
        end: int,
        *,
        store: bool,
        states: bool | None = None,
    ) -> SealReport:
        """
        Make a sealed block of the rows ``[start, end)``. Also saves the recurrent states of the
        slab, so that it can be cut back to this point.

        Args:
            store: whether to keep the block in memory; otherwise it is only hashed.
            states: whether it carries the states; None to decide by its position.
        """
        held = self.pool.get(slab)
        if states is None:
            states = self._checkpoints is not None and self._checkpoints.at(end)
        block = mlx_blocks.cut(held, start, end, states=states)
        held.keep_states()
        if store:
            self.blocks.put(key, block)
        blocks, size = self.blocks.measure()
        return SealReport(
            digest=mlx_blocks.digest(block),
            bytes=block.nbytes,
            stored=store,
            memory_blocks=blocks,
            memory_bytes=size,
        )

    def digest_of(self, key: str) -> str:
        """The digest of a block's KV in memory now; empty if it is not there. Modifies nothing."""
        return mlx_blocks.digest(self.blocks.get(key)) if key in self.blocks else ""

    def evict(self, key: str) -> EvictReport:
        """
        Drop a block from memory.

        Raises:
            EngineFault: it is not in memory.
        """
        block = self.blocks.evict(key)
        blocks, size = self.blocks.measure()
        return EvictReport(key=key, bytes=block.nbytes, memory_blocks=blocks, memory_bytes=size)

    def open_files(
        self,
        folder: Path,
        fingerprint: str,
        on_record: Mapping[str, int],
        *,
        run: str,
        earlier: Collection[str] = (),
        known: Collection[str] = (),
        keep_aside: bool = True,
        shared: bool = False,
    ) -> ScanReport:
        """
        Scan the block files of earlier runs. Afterwards blocks can be written and read.

        Args:
            on_record: the size of each file that the journal knows of, by key.
            run: the id of this run of the server.
            earlier: the ids of earlier runs on this journal.
            known: the keys of all blocks that the journal knows of.
            keep_aside: whether files that were set aside stay.
            shared: whether the folder is a node's, beside those of other nodes.
        """
        files: BlockFiles | SharedFiles = (SharedFiles if shared else BlockFiles)(
            folder, fingerprint, run, earlier
        )
        report = files.scan(on_record, known, keep_aside=keep_aside)
        self.files = files
        return report

    def spill(
        self, key: str, span: tuple[int, int], expected_digest: str, budget_bytes: int
    ) -> FileReport | UnwrittenReport | None:
        """
        Write a block to a file. A block with another digest is not written; the report has its
        digest.

        Args:
            span: the range of tokens that it covers.
            expected_digest: the digest that its KV must have.
            budget_bytes: the most that all files may take afterwards.

        Returns:
            None if it is not in memory, has a file, or would exceed the budget.
        """
        if self.files is None or key in self.files or key not in self.blocks:
            return None
        block = self.blocks.get(key)
        try:
            digest = mlx_blocks.digest(block)
            if digest != expected_digest:
                return self._file_report(key, digest, 0)
            size = self.files.write(key, block, digest, span, budget_bytes)
        except NoRoom:
            return None
        except (OSError, MemoryError, RuntimeError, ValueError, TypeError) as error:
            # No answer depends on this file. MLX raises errors of its own for an array that it
            # cannot read, not an OSError.
            said, code = (
                (error.strerror, error.errno) if isinstance(error, OSError) else (None, None)
            )
            return UnwrittenReport(
                key=key,
                reason=said or f"{type(error).__name__}: {error}",
                nowhere=code in _FULL + _LOST,
                is_lost=code in _LOST,
            )
        return self._file_report(key, digest, size)

    def load(self, key: str, expected_digest: str) -> LoadReport | RejectReport | None:
        """
        Read a block from its file into memory, if its KV has this digest. None if it is in memory,
        has no file, or that cannot be read now.
        """
        if self.files is None or key not in self.files or key in self.blocks:
            return None
        began = time.perf_counter_ns()
        try:
            read = self.files.read(key, expected_digest)
        except Rejected as rejected:
            return rejected.report
        return None if read is None else self._loaded(key, *read, began)

    def adopt(
        self, key: str, node: str, expected_digest: str, size: int
    ) -> LoadReport | RejectReport | None:
        """
        Read a block from the file of another node into memory, if its KV has this digest. One that
        is in memory is read again, so that the two are compared. None if that node has no file of
        it that can be read, or nodes share no files.
        """
        if not isinstance(self.files, SharedFiles):
            return None
        began = time.perf_counter_ns()
        try:
            read = self.files.read_of(node, key, expected_digest, size)
        except Rejected as rejected:
            return rejected.report
        return None if read is None else self._loaded(key, *read, began)

    def has_file_of(self, key: str, node: str) -> bool:
        """Whether another node has a file of a block that it may be worth to make room for."""
        return isinstance(self.files, SharedFiles) and self.files.has_of(node, key)

    def _loaded(self, key: str, block: SealedBlock, digest: str, began: int) -> LoadReport:
        self.blocks.put(key, block)
        blocks, size = self.blocks.measure()
        return LoadReport(
            key=key,
            digest=digest,
            bytes=block.nbytes,
            memory_blocks=blocks,
            memory_bytes=size,
            duration_us=_since_us(began),
        )

    def drop_file(self, key: str) -> FileReport | UnremovedReport | None:
        """Remove a block's file. None if it has none."""
        if self.files is None or key not in self.files:
            return None
        try:
            size = self.files.drop(key)
        except OSError as error:
            return UnremovedReport(key=key, reason=error.strerror or type(error).__name__)
        return self._file_report(key, "", size)

    def drop_aside(self, keys: Collection[str]) -> UnremovedReport | None:
        """Remove the files of blocks that were set aside. The first that could not be removed."""
        if self.files is None:
            return None
        left = None
        for key in keys:
            try:
                self.files.drop_aside(key)
            except OSError as error:
                reason = error.strerror or type(error).__name__
                left = left or UnremovedReport(key=key, reason=reason)
        return left

    def _file_report(self, key: str, digest: str, size: int) -> FileReport:
        assert self.files is not None
        count, total = self.files.measure()
        return FileReport(key=key, digest=digest, bytes=size, disk_blocks=count, disk_bytes=total)

    def _slab_report(self, slab: HeldSlab) -> SlabReport:
        slabs, size = self.pool.measure()
        return SlabReport(
            slab=slab.id,
            capacity_tokens=slab.capacity_tokens,
            bytes=slab.nbytes,
            pool_slabs=slabs,
            pool_bytes=size,
        )

    def _drawn(
        self,
        logits: mx.array,
        draw: DrawSpec,
        allowed: Allowed,
        position: int,
        arrays: list[mx.array],
    ) -> Drawn:
        pending = _pending(logits, draw, allowed, position)
        mx.eval(pending, arrays)
        return _read(pending, draw.top)


Allowed = npt.NDArray[np.bool_] | None
Pending = tuple[mx.array, mx.array, mx.array | None]
"""(token, its log-probability, all log-probabilities if requested), not evaluated."""


@attrs.define
class _Fed:
    """
    One session's part of a decode pass.

    Attributes:
        place: of its row among those asked for.
        top: how many of the likeliest tokens are reported.
        start: the position of its first token.
        tokens: the token that is due, and those of its draft.
        draws: how each of their next tokens is drawn.
        allowed: which tokens the grammar allows there.
        first: the row of the pass that has its first token.
        pending: the tokens drawn, not evaluated.
    """

    place: int
    top: int
    held: HeldSlab
    start: int
    tokens: tuple[int, ...]
    draws: list[DrawSpec]
    allowed: list[Allowed]
    first: int = 0
    pending: list[Pending] = attrs.field(factory=list)


def _allowed(draw: DrawSpec) -> Allowed:
    """
    The tokens that may be drawn; None for all. They follow from the tokens before, so they are
    known before the pass.
    """
    return draw.matcher.allowed(draw.answer) if draw.matcher is not None else None


def _pending(logits: mx.array, draw: DrawSpec, allowed: Allowed, position: int) -> Pending:
    # The reported log-probabilities are the model's; penalties and grammars affect only the choice.
    logprobs = log_probabilities(logits)
    chosen_from = logprobs
    if draw.sampling.changes_logits or allowed is not None:
        row = adjusted(logits, draw) if draw.sampling.changes_logits else logits
        chosen_from = log_probabilities(row if allowed is None else only(row, allowed))
    token = draw_token(chosen_from, draw.sampling, token_key(draw.seed, draw.choice, position))
    return token, logprobs[token], logprobs if draw.top else None


def _read(pending: Pending, top: int) -> Drawn:
    token, logprob, logprobs = pending
    value, drawn = _number(logprob), int(_number(token))
    if not math.isfinite(value):
        raise NotFinite(f"the log-probability of token {drawn} is {value}")
    likely = likeliest(logprobs, top) if logprobs is not None else ()
    return Drawn(token=drawn, logprob=value, top=likely)


def _accepted(one: _Fed) -> list[Drawn]:
    """
    The tokens drawn after a session's first token, and after each token of its draft that is the
    one drawn before it.

    Raises:
        NotFinite: the log-probability of the first one is not finite.
    """
    drawn = [_read(one.pending[0], one.top)]
    for token, pending in zip(one.tokens[1:], one.pending[1:], strict=True):
        if drawn[-1].token != token:
            break
        try:
            drawn.append(_read(pending, one.top))
        except NotFinite:
            break  # the pass that is fed this token alone reports it
    return drawn


def _forked(draw: DrawSpec) -> DrawSpec:
    """The same draw with a matcher of its own, for a token that may be rejected."""
    return draw if draw.matcher is None else attrs.evolve(draw, matcher=draw.matcher.fork())


def _adopt(one: _Fed, rows: int) -> None:
    """The grammar goes on after the tokens of the draft that were accepted."""
    matcher, last = one.draws[0].matcher, one.draws[rows - 1].matcher
    if matcher is not None and last is not None and last is not matcher:
        matcher.adopt(last)


def _cut_back(one: _Fed, rows: int) -> None:
    """Cut off all but the first rows that a session's part of a pass added."""
    end = one.start + rows
    if one.held.end > end:
        one.held.trim(end)


def _number(array: mx.array) -> float:
    value = array.item()
    assert not isinstance(value, complex)
    return value


def _since_us(began_ns: int) -> int:
    return (time.perf_counter_ns() - began_ns) // 1000
