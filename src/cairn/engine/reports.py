"""
The arguments and the measured reports of an engine. Plain values: sessions put reports into events,
and invariants compare them.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import attrs

from cairn.engine import schedule
from cairn.engine.errors import EngineFault, GrammarDeadEnd
from cairn.engine.growth import Growth
from cairn.engine.model import fingerprint
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from cairn.journal.cache.checkpoints import Checkpoints
from cairn.journal.cache.windows import SinkWindow
from cairn.journal.events import Coverage, FileFault

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


NOT_COMPARED = "their bits were not compared"
"""Why there are no draft rows, if no self-test has looked."""


class GrammarMatcher(Protocol):
    """Follows one answer through a grammar. ``answer.grammar_matcher.GrammarMatcher`` does."""

    def allowed(self, answer: Sequence[int]) -> npt.NDArray[np.bool_]:
        """
        Whether each token of the vocabulary may come next, as a mask.

        Args:
            answer: the token ids of the answer so far.

        Raises:
            GrammarDeadEnd: no token may.
        """

    def fork(self) -> GrammarMatcher:
        """An independent copy, to follow tokens that may be rejected."""

    def adopt(self, fork: GrammarMatcher) -> None:
        """Go on from where a fork is: the tokens that it followed were accepted."""


@attrs.frozen(kw_only=True)
class DrawSpec:
    """
    How to draw a token from the last row of a pass.

    Attributes:
        top: how many of the likeliest tokens to report.
        prompt: the token ids of the prompt, if the sampling penalises them; else empty.
        answer: the token ids of the answer up to this pass, if the sampling or the matcher needs
            them; else empty.
        matcher: says which tokens may be drawn; None for all.
    """

    sampling: Sampling
    seed: int
    choice: int = 0
    top: int = 0
    prompt: frozenset[int] = frozenset()
    answer: tuple[int, ...] = ()
    matcher: GrammarMatcher | None = None

    @classmethod
    def first(
        cls,
        sampling: Sampling,
        *,
        seed: int,
        prompt_ids: Iterable[int],
        top: int = 0,
        matcher: GrammarMatcher | None = None,
    ) -> DrawSpec:
        """How to draw the first token of an answer, from the pass that ends the prompt."""
        prompt = frozenset(prompt_ids) if sampling.repetition_penalty != 1.0 else frozenset()
        return cls(sampling=sampling, seed=seed, top=top, prompt=prompt, matcher=matcher)

    def after(self, *tokens: int) -> DrawSpec:
        """How to draw the next token after these have joined the answer."""
        if not self.sampling.counts_tokens and self.matcher is None:
            return self
        return attrs.evolve(self, answer=(*self.answer, *tokens))


@attrs.frozen(kw_only=True)
class DecodeRow:
    """
    One session's row of a decode pass: its slab, the token to add, and how to draw the next.

    Attributes:
        draft: tokens that may follow, each in a row of its own after the first one.
    """

    slab: int
    token: int
    draw: DrawSpec
    draft: tuple[int, ...] = ()


def rows_of(rows: Iterable[DecodeRow | None]) -> int:
    """The number of rows of a decode pass, those of drafts included."""
    return sum(1 if row is None else 1 + len(row.draft) for row in rows)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """
    The loaded model.

    Attributes:
        name: the name that clients see.
        fields: what the fingerprint covers; ``fingerprint`` is its hash.
        layers: layers that keep KV or a state.
        kv_token_bytes: the KV of one token in all layers, in bytes.
        eos_ids: tokens that end an answer.
        vocabulary_tokens: the length of a row of logits.
        defaults: the sampling parameters of a request that sets none.
        template: the settings of the chat template of a request that sets none.
        dtype: the dtype that it computes in, and why, for people.
        policy: what a token attends to; None for what the model's layers define.
        state_bytes: the states of its recurrent layers, in bytes.
        checkpoints: which blocks carry those states; None without states, or if nothing is reused.
        growth: the memory of mlx-lm's own caches, if the model is served on those; else None.
        model_context_tokens: the context of the model itself, if memory limits ``context_tokens``
            to less; else 0.
        row_class: the prefill passes that give the same bits wherever they begin; None if each
            begins with a block.
        row_class_reason: why there is none, or not the cheapest; empty if it is.
        without_drafts: why decode passes have no draft rows; empty if they have.
    """

    name: str
    fingerprint: str
    fields: Mapping[str, Any]
    layers: int
    kv_token_bytes: int
    block_tokens: int
    decode_rows: int
    context_tokens: int
    reusable: bool
    eos_ids: frozenset[int]
    vocabulary_tokens: int
    defaults: Sampling = attrs.field(factory=Sampling)
    template: Mapping[str, Any] = attrs.field(factory=dict)
    dtype: str = ""
    policy: SinkWindow | None = None
    state_bytes: int = 0
    checkpoints: Checkpoints | None = None
    growth: Growth | None = None
    model_context_tokens: int = 0
    row_class: RowClass | None = None
    row_class_reason: str = ""
    without_drafts: str = NOT_COMPARED

    @property
    def grain(self) -> int:
        """A prefill pass may begin at any multiple of this many tokens: 1, or C."""
        return self.block_tokens if self.row_class is None else 1

    @property
    def base_fingerprint(self) -> str:
        """The fingerprint without the row class, see ``fingerprint.base_of``."""
        return fingerprint.base_of(self.fields)

    def pass_end(self, start: int, tokens: int, *, alone: bool, again: bool) -> int:
        """
        The end of a prefill pass that begins at ``start``.

        Args:
            tokens: n, more than ``start``.
            alone: whether no other request waits for the pass to end. Only then may it be longer
                than a block.
            again: whether it also computes the row before ``start``.
        """
        most = 0
        if alone and self.row_class is not None:
            most = self.row_class.most_tokens(start - again) - again
        return schedule.pass_end(start, tokens, self.block_tokens, most)

    def capacity_for(self, tokens: int) -> int:
        """
        The capacity of a slab for a sequence of ``tokens``.
        """
        # A slab whose caches grow is closed after the answer, so it needs no room for the next one.
        if self.growth is not None:
            return -(-tokens // self.block_tokens) * self.block_tokens
        # A slab holds no more than the window, so the whole context takes no larger one.
        if self.policy is not None and tokens > self.policy.rows:
            tokens = self.context_tokens
        return schedule.slab_capacity(tokens, self.block_tokens, self.context_tokens)

    def copies(self, held_blocks: int, blocks: int) -> Iterator[Sequence[int]]:
        """
        The blocks to copy into a slab, by their indices, in parts. Only those that the policy needs
        at the end are copied, and each part ends at a block that carries states.

        Args:
            held_blocks: how many blocks of the sequence the slab holds.
            blocks: how many it is to hold.
        """
        places: Sequence[int] = range(held_blocks, blocks)
        if self.policy is not None:
            places = self.policy.copied(held_blocks, blocks, self.block_tokens)
        every = self.checkpoints.blocks if self.checkpoints is not None else 1
        block_bytes = self.block_tokens * self.kv_token_bytes + self.state_bytes // every
        most = schedule.COPIED_AT_ONCE_BYTES // max(1, block_bytes)
        yield from schedule.copies(places, most, every)


@attrs.frozen(kw_only=True)
class SlabReport:
    """A slab was opened or closed. The figures are measured afterwards."""

    slab: int
    capacity_tokens: int
    bytes: int
    pool_slabs: int
    pool_bytes: int


@attrs.frozen(kw_only=True)
class MemoryReport:
    """
    What the engine held when it was measured.

    Attributes:
        slab_bytes, block_bytes: the size of their arrays, including those that grow.
        weights_bytes: the size of the model's arrays.
        active_bytes: all arrays, by MLX's count.
        cache_bytes: freed arrays that MLX keeps for new ones.
    """

    slab_bytes: int = 0
    block_bytes: int = 0
    weights_bytes: int = 0
    active_bytes: int = 0
    cache_bytes: int = 0


@attrs.frozen(kw_only=True)
class Drawn:
    """
    A token drawn from a row of logits.

    Attributes:
        top: (token id, log-probability) of the likeliest tokens, likeliest first; as many as the
            ``DrawSpec`` wants.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class PassReport:
    """
    A pass was run.

    Attributes:
        start, end: the range of positions whose KV it added.
        ran: the token ids that the pass ran, read back from the device.
        coverage: what each layer holds afterwards.
        drawn: the token drawn from its last row; None if none was to be drawn.
        accepted: the tokens drawn from the rows before the last one: the tokens of the draft that
            the pass accepted.
        drafted: how many tokens of a draft the pass computed, accepted or not.
        again: digests of the row before ``start`` in all layers, as it was held and as the pass
            computed it; None if it did not.
    """

    start: int
    end: int
    ran: tuple[int, ...]
    coverage: Coverage
    drawn: Drawn | None
    duration_us: int
    accepted: tuple[Drawn, ...] = ()
    drafted: int = 0
    again: tuple[str, str] | None = None

    @property
    def all_drawn(self) -> tuple[Drawn, ...]:
        """All tokens drawn, in order."""
        return self.accepted if self.drawn is None else (*self.accepted, self.drawn)


