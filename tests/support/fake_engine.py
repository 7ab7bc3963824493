"""
A server without a model, for tests of the actors. Everything except engine and tokenizer is real.
The engine holds token ids instead of KV, so that its reports are measured. The tokenizer has one
token for each character.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from cairn.actors.boot import Settings
from cairn.engine.contract import (
    Embedder,
    EmbedderFacts,
    EmbedReport,
    Engine,
    ModelTokenizer,
    StartedEngine,
)
from cairn.engine.errors import EngineFault, GrammarDeadEnd
from cairn.engine.machine.memory import Budgets
from cairn.engine.model.embedding_files import Matryoshka
from cairn.engine.reports import (
    DecodeRow,
    Drawn,
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
    ShareReport,
    SlabReport,
    TrimReport,
    rows_of,
)
from cairn.engine.row_class import RowClass
from cairn.journal.keys import fingerprint_of, ids_hash

NO_MODEL = Path("fake")
"""In place of a model's directory."""

LAYERS = 4
TOKEN_BYTES = 4096
ROWS = 4
FACTS = ModelFacts(
    name="fake",
    fingerprint=fingerprint_of({"model": "fake"}),
    fields={"model": "fake"},
    layers=LAYERS,
    kv_token_bytes=TOKEN_BYTES,
    block_tokens=64,
    decode_rows=ROWS,
    context_tokens=8192,
    reusable=True,
    eos_ids=frozenset({0}),
    vocabulary_tokens=128,
)


FLEETS: dict[tuple[Path, str], dict[str, _Block]] = {}
"""The files of nodes that share blocks, by the folder of the fleet and the name of the node."""


