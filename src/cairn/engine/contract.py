"""
The contract between the server and an engine, and what the server needs of a model's tokenizer.

Rules for every engine:

1. One thread alone calls it. Calls never overlap.
2. A report is *measured* after the change (from the arrays, from the layers' own counters) and
   never copied from the arguments: the journal's invariants compare reports with what was asked.
3. It decides nothing. What to run, keep, copy or evict comes from the caller.

Units: positions and sizes of sequences are tokens, half-open ranges are ``[start, end)``, sizes are
bytes, durations microseconds. A slab is named by the number that ``open_slab`` reports; numbers are
never used twice. A block is named by its key (``cairn.journal.keys``).

``engine.mlx.engine.MlxEngine`` runs models; ``tests.support.fake_engine.FakeEngine`` runs none.
``tests/engine/test_contract.py`` holds both to what is written here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from pathlib import Path

    from cairn.engine.machine.memory import Budgets
    from cairn.engine.model.embedding_files import Matryoshka
    from cairn.engine.reports import (
        DecodeRow,
        DrawSpec,
        EvictReport,
        FileReport,
        LoadReport,
        MemoryReport,
        ModelFacts,
        PassReport,
        RejectReport,
        RowReport,
        ScanReport,
        SealReport,
        SelfTestReport,
        ShareReport,
        SlabReport,
        TrimReport,
        UnremovedReport,
        UnwrittenReport,
    )
    from cairn.engine.row_class import RowClass
    from cairn.journal.events import SelfTestFinished


class Engine(Protocol):
    """A loaded model with its slabs (KV of sessions) and sealed blocks (the prefix cache)."""

    @property
    @abstractmethod
    def decode_rows(self) -> int:
        """W, the most rows of a decode pass."""

    @property
    @abstractmethod
    def decode_shapes(self) -> Sequence[int]:
        """
        The numbers of rows that a decode pass may have, ascending, the last one W. The bits of a
        row are the same in any of them.
        """

    @property
    @abstractmethod
    def row_class(self) -> RowClass | None:
        """
        Which prefill passes give a token the same bits, wherever they begin. None if only those of
        the canonical schedule do.
        """

    @property
    @abstractmethod
    def without_drafts(self) -> str:
        """
        Why a decode pass has no draft rows; empty if it may. A draft row then has the bits that
        its token has in a pass of its own.
        """

    @property
    @abstractmethod
    def grows(self) -> bool:
        """Whether slabs grow with the tokens in them, so that decode passes change ``memory()``."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """What is held now. Modifies nothing."""

    @abstractmethod
    def give_back_memory(self) -> None:
        """Return freed memory to the operating system. Modifies no slab and no block."""

    # --- slabs --------------------------------------------------------------------------------

    @abstractmethod
    def open_slab(self, capacity_tokens: int) -> SlabReport:
        """Allocate an empty slab for at most ``capacity_tokens`` tokens."""

    @abstractmethod
    def close_slab(self, slab: int) -> SlabReport:
        """
        Release a slab.

        Raises:
            EngineFault: it is not open.
        """

    @abstractmethod
    def held_tokens(self, slab: int) -> int:
        """
        The position after the last token that a slab holds. Modifies nothing.

        Raises:
            EngineFault: the slab is not open.
        """

    @abstractmethod
    def trim(self, slab: int, end: int) -> TrimReport:
        """
        Cut a slab back to ``[0, end)``.

        Raises:
            CannotTrim: KV or a state that ``end`` needs is gone. The slab is as it was.
            EngineFault: the slab is not open.
        """

    # --- passes -------------------------------------------------------------------------------

    @abstractmethod
    def run_chunk(
        self,
        slab: int,
        ids: Sequence[int],
        draw: DrawSpec | None,
        *,
        again: int | None = None,
    ) -> PassReport:
        """
        Run one prefill or settling pass: add the KV of ``ids`` at the end of a slab.

        Args:
            ids: 1 to C token ids, from a multiple of C on; with a row class, 1 to
                ``row_class.most_tokens(start)``, from any position on.
            draw: how to draw a token from the last row; None to draw none.
            again: the token of the slab's last row, to compute that row again (grain 1). The slab
                keeps the row that it has.

        Raises:
            GrammarDeadEnd: the grammar allows no token. Nothing was run.
            EngineFault: the slab is not open or has no room, there are more ids than the row class
                allows, or a log-probability is not finite (``NotFinite``). The slab may hold the KV
                of ``ids`` only in the last case.
        """

    @abstractmethod
    def decode(self, rows: Sequence[DecodeRow | None]) -> Sequence[RowReport]:
        """
        Run one decode pass: add one token's KV to the slab of each row, and draw its next token.

        The tokens of a row's draft have rows of their own at the next positions. A token of a draft
        is accepted if the row before it was accepted and drew it. The KV of the others is cut off
        again, so that all is as after as many passes of one token. A draft ends before a token that
        the grammar does not allow, and before a row whose log-probability is not finite.

        A row that fails (slab not open or full, no token allowed, log-probability not finite) gets
        the exception as its report; the other rows are not affected.

        Args:
            rows: as many as one of ``decode_shapes``, the tokens of drafts included
                (``reports.rows_of``); None for a row without a session.

        Returns:
            A report for each row, in order; None for a row without a session.

        Raises:
            EngineFault: the number of rows is not among ``decode_shapes``, or there are drafts and
                ``without_drafts`` says why not. Nothing was run.
        """

    # --- blocks in memory ---------------------------------------------------------------------

    @abstractmethod
    def seal(self, slab: int, key: str, start: int, end: int, *, store: bool) -> SealReport:
        """
        Copy the KV of ``[start, end)`` into a sealed block and hash it. Does not modify what the
        slab holds.

        Args:
            store: whether to keep the block in memory under ``key``; otherwise it is only hashed.
                A block that is there already stays as it is.

        Raises:
            EngineFault: the slab is not open.
        """

    @abstractmethod
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
        Copy sealed blocks into a slab, in order, and report the digests of the copies.

        Args:
            start: the position of the first block; it is where the slab ends.
            places: the position of each block, where there are gaps between them (``sink_window``).
            rows: copy no more than the first rows of the only block (grain 1). The digest is that
                of the copied rows and the block's other rows together.

        Raises:
            EngineFault: the slab is not open or ends elsewhere, a block is not in memory, or it
                has not so many rows, or there is not exactly one. The slab is as it was.
        """

    @abstractmethod
    def digest_of(self, key: str) -> str:
        """The digest of a block's KV in memory now; empty if it is not there. Modifies nothing."""

    @abstractmethod
    def evict(self, key: str) -> EvictReport:
        """
        Drop a block from memory. Its file stays.

        Raises:
            EngineFault: it is not in memory.
        """

    # --- block files --------------------------------------------------------------------------

    @abstractmethod
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
        Scan the block files of earlier runs. Only afterwards do the methods below do anything.
        Removes files that earlier runs left unfinished.

        Args:
            on_record: the key of each file that the journal knows of, with its size.
            run: the id of this run of the server.
            earlier: the ids of earlier runs on this journal.
            known: the keys of all blocks that the journal knows of.
            keep_aside: whether damaged files that were set aside stay.
            shared: whether the folder is a node's, beside those of other nodes.
        """

    @abstractmethod
    def spill(
        self, key: str, span: tuple[int, int], expected_digest: str, budget_bytes: int
    ) -> FileReport | UnwrittenReport | None:
        """
        Write a block in memory to a file. A block whose digest is not ``expected_digest`` is not
        written; the report then has the digest that it has, and 0 bytes.

        Args:
            span: the range of tokens that the block covers.
            budget_bytes: the most that all files may take afterwards.

        Returns:
            None if there is nothing to write (not in memory, or it has a file) or it would exceed
            the budget.
        """

    @abstractmethod
    def load(self, key: str, expected_digest: str) -> LoadReport | RejectReport | None:
        """
        Read a block from its file into memory. A file that is not what was written is rejected:
        removed or set aside, and no longer counted.

        Returns:
            None if the block is in memory already or has no file.
        """

    @abstractmethod
    def adopt(
        self, key: str, node: str, expected_digest: str, size: int
    ) -> LoadReport | RejectReport | None:
        """
        Read a block from the file of another node into memory, also if it is there, so that the two
        are compared. A file that is not what was written is rejected, and stays as it is.

        Args:
            node: the one that sealed it.
            expected_digest: the digest that its KV must have by that node's journal.
            size: of its KV, in bytes.

        Returns:
            None if that node has no file of it that can be read, or nodes share no files.
        """

    @abstractmethod
    def has_file_of(self, key: str, node: str) -> bool:
        """Whether another node has a file of a block, as far as is known without reading it."""

    @abstractmethod
    def drop_file(self, key: str) -> FileReport | UnremovedReport | None:
        """
        Remove the file of a block.

        Returns:
            None if it has none.
        """

    @abstractmethod
    def drop_aside(self, keys: Collection[str]) -> UnremovedReport | None:
        """
        Remove the files of blocks that were set aside, under any fingerprint.

        Returns:
            The first that could not be removed; None if none is left.
        """


class Detokenizer(Protocol):
    """A streaming detokenizer: token ids in, text out. ``copy.copy`` makes an independent one."""

    text: str

    def reset(self) -> None:
        """Begin another text."""

    def add_token(self, token: int) -> None:
        """Take the next token. ``text`` may lag behind until a character is complete."""

    def finalize(self) -> None:
        """End the text: incomplete characters are given out."""


class Tokenizer(Protocol):
    """What rendering and encoding a prompt needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text."""

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        """
        A conversation to text.

        Raises:
            Exception: the template is the model's own code, so anything may come out of it.
        """


class ModelTokenizer(Tokenizer, Protocol):
    """
    What a server needs of a model's tokenizer: mlx-lm's ``TokenizerWrapper`` has it.

    Attributes:
        has_thinking, has_tool_calling: whether the model's format has thoughts, and calls.
        think_start, think_end: the markers around thoughts. To be read with ``has_thinking`` only.
        tool_call_start, tool_call_end: the markers around a call; the second is empty if a call
            ends with the answer. To be read with ``has_tool_calling`` only.
        tool_parser: reads the text of a call, given the tools; None without calls.
    """

    @property
    def has_thinking(self) -> bool: ...

    @property
    def think_start(self) -> str: ...

    @property
    def think_end(self) -> str: ...

    @property
    def has_tool_calling(self) -> bool: ...

    @property
    def tool_call_start(self) -> str: ...

    @property
    def tool_call_end(self) -> str: ...

    @property
    def tool_parser(self) -> Callable[[str, Any], Any] | None: ...

    @property
    def detokenizer(self) -> Detokenizer:
        """A new streaming detokenizer."""


@attrs.frozen(kw_only=True)
class EmbedderFacts:
    """
    Facts about an embedding model that is loaded.

    Attributes:
        name: what clients see.
        fingerprint: covers everything that can change a bit of a vector.
        dimensions: the length of a vector.
        matryoshka: to which lengths vectors may be cut.
        context_tokens: the longest text.
        vocabulary_tokens: token ids are below it.
        pass_tokens: the most tokens of a pass.
        dtype: in which it computes, and why, for people.
        memory_bytes: of its weights, and of the caches of the longest text.
    """

    name: str
    fingerprint: str
    dimensions: int
    matryoshka: Matryoshka
    context_tokens: int
    vocabulary_tokens: int
    pass_tokens: int
    dtype: str
    memory_bytes: int


@attrs.frozen(kw_only=True)
class EmbedReport:
    """
    What a pass over a text has computed.

    Attributes:
        tokens: measured: the rows of the pass.
        vector: the last token's state as little-endian float32, not scaled, if the text is
            complete; else None.
        duration_us: of the pass.
    """

    tokens: int
    vector: bytes | None
    duration_us: int


class Embedder(Protocol):
    """
    An embedding model. One thread alone calls its methods. It has the state of one text at a time.
    """

    facts: EmbedderFacts
    tokenizer: Tokenizer

    @abstractmethod
    def run_pass(self, ids: Sequence[int], start: int) -> EmbedReport:
        """
        Compute the next pass over a text. Modifies the state of the text; at 0 a new text begins.

        Args:
            ids: of the whole text.
            start: where the pass begins: 0, or where the last one over these ids ended.

        Raises:
            EngineFault: no pass may begin there, or the vector is not finite.
        """

    @abstractmethod
    def drop(self) -> None:
        """Drop the state of a text that is not complete."""


@attrs.frozen(kw_only=True)
class StartedEngine:
    """
    An engine that is ready to serve a model, and what its start found out.

    Attributes:
        directory: the model's; ``adapter`` is the directory of an adapter over it.
        self_test: what the self-test found; None if it did not run.
        known: the result of an earlier start, which took its place; None if it ran.
        narrowed: the facts and the self-test of a fuller setting that failed: decode passes
            have one row instead of several, or nothing is reused. None if nothing failed.
        budgets: of slabs and blocks, in bytes.
        tight: the figures, if the operator accepted a model that may not fit in memory; else None.
    """

    engine: Engine
    facts: ModelFacts
    tokenizer: ModelTokenizer = attrs.field(repr=False)
    directory: Path
    adapter: Path | None
    self_test: SelfTestReport | None
    known: SelfTestFinished | None = None
    narrowed: tuple[ModelFacts, SelfTestReport] | None
    budgets: Budgets
    tight: str | None