RowReport: TypeAlias = PassReport | EngineFault | GrammarDeadEnd | None
"""What came of a row of a decode pass: a report, its own fault, or None for a row not in use."""


@attrs.frozen(kw_only=True)
class TrimReport:
    """
    A slab was cut back.

    Attributes:
        cached_tokens: where its first layer ended before.
        coverage: what each layer holds afterwards.
    """

    cached_tokens: int
    coverage: Coverage


@attrs.frozen(kw_only=True)
class SealReport:
    """The KV of a block was copied, hashed and, if ``stored``, kept in memory."""

    digest: str
    bytes: int
    stored: bool
    memory_blocks: int
    memory_bytes: int


@attrs.frozen(kw_only=True)
class ShareReport:
    """Blocks were copied into a slab."""

    digests: tuple[str, ...]
    coverage: Coverage
    duration_us: int


@attrs.frozen(kw_only=True)
class EvictReport:
    """A block left memory."""

    key: str
    bytes: int
    memory_blocks: int
    memory_bytes: int


@attrs.frozen(kw_only=True)
class FileReport:
    """
    A block file was written or removed. Totals are measured afterwards.

    Attributes:
        digest: the digest of the KV that was written; empty for a file that was removed.
    """

    key: str
    digest: str
    bytes: int
    disk_blocks: int
    disk_bytes: int