class FakeEngine(Engine):
    """
    An engine whose slabs and blocks hold token ids. It draws the letters of the alphabet.

    Attributes:
        gave_back: how often ``give_back_memory`` was called.
    """

    decode_rows = ROWS
    decode_shapes: Sequence[int] = (2, ROWS)
    row_class: RowClass | None = None
    without_drafts = ""
    grows = False

    def __init__(self) -> None:
        self._slabs: dict[int, list[int]] = {}
        self._capacities: dict[int, int] = {}
        self._blocks: dict[str, _Block] = {}
        self._files: dict[str, _Block] | None = None
        self._fleet: Path | None = None
        self._opened = 0
        self.gave_back = 0

    def memory(self) -> MemoryReport:
        # Slabs count by their capacity, as they are allocated.
        return MemoryReport(
            slab_bytes=sum(self._capacities.values()) * TOKEN_BYTES,
            block_bytes=_bytes_of(self._blocks),
        )

    def give_back_memory(self) -> None:
        self.gave_back += 1

    def open_slab(self, capacity_tokens: int) -> SlabReport:
        self._opened += 1
        self._slabs[self._opened] = []
        self._capacities[self._opened] = capacity_tokens
        return self._slab_report(self._opened, capacity_tokens)

    def close_slab(self, slab: int) -> SlabReport:
        self._get(slab)
        del self._slabs[slab]
        return self._slab_report(slab, self._capacities.pop(slab))

    def held_tokens(self, slab: int) -> int:
        return len(self._get(slab))

    def trim(self, slab: int, end: int) -> TrimReport:
        held = len(self._get(slab))
        del self._slabs[slab][end:]
        return TrimReport(cached_tokens=held, coverage=self._coverage(slab))

    def run_chunk(
        self,
        slab: int,
        ids: Sequence[int],
        draw: DrawSpec | None,
        *,
        again: int | None = None,
    ) -> PassReport:
        held = self._get(slab)
        start = len(held)
        if again is not None and not held:
            raise EngineFault(f"slab {slab} has no row to compute again")
        _check(draw)
        if self.row_class is not None:
            self.row_class.rows(start, len(ids), FACTS.context_tokens)
        if start + len(ids) > self._capacities[slab]:
            raise EngineFault(f"slab {slab} has no room for {len(ids)} tokens")
        row = None if again is None else (ids_hash(held), ids_hash((*held[:-1], again)))
        self._slabs[slab].extend(ids)
        return attrs.evolve(self._pass_report(slab, start, draw is not None), again=row)

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[RowReport]:
        if rows_of(rows) not in self.decode_shapes:
            raise EngineFault(f"a decode pass has {self.decode_shapes} rows, not {rows_of(rows)}")
        if self.without_drafts and rows_of(rows) > len(rows):
            raise EngineFault(self.without_drafts)
        return [None if row is None else self._decoded(row) for row in rows]

    def seal(self, slab: int, key: str, start: int, end: int, *, store: bool) -> SealReport:
        ids = tuple(self._get(slab))
        block = _Block(ids=ids[start:end], digest=ids_hash(ids[:end]))
        if store:
            self._blocks.setdefault(key, block)
        return SealReport(
            digest=block.digest,
            bytes=block.bytes,
            stored=store,
            memory_blocks=len(self._blocks),
            memory_bytes=_bytes_of(self._blocks),
        )

    def share(
        self,
        slab: int,
        keys: Sequence[str],
        start: int,
        places: Sequence[int] | None = None,
        *,
        rows: int | None = None,
    ) -> ShareReport:
        held = self._get(slab)
        blocks = [self._block(key) for key in keys]
        if len(held) != start:
            raise EngineFault(f"blocks at {start} on a slab that ends at {len(held)}")
        if rows is not None and not (len(blocks) == 1 and 0 < rows <= len(blocks[0].ids)):
            raise EngineFault(f"no first {rows} rows of {len(blocks)} blocks")
        digests = []
        for block in blocks:
            held.extend(block.ids[:rows])
            digests.append(ids_hash((*held, *(block.ids[rows:] if rows is not None else ()))))
        return ShareReport(
            digests=tuple(digests),
            coverage=self._coverage(slab),
            duration_us=1,
        )

    def digest_of(self, key: str) -> str:
        return self._blocks[key].digest if key in self._blocks else ""

    def evict(self, key: str) -> EvictReport:
        block = self._block(key)
        del self._blocks[key]
        return EvictReport(
            key=key,
            bytes=block.bytes,
            memory_blocks=len(self._blocks),
            memory_bytes=_bytes_of(self._blocks),
        )

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
        # Its files are in memory, so no earlier run can have left any.
        self._files = {}
        if shared:
            self._fleet = folder.parent
            FLEETS[self._fleet, folder.name] = self._files
        return ScanReport(
            rejected=tuple(
                RejectReport(key=key, reason="missing", moved_to=None) for key in sorted(on_record)
            ),
            removed_files=0,
            left_files=0,
            disk_blocks=0,
            disk_bytes=0,
        )

    def spill(
        self, key: str, span: tuple[int, int], expected_digest: str, budget_bytes: int
    ) -> FileReport | None:
        if self._files is None or key in self._files or key not in self._blocks:
            return None
        block = self._blocks[key]
        if block.digest != expected_digest:
            return self._file_report(key, block.digest, 0)
        if _bytes_of(self._files) + block.bytes > budget_bytes:
            return None
        self._files[key] = block
        return self._file_report(key, block.digest, block.bytes)

    def load(self, key: str, expected_digest: str) -> LoadReport | RejectReport | None:
        if self._files is None or key not in self._files or key in self._blocks:
            return None
        block = self._files[key]
        if block.digest != expected_digest:
            del self._files[key]
            return RejectReport(key=key, reason="digest", moved_to=None)
        self._blocks[key] = block
        return self._load_report(key, block)

    def _load_report(self, key: str, block: _Block) -> LoadReport:
        return LoadReport(
            key=key,
            digest=block.digest,
            bytes=block.bytes,
            memory_blocks=len(self._blocks),
            memory_bytes=_bytes_of(self._blocks),
            duration_us=1,
        )

    def adopt(
        self, key: str, node: str, expected_digest: str, size: int
    ) -> LoadReport | RejectReport | None:
        if self._fleet is None:
            return None
        files = FLEETS.get((self._fleet, node), {})
        if key not in files:
            return None
        block = files[key]
        if block.digest != expected_digest:
            del files[key]
            return RejectReport(key=key, reason="digest", moved_to=None)
        self._blocks.setdefault(key, block)
        return self._load_report(key, block)

    def has_file_of(self, key: str, node: str) -> bool:
        return self._fleet is not None and key in FLEETS.get((self._fleet, node), {})

    def drop_file(self, key: str) -> FileReport | None:
        if self._files is None or key not in self._files:
            return None
        return self._file_report(key, "", self._files.pop(key).bytes)

    def drop_aside(self, keys: Collection[str]) -> None:
        """It sets no file aside."""

    def _get(self, slab: int) -> list[int]:
        if slab not in self._slabs:
            raise EngineFault(f"slab {slab} is not held")
        return self._slabs[slab]

    def _block(self, key: str) -> _Block:
        if key not in self._blocks:
            raise EngineFault(f"block {key} is not in memory")
        return self._blocks[key]

    def _decoded(self, row: DecodeRow) -> RowReport:
        """The passes of a token each that the draft spares, as one."""
        try:
            if len(self._get(row.slab)) + 1 + len(row.draft) > self._capacities[row.slab]:
                raise EngineFault(f"slab {row.slab} is full")
            passes = [self._one(row.slab, row.token, row.draw)]
        except (EngineFault, GrammarDeadEnd) as fault:
            return fault
        draw, drafted = row.draw, 0
        for token in row.draft:
            if draw.matcher is not None and not draw.matcher.allowed(draw.answer)[token]:
                break
            if draw.matcher is not None:
                draw = attrs.evolve(draw, matcher=draw.matcher.fork())
            draw = draw.after(token)
            try:
                _check(draw)
            except GrammarDeadEnd:
                break
            drafted += 1
            assert passes[-1].drawn is not None
            if passes[-1].drawn.token == token and len(passes) == drafted:
                passes.append(self._one(row.slab, token, draw))
                if row.draw.matcher is not None and draw.matcher is not None:
                    row.draw.matcher.adopt(draw.matcher)
        drawn = tuple(one.drawn for one in passes if one.drawn is not None)
        return attrs.evolve(
            passes[-1],
            start=passes[0].start,
            ran=tuple(token for one in passes for token in one.ran),
            accepted=drawn[:-1],
            drafted=drafted,
        )

    def _one(self, slab: int, token: int, draw: DrawSpec) -> PassReport:
        _check(draw)
        start = len(self._get(slab))
        self._slabs[slab].append(token)
        return self._pass_report(slab, start, True)

    def _pass_report(self, slab: int, start: int, draws: bool) -> PassReport:
        ids = self._slabs[slab]
        drawn = Drawn(token=ord("a") + len(ids) % 26, logprob=-1.0) if draws else None
        return PassReport(
            start=start,
            end=len(ids),
            ran=tuple(ids[start:]),
            coverage=self._coverage(slab),
            drawn=drawn,
            duration_us=1,
        )

    def _coverage(self, slab: int) -> tuple[tuple[int, int, int], ...]:
        return ((LAYERS, 0, len(self._slabs[slab])),)

    def _slab_report(self, slab: int, capacity_tokens: int) -> SlabReport:
        return SlabReport(
            slab=slab,
            capacity_tokens=capacity_tokens,
            bytes=capacity_tokens * TOKEN_BYTES,
            pool_slabs=len(self._slabs),
            pool_bytes=sum(self._capacities.values()) * TOKEN_BYTES,
        )

    def _file_report(self, key: str, digest: str, size: int) -> FileReport:
        assert self._files is not None
        return FileReport(
            key=key,
            digest=digest,
            bytes=size,
            disk_blocks=len(self._files),
            disk_bytes=_bytes_of(self._files),
        )


