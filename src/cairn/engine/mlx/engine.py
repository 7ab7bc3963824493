"""
The engine that runs models with MLX: passes over slabs, and sealed blocks. For one thread alone.

Rules of this module:

1. The rules of ``cairn.engine.contract``: reports are measured, and nothing here decides.
2. A prefill or settling pass is one call of the model on the rows of the canonical schedule and no
   others; a decode pass always has W rows, however many sessions decode.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from cairn.engine.mlx.block_files import BlockFiles, NoRoom, Rejected
from cairn.engine.mlx.blocks import BlockStore
from cairn.engine.mlx.cache import HeldSlab, SlabPool
from cairn.engine.mlx.rows import row_caches
from cairn.engine.mlx.sampling import adjusted, draw_token, likeliest, log_probabilities, only
from cairn.engine.reports import (
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
)
from cairn.engine.sampling import token_key
from cairn.journal.checkpoints import Checkpoints
from cairn.journal.windows import SinkWindow

if TYPE_CHECKING:
    from cairn.engine.mlx.model import LoadedModel

_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class MlxEngine(Engine):
    """
    A loaded model with its slabs and blocks.

    Attributes:
        files: the block files, after ``open_files``.
    """

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
        self._rows = decode_rows
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
        self.files: BlockFiles | None = None

    @property
    def decode_rows(self) -> int:
        """W."""
        return self._rows

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
        self, slab: int, keys: Sequence[str], start: int, places: Sequence[int] | None = None
    ) -> ShareReport:
        """
        Copy sealed blocks into a slab, and hash what the slab then holds. The digest shows a block
        that changed in memory, or a copy that went wrong.

        Args:
            start: where the slab ends.
            places: the position of each block, if there are gaps between them (``sink_window``
                only).

        Raises:
            EngineFault: a block is not in memory, or the slab does not end at ``start``.
        """
        began = time.perf_counter_ns()
        held = self.pool.get(slab)
        blocks = [self.blocks.get(key) for key in keys]
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

    def run_chunk(self, slab: int, ids: Sequence[int], draw: DrawSpec | None) -> PassReport:
        """
        Run one prefill or settling pass: add the KV of ``ids`` to the slab.

        Args:
            ids: 1 to C token ids.
            draw: how to draw a token from the last row; None to draw none.

        Raises:
            EngineFault: the rows do not fit, a log-probability is not finite, or growing caches
                exceed what was reserved for them.
            GrammarDeadEnd: the grammar allows no token. Nothing was run.
        """
        began = time.perf_counter_ns()
        held = self.pool.get(slab)
        allowed = _allowed(draw) if draw is not None else None
        start = held.end
        tokens = mx.array(list(ids))
        logits = self._model(tokens[None], cache=held.caches)
        held.passed(len(ids))
        drawn = None
        if draw is None:
            mx.eval(held.arrays())
        else:
            position = start + len(ids)
            drawn = self._drawn(logits[0, -1], draw, allowed, position, held.arrays())
        held.compact()
        held.stay_within()
        return PassReport(
            start=start,
            end=held.end,
            ran=tuple(np.array(tokens).tolist()),
            coverage=held.coverage(),
            drawn=drawn,
            duration_us=_since_us(began),
        )

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        """
        Run one decode pass of W rows: add one token's KV to the slab of each row.

        A row gets its fault as its report if its slab is not open or full, if no token is allowed,
        if its log-probability is not finite, or if its caches have grown too far. The others are
        not affected.

        Args:
            rows: W rows; None for one without a session.

        Raises:
            EngineFault: the number of rows is not W.
        """
        if len(rows) != self._rows:
            raise EngineFault(f"a decode pass has {self._rows} rows, not {len(rows)}")
        began = time.perf_counter_ns()
        reports: list[RowReport] = [None] * len(rows)
        held: list[HeldSlab | None] = [None] * len(rows)
        allowed: list[Allowed] = [None] * len(rows)
        for place, row in enumerate(rows):
            if row is not None:
                try:
                    allowed[place] = _allowed(row.draw)
                    held[place] = self._room_for_one(row.slab)
                except (EngineFault, GrammarDeadEnd) as fault:
                    reports[place] = fault
        if not any(held):
            return reports
        starts = [slab.end if slab is not None else 0 for slab in held]
        tokens = mx.array([[row.token if row is not None else 0] for row in rows])
        caches: list[Any]
        if self._rows == 1:
            assert held[0] is not None
            caches = held[0].caches
        else:
            caches = row_caches([slab.caches if slab is not None else None for slab in held])
        logits = self._model(tokens, cache=caches)
        for slab in held:
            if slab is not None:
                slab.passed(1)
        pending = [
            _pending(logits[place, -1], row.draw, allowed[place], starts[place] + 1)
            for place, row in enumerate(rows)
            if row is not None and held[place] is not None
        ]
        arrays = [array for slab in held if slab is not None for array in slab.arrays()]
        mx.eval(pending, arrays)
        fed = np.array(tokens)[:, 0].tolist()
        took = _since_us(began)
        ready = iter(pending)
        for place, row in enumerate(rows):
            slab = held[place]
            if row is None or slab is None:
                continue
            try:
                drawn = _read(next(ready), row.draw.top)
                slab.stay_within()
            except EngineFault as fault:
                reports[place] = fault
                continue
            reports[place] = PassReport(
                start=starts[place],
                end=slab.end,
                ran=(fed[place],),
                coverage=slab.coverage(),
                drawn=drawn,
                duration_us=took,
            )
        return reports

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
    ) -> ScanReport:
        """
        Scan the block files of earlier runs. Afterwards blocks can be written and read.

        Args:
            on_record: the size of each file that the journal knows of, by key.
            run: the id of this run of the server.
            earlier: the ids of earlier runs on this journal.
            known: the keys of all blocks that the journal knows of.
            keep_aside: whether files that were set aside stay.
        """
        files = BlockFiles(folder, fingerprint, run, earlier)
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
            said = error.strerror if isinstance(error, OSError) else None
            return UnwrittenReport(
                key=key,
                reason=said or f"{type(error).__name__}: {error}",
                nowhere=isinstance(error, OSError) and error.errno in _TAKES_NOTHING,
            )
        return self._file_report(key, digest, size)

    def load(self, key: str, expected_digest: str) -> LoadReport | RejectReport | None:
        """
        Read a block from its file into memory, if its KV has this digest. None if it is in memory
        or has no file.
        """
        if self.files is None or key not in self.files or key in self.blocks:
            return None
        began = time.perf_counter_ns()
        try:
            block, found = self.files.read(key, expected_digest)
        except Rejected as rejected:
            return rejected.report
        self.blocks.put(key, block)
        blocks, size = self.blocks.measure()
        return LoadReport(
            key=key,
            digest=found,
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

    def _file_report(self, key: str, digest: str, size: int) -> FileReport:
        assert self.files is not None
        count, total = self.files.measure()
        return FileReport(key=key, digest=digest, bytes=size, disk_blocks=count, disk_bytes=total)

    def _room_for_one(self, slab_id: int) -> HeldSlab:
        """
        The slab, if it has room for one more token.

        Raises:
            EngineFault: it is full, or not open.
        """
        slab = self.pool.get(slab_id)
        if slab.end >= slab.capacity_tokens:
            raise EngineFault(f"slab {slab_id} is full at {slab.end} tokens")
        return slab

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


def _number(array: mx.array) -> float:
    value = array.item()
    assert not isinstance(value, complex)
    return value


def _since_us(began_ns: int) -> int:
    return (time.perf_counter_ns() - began_ns) // 1000