@attrs.frozen(kw_only=True)
class UnwrittenReport:
    """
    A block file could not be written. No part of it remains.

    Attributes:
        reason: the system's error.
        nowhere: whether no other block could be written now: the disk is full, or the folder is
            lost.
        is_lost: whether the folder is gone, or cannot be written any more.
    """

    key: str
    reason: str
    nowhere: bool
    is_lost: bool


@attrs.frozen(kw_only=True)
class UnremovedReport:
    """
    A block file could not be removed. It still exists and counts.

    Attributes:
        reason: the system's error.
    """

    key: str
    reason: str


@attrs.frozen(kw_only=True)
class LoadReport:
    """A block was read from its file into memory."""

    key: str
    digest: str
    bytes: int
    memory_blocks: int
    memory_bytes: int
    duration_us: int


@attrs.frozen(kw_only=True)
class RejectReport:
    """
    A block's file is not as it was written, and no longer counts.

    Attributes:
        moved_to: its new path below the folder of blocks, or None if nothing is left of it.
    """

    key: str
    reason: FileFault
    moved_to: str | None


@attrs.frozen(kw_only=True)
class ScanReport:
    """
    The block files of earlier runs were scanned.

    Attributes:
        rejected: files that the journal knows of and that are missing or damaged.
        removed_files: the number of other files of this journal's runs, which were removed.
        left_files: the number of files of other journals, or that could not be removed.
        disk_blocks, disk_bytes: the block files that are left.
    """

    rejected: tuple[RejectReport, ...]
    removed_files: int
    left_files: int
    disk_blocks: int
    disk_bytes: int


@attrs.frozen
class SelfTestFault:
    """
    What was raised in the middle of a check. Its text alone: an exception would keep the engine
    alive.
    """

    text: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> SelfTestFault:
        """The text and the traceback of an exception."""
        name, text = type(error).__name__, str(error)
        return cls(f"{name}: {text}" if text else name, "".join(traceback.format_exception(error)))


@attrs.frozen(kw_only=True)
class PassShapes:
    """
    The shapes of passes that an earlier self-test found.

    Attributes:
        decode: the numbers of rows that a decode pass may have; empty for W alone.
        row_class: of prefill passes; None for those of the canonical schedule.
        row_class_reason: why there is none, or not the cheapest; empty if it is.
        without_drafts: why decode passes have no draft rows; empty if they may.
    """

    decode: Sequence[int] = ()
    row_class: RowClass | None = None
    row_class_reason: str = ""
    without_drafts: str = NOT_COMPARED


@attrs.frozen(kw_only=True)
class SelfTestReport:
    """
    The engine was tested on the loaded model and this device.

    Attributes:
        findings: whether each check holds, by its name, in order.
        error_max: the largest relative difference from mlx-lm's plain pass.
        decode_shapes: the numbers of rows that give a row of a decode pass the bits of W rows,
            ascending, the last one W. Empty if that was not measured.
        row_class: the prefill passes that give a token the same bits, which all checks ran with;
            None if these are only the passes of the canonical schedule.
        row_class_reason: why there is no row class, or not the cheapest; empty if it is.
        row_class_late: whether that is because there was no time to look for a cheaper one.
        without_drafts: why decode passes have no draft rows; empty if these have the bits of
            single passes.
        fault: what ended the last check in ``findings``; None if nothing did.
    """

    findings: Mapping[str, bool]
    error_max: float
    duration_us: int
    decode_shapes: tuple[int, ...] = ()
    row_class: RowClass | None = None
    row_class_reason: str = ""
    row_class_late: bool = False
    without_drafts: str = NOT_COMPARED
    fault: SelfTestFault | None = None

    @property
    def passed(self) -> bool:
        """Whether every check holds that the promises rest on."""
        holds = all(holds for name, holds in self.findings.items() if name != "naive_differs")
        return holds and self.fault is None
