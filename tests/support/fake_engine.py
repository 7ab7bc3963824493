"""
A server without a model: its engine keeps token ids where a model keeps KV, so that what it
measures is measured, and its tokenizer knows a character a token. All else is the real thing.

For tests of what the actors do. What bits an answer has is the gate's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cairn.actors.boot import Settings
from cairn.engine.reports import (
    DecodeRow,
    Drawn,
    EvictReport,
    MemoryReport,
    ModelFacts,
    PassReport,
    SealReport,
    ShareReport,
    SlabReport,
    TrimReport,
    Wanted,
)
from cairn.journal.keys import ids_hash

LAYERS = 4
TOKEN_BYTES = 4096
ROWS = 4


class Numbers:
    """
    Slabs and blocks of token ids. What it says is the alphabet.

    Attributes:
        gave_back: how often freed memory was to leave the process.
    """

    decode_rows = ROWS
    grows = False

    def __init__(self) -> None:
        self._slabs: dict[int, list[int]] = {}
        self._capacities: dict[int, int] = {}
        self._blocks: dict[str, tuple[tuple[int, ...], str]] = {}
        self._opened = 0
        self.gave_back = 0

    def open_slab(self, capacity_tokens: int) -> SlabReport:
        """An empty one."""
        self._opened += 1
        self._slabs[self._opened] = []
        self._capacities[self._opened] = capacity_tokens
        return self._slab_report(self._opened, capacity_tokens)

    def close_slab(self, slab: int) -> SlabReport:
        """With all that is in it."""
        del self._slabs[slab]
        return self._slab_report(slab, self._capacities.pop(slab))

    def give_back_memory(self) -> None:
        """There is none."""
        self.gave_back += 1

    def memory(self) -> MemoryReport:
        """Slabs count by their capacity, as they are allocated."""
        return MemoryReport(
            slab_bytes=sum(self._capacities.values()) * TOKEN_BYTES,
            block_bytes=self._measure()[1],
        )

    def held_tokens(self, slab: int) -> int:
        """How many are in it."""
        return len(self._slabs[slab])

    def run_chunk(self, slab: int, ids: Sequence[int], wanted: Wanted | None) -> PassReport:
        """A pass over some."""
        start = len(self._slabs[slab])
        self._slabs[slab].extend(ids)
        return self._pass_report(slab, start, wanted is not None)

    def decode(self, rows: Sequence[DecodeRow | None]) -> list[PassReport | None]:
        """A pass over one token a row."""
        return [None if row is None else self._decoded(row) for row in rows]

    def trim(self, slab: int, end: int) -> TrimReport:
        """Cut back."""
        held = len(self._slabs[slab])
        del self._slabs[slab][end:]
        return TrimReport(cached_tokens=held, coverage=self._coverage(slab))

    def share(
        self, slab: int, keys: Sequence[str], start: int, places: Sequence[int] | None = None
    ) -> ShareReport:
        """Copy blocks in."""
        digests = []
        for key in keys:
            ids, digest = self._blocks[key]
            self._slabs[slab].extend(ids)
            digests.append(digest)
        return ShareReport(digests=tuple(digests), coverage=self._coverage(slab), duration_us=1)

    def seal(self, slab: int, key: str, start: int, end: int, *, store: bool) -> SealReport:
        """Copy a block out."""
        ids = tuple(self._slabs[slab])
        digest = ids_hash(ids[:end])
        if store:
            self._blocks.setdefault(key, (ids[start:end], digest))
        blocks, size = self._measure()
        return SealReport(
            digest=digest,
            bytes=(end - start) * TOKEN_BYTES,
            stored=store,
            memory_blocks=blocks,
            memory_bytes=size,
        )

    def evict(self, key: str) -> EvictReport:
        """One block less."""
        ids, _ = self._blocks.pop(key)
        blocks, size = self._measure()
        return EvictReport(
            key=key, bytes=len(ids) * TOKEN_BYTES, memory_blocks=blocks, memory_bytes=size
        )

    def _decoded(self, row: DecodeRow) -> PassReport:
        start = len(self._slabs[row.slab])
        self._slabs[row.slab].append(row.token)
        return self._pass_report(row.slab, start, True)

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

    def _measure(self) -> tuple[int, int]:
        return len(self._blocks), sum(len(ids) for ids, _ in self._blocks.values()) * TOKEN_BYTES

    def _slab_report(self, slab: int, capacity_tokens: int) -> SlabReport:
        return SlabReport(
            slab=slab,
            capacity_tokens=capacity_tokens,
            bytes=capacity_tokens * TOKEN_BYTES,
            pool_slabs=len(self._slabs),
            pool_bytes=sum(self._capacities.values()) * TOKEN_BYTES,
        )


class Characters:
    """
    A tokenizer, and its own streaming detokenizer. Its template stands thoughts in brackets and
    drops them as soon as a user speaks, the empty one too that says that none is wanted. Where
    there are tools, "y" and "z" call one.
    """

    has_thinking = False
    has_tool_calling = True
    tool_call_start, tool_call_end = "y", "z"

    def __init__(self) -> None:
        self.text = ""

    @property
    def detokenizer(self) -> Characters:
        """To be copied."""
        return Characters()

    @staticmethod
    def tool_parser(text: str, tools: Any) -> dict[str, Any]:
        """Always the same call."""
        return {"name": "weigh_stone", "arguments": {}}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """One token a character."""
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Back again."""
        return "".join(map(chr, ids))

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, enable_thinking: bool = True, **settings: Any
    ) -> str:
        """The prompt."""
        spoke = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
        text = ""
        for at, one in enumerate(messages):
            thought = one.get("reasoning_content")
            text += f"<{one['role']}>"
            text += f"[{thought}]" if thought and at > spoke else ""
            text += f"{one['content']}{one.get('tool_calls', '')};"
        return f"{text}<assistant>{'' if enable_thinking else '[]'}"

    def reset(self) -> None:
        """Another answer."""
        self.text = ""

    def add_token(self, token: int) -> None:
        """A character more."""
        self.text += chr(token)

    def finalize(self) -> None:
        """Nothing waits."""


def started(settings: Settings, *_: Any) -> Any:
    """
    What ``loading`` makes of a model, without one. To be put in the place of ``loading._start``.
    """
    facts = ModelFacts(
        name="numbers",
        fingerprint="f" * 16,
        fields={"model": "numbers"},
        layers=LAYERS,
        kv_token_bytes=TOKEN_BYTES,
        block_tokens=settings.block_tokens or 64,
        decode_rows=ROWS,
        context_tokens=8192,
        reusable=True,
        eos_ids=frozenset({0}),
        vocabulary_tokens=128,
    )
    held = SimpleNamespace(pool_bytes=settings.pool_bytes, blocks_bytes=settings.blocks_bytes)
    loaded = SimpleNamespace(tokenizer=Characters(), directory=Path("numbers"), adapter=None)
    return SimpleNamespace(
        facts=facts,
        held=held,
        loaded=loaded,
        engine=Numbers(),
        tested=None,
        tight=None,
        narrowed=None,
    )
