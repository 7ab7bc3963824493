"""The settings of a server, and the error if it does not start with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from cairn.actors.idle.fleet_heads import ReadHeads
from cairn.actors.journal_keys import JournalKeys
from cairn.actors.requests.limits import Limits
from cairn.engine.prompt.specials import SpecialTokens
from cairn.journal.rows.store import Store

if TYPE_CHECKING:  # SQLAlchemy is loaded with it, and only a fleet needs it
    from cairn.actors.agents.handover import FleetJournals
    from cairn.journal.rows.database.other_nodes import OtherNodes

SHADOW_SHARE = 0.01
"""
The share of answers that `ops serve` computes again in idle time, unless the operator sets another.
"""


class BootRefused(Exception):
    """The server does not start. The message tells the operator what is wrong and what to do."""


class JournalBroken(BootRefused):
    """The journal violates an invariant; `ops verify` shows how."""


@attrs.frozen(kw_only=True)
class Settings:
    """
    The settings that an operator chose.

    Attributes:
        model: a model directory or a hub's name.
        model_name: what clients see, by default the directory's name.
        adapter: the directory of an adapter over the model.
        dtype: of the weights; by default what is faster and fits.
        block_tokens: the tokens of a block, or None for the device's default.
        decode_rows: the most rows of a decode pass, or None for the device's default.
        kv_cache: Cairn's cache classes or mlx-lm's.
        window: (sinks, tokens of the window) that a token attends to; None for what the model's
            layers say.
        pool_slabs: how many slabs there may be.
        pool_bytes: the budget of slabs, or None to derive it from the model's size.
        blocks_bytes: the budget of sealed blocks in memory, likewise.
        blocks_max: the most sealed blocks in memory, or None if only their bytes are limited.
        blocks_folder: the folder of block files, or None to write none.
        other_nodes: the journals of the nodes whose folders are beside that one; None if blocks are
            not shared.
        snapshot: the file with a snapshot of the fold, or None to write none.
        fold_all: fold the whole journal at the start, whether there is a snapshot or not.
        keep_s: prune rows that are older, in seconds; None to prune nothing.
        reader: opens the journal once more, read-only; needed for that.
        keys: seal private fields; None to store them plain.
        disk_bytes: the budget of block files; 0 removes those that exist, and None derives it from
            the model's context.
        speculation: whether drafts of an answer's next tokens are checked in its decode passes.
        special_tokens: what special tokens in messages are.
        prewarm: whether to compute the beginning of the next prompt in advance.
        shadow_share: the share of answers that are computed again in idle time, 0 to 1.
        shadow_by_default: whether the operator did not set that share, so that no answer is checked
            where differences are expected.
        min_cache_tokens: shorter prompts leave no blocks.
        self_tests: the folder of results of self-tests that data directories share; None to use
            the journal's alone.
        test_again: run the self-test whatever earlier starts have found.
        accept_unstable: serve even if the self-test fails.
        accept_tight: load a model even if it may not fit in memory.
        beside_bytes: what embedding models hold of the memory.
        node: the name of the server in its fleet; None if it is alone.
        elsewhere: says where other nodes have blocks with these keys, a phrase each.
        fleet: the journals of the other nodes, in which it reads agents that it adopts.
        heads_s: how often it appends the heads of the other nodes, in seconds; 0 for never.
        read_heads: reads them; needed for that.
        on_record: the settings that go into the journal.
    """

    model: str
    model_name: str | None = None
    adapter: str | None = None
    dtype: Literal["auto", "float32", "model"] = "auto"
    block_tokens: int | None = None
    decode_rows: int | None = None
    kv_cache: Literal["slab", "mlx-lm"] = "slab"
    window: tuple[int, int] | None = None
    pool_slabs: int = 16
    pool_bytes: int | None = None
    blocks_bytes: int | None = None
    blocks_max: int | None = None
    blocks_folder: Path | None = None
    other_nodes: OtherNodes | None = None
    snapshot: Path | None = None
    fold_all: bool = False
    keep_s: int | None = None
    reader: Callable[[], Store] | None = None
    keys: JournalKeys | None = None
    disk_bytes: int | None = 0
    speculation: bool = True
    prewarm: bool = True
    special_tokens: SpecialTokens = "text"
    shadow_share: float = 0.0
    shadow_by_default: bool = False
    min_cache_tokens: int = 0
    self_tests: Path | None = None
    test_again: bool = False
    accept_unstable: bool = False
    accept_tight: bool = False
    beside_bytes: int = 0
    limits: Limits = attrs.field(factory=Limits)
    node: str | None = None
    elsewhere: Callable[[Collection[str]], Sequence[str]] | None = None
    fleet: FleetJournals | None = None
    heads_s: float = 0.0
    read_heads: ReadHeads | None = None
    on_record: Mapping[str, object] = attrs.field(factory=dict)


Progress = Callable[[str, int, int], None]
"""Called with (what, done, total)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Report nothing."""