@attrs.frozen(kw_only=True)
class _Block:
    ids: tuple[int, ...]
    digest: str

    @property
    def bytes(self) -> int:
        return len(self.ids) * TOKEN_BYTES


def _bytes_of(blocks: Mapping[str, _Block]) -> int:
    return sum(block.bytes for block in blocks.values())


def _check(draw: DrawSpec | None) -> None:
    """Raise GrammarDeadEnd if no token is allowed. Otherwise ignore which ones are."""
    if draw is not None and draw.matcher is not None:
        draw.matcher.allowed(draw.answer)


class FakeTokenizer(ModelTokenizer):
    """
    A tokenizer of one token for each character, and its own streaming detokenizer.

    Its template puts thoughts in brackets, which are empty if thinking is off. It drops both after
    the next user message. If there are tools, "x" and "z" are the markers of a call, and the
    letter between them names its function.
    """

    has_thinking = False
    think_start = think_end = ""
    has_tool_calling = True
    tool_call_start, tool_call_end = "x", "z"

    def __init__(self) -> None:
        self.text = ""

    @property
    def detokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    @staticmethod
    def tool_parser(text: str, tools: Any) -> dict[str, Any]:
        """A call of the function "xy": a word alone is not taken for a call."""
        return {"name": f"x{text}", "arguments": {}}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, enable_thinking: bool = True, **settings: Any
    ) -> str:
        last_user = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=-1)
        text = ""
        for i, message in enumerate(messages):
            thought = message.get("reasoning_content")
            text += f"<{message['role']}>"
            text += f"[{thought}]" if thought and i > last_user else ""
            text += f"{message['content']}{message.get('tool_calls', '')};"
        return f"{text}<assistant>{'' if enable_thinking else '[]'}"

    def reset(self) -> None:
        self.text = ""

    def add_token(self, token: int) -> None:
        self.text += chr(token)

    def finalize(self) -> None:
        pass


class FakeEmbedder(Embedder):
    """
    An embedding model whose states are made of the ids of a text.

    Attributes:
        passes: the first id of each pass, in order.
        held: set in a pass; ``go`` has to be set before it ends.
        fails: raised in the next pass, if set.
    """

    def __init__(self, name: str = "vectors") -> None:
        self.facts = EmbedderFacts(
            name=name,
            fingerprint=fingerprint_of({"model": name}),
            dimensions=3,
            matryoshka=Matryoshka(lengths=(2,)),
            context_tokens=32,
            vocabulary_tokens=128,
            pass_tokens=4,
            dtype="float32",
            memory_bytes=1000,
        )
        self.tokenizer = FakeTokenizer()
        self.passes: list[int] = []
        self.held, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.fails: Exception | None = None
        self._ids: tuple[int, ...] = ()

    def run_pass(self, ids: Sequence[int], start: int) -> EmbedReport:
        self.held.set()
        assert self.go.wait(60)
        if self.fails is not None:
            raise self.fails
        if tuple(ids[:start]) != (self._ids if start else ()):
            raise EngineFault(f"no pass begins at {start}")
        self.passes.append(ids[start])
        self._ids = tuple(ids[: start + self.facts.pass_tokens])
        complete = len(self._ids) == len(ids)
        return EmbedReport(
            tokens=len(self._ids) - start,
            vector=array("f", (ids[0], ids[-1], len(ids))).tobytes() if complete else None,
            duration_us=1,
        )

    def drop(self) -> None:
        self._ids = ()


def started(settings: Settings, *_: Any) -> StartedEngine:
    """A started engine without a model, in place of ``load.start_on_mlx``."""
    return StartedEngine(
        engine=FakeEngine(),
        facts=attrs.evolve(FACTS, block_tokens=settings.block_tokens or FACTS.block_tokens),
        tokenizer=FakeTokenizer(),
        directory=NO_MODEL,
        adapter=None,
        self_test=None,
        narrowed=None,
        budgets=Budgets(
            pool_bytes=settings.pool_bytes or 0, blocks_bytes=settings.blocks_bytes or 0
        ),
        tight=None,
    )
