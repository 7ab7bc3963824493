"""
`ops bench`: the parts other than the scenarios. A sound server gives every row; a measurement
without a result gives none.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from immutables import Map

from cairn.journal.lifecycle import SessionState
from cairn.journal.rows.store import MemoryStore
from cairn.journal.state import OpenRequest
from cairn_bench.parts import (
    capacity,
    drafts,
    first_token,
    given_up,
    matching,
    prefill,
    recovery,
    short_turns,
    stage,
)
from cairn_bench.parts.bits import BITS
from cairn_bench.parts.capacity import CAPACITY
from cairn_bench.parts.decode import DECODE, rate
from cairn_bench.parts.drafts import DRAFTS
from cairn_bench.parts.first_token import FIRST_TOKEN
from cairn_bench.parts.listed import PARTS
from cairn_bench.parts.matching import MATCHING
from cairn_bench.parts.prefill import PREFILL
from cairn_bench.parts.recovery import RECOVERY
from cairn_bench.parts.reuse import REUSE, SHORT_BATCH, WORK
from cairn_bench.parts.stage import Bare, Measure, Part, Stage, milliseconds
from cairn_bench.parts.throughput import THROUGHPUT
from cairn_bench.parts.turns import Conversation
from cairn_bench.rows import Row
from cairn_bench.scenarios import Drawn, Request
from cairn_bench.servers import processes as servers
from cairn_bench.servers.asking import NoAnswer, NoResult, Sample
from cairn_bench.servers.processes import DidNotStart, Kind, NeverAtRest, Running
from cairn_conform.client import Client
from cairn_conform.client_answers import Answer
from cairn_conform.client_texts import system, user
from tests.journal.test_histories import rows_of
from tests.support.processes.subprocess_server import DEADLINE_S
from workshop.bench.tests.fake_completions import Fake, serving

pytestmark = pytest.mark.long

CHUNK = 8
BLOCK_WORDS = 8

Beside = Callable[[Kind], Fake]


class Bounded(Fake):
    """
    Keeps the most recently used blocks of eight words.

    Args:
        blocks: how many.
        forgetful: whether what it counts as gone is gone.
    """

    def __init__(self, blocks: int, *, forgetful: bool = True) -> None:
        super().__init__(prefill_s=0)
        self.blocks = blocks
        self.forgetful = forgetful
        self.kept: dict[tuple[str, ...], None] = {}

    def cached(self, prompt: list[str], body: Any) -> int:
        """How much of a prompt is there; then all of it is, and something else may have left."""
        if body.get("cache_prompt") is False:
            return 0
        ends = range(BLOCK_WORDS, len(prompt), BLOCK_WORDS)
        keys = [tuple(prompt[:end]) for end in ends]
        there = next((at for at, key in enumerate(keys) if key not in self.kept), len(keys))
        # The end of a prompt leaves before its beginning.
        for key in reversed(keys):
            self.kept.pop(key, None)
            self.kept[key] = None
        gone = len(self.kept) - self.blocks
        if gone > 0:
            self.counts["cairn_blocks_evicted_total"] = gone
        for key in list(self.kept)[: max(0, gone)] if self.forgetful else ():
            del self.kept[key]
        return there * BLOCK_WORDS


class Drafting(Fake):
    """
    Counts tokens of drafts.

    Args:
        each: how many of them are accepted for each greedy answer.

    Attributes:
        greedy_only: whether no other answers have any.
    """

    greedy_only = True

    def __init__(self, each: int, **changes: Any) -> None:
        super().__init__(prefill_s=0, **changes)
        self.each = each

    def tokens(self, body: Any, cached: int, alone: bool) -> Iterator[Any]:
        """As of a sound one."""
        if not (self.greedy_only and body.get("temperature")):
            for name, more in ((_DRAFTED, 2 * self.each), (_ACCEPTED, self.each)):
                self.counts[name] = self.counts.get(name, 0) + more
        return super().tokens(body, cached, alone)


_DRAFTED, _ACCEPTED = "cairn_draft_tokens_total", "cairn_draft_tokens_accepted_total"


class Returning(Bounded):
    """Evicts first what was used last, so that conversations in turn keep what was there first."""

    def cached(self, prompt: list[str], body: Any) -> int:
        """As of the other, but what was there stays."""
        if body.get("cache_prompt") is False:
            return 0
        keys = [tuple(prompt[:end]) for end in range(BLOCK_WORDS, len(prompt), BLOCK_WORDS)]
        there = next((at for at, key in enumerate(keys) if key not in self.kept), len(keys))
        for key in keys[there:]:
            if len(self.kept) == self.blocks:
                self.counts["cairn_blocks_evicted_total"] = 1
                break
            self.kept[key] = None
        return there * BLOCK_WORDS


def quick(**changes: Any) -> Fake:
    """A sound server that does not take its time."""
    return Fake(**{"prefill_s": 0, **changes})


def changed(fake: Fake, **changes: Any) -> Fake:
    """A fake with other attributes."""
    for name, value in changes.items():
        setattr(fake, name, value)
    return fake


def alone(_kind: Kind, _model: Path, *, spans: Any = (), decodes: Any = (), **_: Any) -> Bare:
    """The model alone takes next to nothing, and a loop of any number of rows takes a second."""
    return Bare(
        block_tokens=CHUNK,
        decode_shapes=(2, 4),
        spans_s=tuple(1e-9 * (tokens - reused) for reused, tokens in spans),
        decodes_s=(1.0,) * len(decodes),
    )


def sound_beside(kind: Kind) -> Fake:
    """A sound server of each additional kind: with different options, different bits."""
    options = set(kind.command)
    if {"--block-tokens", "--decode-rows"} & options:
        return Otherwise(prefill_s=0)
    if "--blocks-mb" in options:
        return Bounded(200)
    if "--blocks-max" in options:
        return Returning(room_of(kind))
    if kind.command[-1] in ("{data}", "--no-speculation"):
        each = 0 if "--no-speculation" in options else 20
        return Drafting(each, keeps=True, counts={"cairn_blocks_loaded_total": 7})
    return quick(
        keeps=True,
        # Longer than it takes to see that it is at rest.
        holds=4 if "--slab-idle" in options else 0,
        tells_prefill=20 if "--heartbeat" in options else 0,
        # So long between two steps that a client which leaves at one is gone at the next.
        prefill_s=0.05 if "--heartbeat" in options else 0,
        counts={"cairn_blocks_loaded_total": 7},
    )


def room_of(kind: Kind) -> int:
    """How many blocks a server may have."""
    return int(kind.command[kind.command.index("--blocks-max") + 1])


class Otherwise(Fake):
    """Its bits are others, hit or miss."""

    def tokens(self, body: Any, cached: int, alone: bool) -> Iterator[Any]:
        """As of a sound one, but for the bits."""
        for text, number in super().tokens(body, cached, alone):
            yield text, number + 1e-12


@contextlib.contextmanager
def staged(
    folder: Path,
    own: Fake,
    *,
    peer: Fake | None = None,
    beside: Beside = sound_beside,
    bare: Callable[..., Bare] = alone,
) -> Iterator[Stage]:
    """
    A stage with fakes on it. A server that is started under the same name again is the same fake.

    Args:
        beside: given the kind of a server that is started besides, the fake for it.
    """
    kinds = {"cairn": servers.ours(), "mlx-lm": servers.mlx_lm(same_footing=True)}
    started: dict[Path, Fake] = {}

    @contextlib.contextmanager
    def start(kind: Kind, _model: Path, where: Path) -> Iterator[Running]:
        fake = started.setdefault(where, beside(kind))
        with serving(fake) as url:
            yield Running(kind=kind, client=Client(url, deadline_s=DEADLINE_S), data=where)

    with contextlib.ExitStack() as ending:
        running = {}
        for name, fake in (("cairn", own), ("mlx-lm", peer)):
            if fake is not None:
                client = Client(ending.enter_context(serving(fake)), deadline_s=DEADLINE_S)
                running[name] = Running(kind=kinds[name], client=client)
        yield Stage(
            own=kinds["cairn"],
            model=folder,
            folder=folder,
            salt="salt",
            quick=True,
            named=running.__getitem__,
            peer=None if peer is None else "mlx-lm",
            start=start,
            alone=bare,
            quoting=lambda: folder / "quoting",
        )


def measure_of(part: Part, place: int = 0) -> Measure:
    """A step of a part."""
    return part.measures[place]


MEASURES = {
    "warm and cold": measure_of(BITS, 0),
    "among others": measure_of(BITS, 1),
    "continuations": measure_of(FIRST_TOKEN, 0),
    "given up": measure_of(FIRST_TOKEN, 2),
    "beside others": measure_of(FIRST_TOKEN, 3),
    "decoding": measure_of(DECODE, 0),
    "journal": measure_of(DECODE, 1),
    "restart": measure_of(RECOVERY, 0),
    "cut off": measure_of(RECOVERY, 1),
    "throughput": measure_of(THROUGHPUT),
    "chat": measure_of(REUSE, 0),
    "documents": measure_of(REUSE, 1),
    "batch": measure_of(REUSE, 3),
    "mixed": measure_of(REUSE, 4),
    "short batch": measure_of(REUSE, 5),
    "capacity": measure_of(CAPACITY),
    "in turn": measure_of(CAPACITY, 1),
    "short turns": measure_of(REUSE, 6),
    "first chat": measure_of(REUSE, 7),
    "cold prompts": measure_of(PREFILL, 0),
    "listener": measure_of(PREFILL, 1),
    "speculation": measure_of(DRAFTS),
}
"""
All that can be measured on a fake: the journal of one cannot be read, and matching needs no server.
"""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake's words are its tokens, and it refuses long prompts. It is idle immediately."""
    monkeypatch.setattr(servers, "LOOK_S", 0.001)
    monkeypatch.setattr(first_token, "SHORT", 200)
    monkeypatch.setattr(first_token, "LONG", 800)
    monkeypatch.setattr(given_up, "HISTORY", 800)
    monkeypatch.setattr(recovery, "HISTORY", 800)
    monkeypatch.setattr(recovery, "CUT_TOKENS", 800)
    monkeypatch.setattr(capacity, "PROMPT_TOKENS", 100)
    monkeypatch.setattr(capacity, "TURN_TOKENS", 100)
    monkeypatch.setattr(prefill, "QUICK_COLD", (100, 200))
    monkeypatch.setattr(prefill, "BESIDE", 800)
    monkeypatch.setattr(drafts, "ANSWER_TOKENS", (32, 32))
    for module in (first_token, drafts):
        monkeypatch.setattr(module, "journal_of", lambda _: journal("shorter-history"))
    monkeypatch.setattr(short_turns, "journal_end", lambda _: 0)


@contextlib.contextmanager
def journal(name: str) -> Iterator[MemoryStore]:
    """The journal of a history: a fake has none."""
    yield MemoryStore(rows_of(name))


def rows_on(folder: Path, name: str, own: Fake | None = None, **changes: Any) -> Sequence[Row]:
    """What a step measures."""
    own = own or quick()
    if name == "among others" and not own.queues:
        own.meets = 4
    with staged(folder, own, peer=changes.pop("peer", quick()), **changes) as scene:
        return MEASURES[name].rows(scene)


@pytest.mark.parametrize("name", MEASURES)
def test_a_sound_server_gives_rows(name: str, tmp_path: Path):
    """Each step gives its rows, with figures, and with what they were made of."""
    rows = rows_on(tmp_path, name)
    assert rows
    for row in rows:
        assert math.isfinite(row.value)
        assert row.of
    assert any(row.checked for row in rows) or name == "short batch"
    assert len({row.name for row in rows}) == len(rows)


APART = (
    "given up",
    "beside others",
    "restart",
    "cut off",
    "short batch",
    "in turn",
    "first chat",
    "capacity",
)
COLD = ("cold prompts", "listener", "short turns")
"""Those that need no hit for their figure. Answers are compared all the same."""
HIT = [name for name in MEASURES if name not in (*APART, *COLD, "speculation")]


@pytest.mark.parametrize("name", HIT)
def test_without_a_hit_there_is_no_row(name: str, tmp_path: Path):
    """A server that reuses nothing gives no row."""
    with pytest.raises(NoResult, match=r"nothing was reused|the cache was not hit"):
        rows_on(tmp_path, name, Fake(reuses=0, prefill_s=0))


@pytest.mark.parametrize("name", [*HIT[2:], *COLD])
@pytest.mark.parametrize("fault", ["a hit has other bits", "a hit has other words"])
def test_a_hit_that_differs_from_the_miss_gives_no_row(name: str, fault: str, tmp_path: Path):
    """A server whose warm answers are not the cold ones gives no row."""
    with pytest.raises(NoResult, match="a warm answer differs from the cold one"):
        rows_on(tmp_path, name, Fake(fault, prefill_s=0))


@pytest.mark.parametrize("name", [*APART[:-1], "journal"])
def test_a_server_besides_is_held_to_the_same(name: str, tmp_path: Path):
    """Of servers that are started for a row too, warm answers are compared with cold ones."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), fault="a hit has other bits")

    with pytest.raises(NoResult, match="a warm answer differs from the cold one"):
        rows_on(tmp_path, name, beside=beside)


class Looked(Fake):
    """Knows whether it was at rest when it was asked without the cache."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(prefill_s=0, settles=3, **changes)
        self.found: list[int] = []

    def cached(self, prompt: list[str], body: Any) -> int:
        """As of a sound one."""
        if body.get("cache_prompt") is False:
            self.found.append(self.settling)
        return super().cached(prompt, body)


def test_a_cold_answer_begins_when_the_server_is_idle(tmp_path: Path):
    """
    What is computed after a hit is not in the time of the miss that it is compared with, which is a
    figure too.
    """
    fake = Looked()
    rows_on(tmp_path, "chat", fake)
    assert len(fake.found) > 1
    assert {0} == set(fake.found)


@pytest.mark.parametrize("name", ["chat", "documents", "batch", "mixed"])
def test_a_small_hit_does_not_count(name: str, tmp_path: Path):
    """A server that reuses the first chunk of whatever it has seen reaches no goal."""
    with pytest.raises(NoResult, match="nothing was reused"):
        rows_on(tmp_path, name, Fake(reuses=BLOCK_WORDS, prefill_s=0))


# --- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("warm and cold", "a hit has other bits"),
        ("warm and cold", "a hit has other words"),
        ("among others", "neighbours change bits"),
    ],
)
def test_other_bits_are_missed(name: str, fault: str, tmp_path: Path):
    """One answer that is not the same, and the goal is missed."""
    (row,) = rows_on(tmp_path, name, Fake(fault, prefill_s=0))
    assert row.is_missed
    assert row.value < 1


@pytest.mark.parametrize("name", ["warm and cold", "among others"])
def test_where_the_control_is_the_same_nothing_is_shown(name: str, tmp_path: Path):
    """A machine on which passes of other shapes give the same bits proves nothing."""
    with pytest.raises(NoResult, match="proves nothing on this machine"):
        rows_on(tmp_path, name, beside=lambda _: quick())


def test_requests_that_do_not_overlap_are_not_neighbours(tmp_path: Path):
    """A server that answers one after the other shows nothing about neighbours."""
    with pytest.raises(NoResult, match="none had a neighbour"):
        rows_on(tmp_path, "among others", Fake(queues=True, prefill_s=0))


@pytest.mark.parametrize("name", ["warm and cold", "among others"])
def test_bits_are_compared(name: str, tmp_path: Path):
    """Without log-probabilities there is nothing to compare."""
    with pytest.raises(NoResult, match="there are no log-probabilities to compare"):
        rows_on(tmp_path, name, Fake(hides=["logprobs"], prefill_s=0))


# --- first token ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told", "behind", "more"),
    [
        ("given up", "after the slab was given up", "; with its slab ", "with_slab_s"),
        ("restart", "after a restart, from disk", ", 7 blocks read, a prompt of ", "blocks"),
    ],
    ids=["given up", "restart"],
)
def test_a_warm_first_token_is_compared_with_a_cold_one(
    name: str, told: str, behind: str, more: str, tmp_path: Path
):
    """The figure is the ratio of the two medians, under the name that the page of figures knows."""
    (row,) = rows_on(tmp_path, name)
    assert f"first token {told}, at 400 tokens / cold" == row.name
    assert {"first_s", "cold_s", more} == set(row.figures)
    warm_s, cold_s = (statistics.median(row.figures[of]) for of in ("first_s", "cold_s"))
    assert (warm_s / cold_s, 0.1, 1) == (row.value, row.goal, row.checked)
    assert row.of.startswith(f"{milliseconds(warm_s)} / {milliseconds(cold_s)}{behind}")


def test_a_first_token_is_compared_with_its_passes(tmp_path: Path):
    """
    The passes that are measured alone are those that each continuation needed: by the reused tokens
    of its prompt, and its length.
    """
    asked: list[tuple[int, int]] = []

    def noted(*arguments: Any, spans: Any = (), **named: Any) -> Bare:
        asked.extend(spans)
        return attrs.evolve(alone(*arguments, spans=spans, **named), spans_s=(1e-4,) * len(spans))

    ratio, growth = rows_on(tmp_path, "continuations", bare=noted)
    assert 10 == len(asked)
    assert all(0 < reused < tokens for reused, tokens in asked)
    assert {"200", "400"} == set(ratio.figures)
    first_s = ratio.figures["400"]["first_s"]
    assert ratio.value >= sorted(first_s)[2] / 1e-4 * 0.999
    assert growth.value > 0


def test_passes_slower_than_the_token_give_no_result(tmp_path: Path):
    """If the difference is negative, the two were measured under different conditions."""

    def slow(*arguments: Any, spans: Any = (), **named: Any) -> Bare:
        return attrs.evolve(alone(*arguments, spans=spans, **named), spans_s=(9.0,) * len(spans))

    with pytest.raises(NoResult, match="the passes alone took as long as the first tokens"):
        rows_on(tmp_path, "continuations", bare=slow)


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("continuation", [0, 0]),
        ("shared-blocks", [0]),
        ("shorter-history", [0, 0, 0]),
        ("evicted", [64]),
    ],
)
def test_what_was_there_and_is_computed_again_is_counted(name: str, again: list[int]):
    """
    For each request with a part of its prompt available: the tail of the prompt before it, and
    evicted blocks. Requests for the cold path do not count.
    """
    assert (again, 1) == first_token.computed_again(MemoryStore(rows_of(name)))


def test_a_block_that_left_was_there():
    """
    Tokens that were sealed once were available, even without a continuation or blocks in memory.
    """
    index = matching.made_index(200, 100, 16)
    gone = {key: attrs.evolve(block, present=False) for key, block in index.state.blocks.items()}
    state = attrs.evolve(index.state, blocks=Map(gone))
    session = attrs.evolve(index.session, last=None)
    keys = matching.keys_of(index.ids, 16)
    request = OpenRequest(
        ask=matching.received(index, keys, 1),
        chain=index.chain,
        prompt_ids=index.ids,
        prompt_keys=keys,
    )
    assert 96 == first_token.canonical(16, state, session, request)


def test_an_unreadable_journal_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without a journal nothing is known of what was computed again."""
    monkeypatch.undo()
    with staged(tmp_path, quick()) as scene:
        with pytest.raises(NoResult, match="the journal cannot be read"):
            first_token.again(scene)
        other = attrs.evolve(scene.ours(), data=tmp_path)
        with pytest.raises(NoResult, match="the journal cannot be read from here: There is no"):
            first_token.journal_end(other)


def test_requests_after_a_position_count(tmp_path: Path):
    """A figure of some requests is one of the rows after those before them."""
    store = MemoryStore(rows_of("shorter-history"))
    starts = [row.position for row in store.rows if row.kind == "path_selected"]
    found = [first_token.computed_again(store, after=at)[0] for at in (0, starts[0], *starts[1:3])]
    assert [[0, 0, 0], [0, 0, 0], [0, 0], [0]] == found


@pytest.mark.parametrize(("grain", "goal"), [(1, 1), (64, 63)])
def test_at_most_one_token_or_a_chunk_less_one(
    grain: int, goal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The goal goes by what the journal says of the grain."""
    monkeypatch.setattr(first_token, "computed_again", lambda *_, **__: ([0, 2, 1], grain))
    with staged(tmp_path, quick()) as scene:
        (row,) = first_token.again(scene)
    assert (2, goal, grain == 1) == (row.value, row.goal, row.is_missed)


# --- decode --------------------------------------------------------------------------------------


def test_the_loop_alone_has_the_rows_that_are_served(tmp_path: Path):
    """
    Ours is compared with a loop of one row; what the rows of a pass for one client cost it, which
    share its history, and what W gives as many clients, are reported with it.
    """
    histories: dict[int, set[int]] = {}

    def loops(_kind: Kind, _model: Path, *, decodes: Any, **_: Any) -> Bare:
        took = tuple(0.001 * rows * steps for rows, _, steps in decodes)
        for rows, history, _ in decodes:
            histories.setdefault(rows, set()).add(history)
        return Bare(block_tokens=CHUNK, decode_shapes=(2, 4), spans_s=(), decodes_s=took)

    over_http, price, gain = rows_on(tmp_path, "decoding", bare=loops)
    assert pytest.approx(250) == over_http.figures["for_one"][4]
    assert pytest.approx(statistics.median(over_http.figures["ours"])) == over_http.value * 1000
    assert "of 500.0 with the rows of a pass for one client (2)" in over_http.of
    assert "W = 4" in gain.name
    assert 0.5 == pytest.approx(price.value)
    (whole,) = histories[1]
    assert {rows: {whole, whole // rows} for rows in (1, 2, 4, 8)} == histories
    assert 1.0 == pytest.approx(gain.value)


def test_tokens_of_drafts_do_not_count_beside_a_loop_without_them(tmp_path: Path):
    """
    Half of the tokens came from drafts: the rate is half of what a client saw. The answers are
    sampled, so that there are hardly any.
    """
    fake = Drafting(32)
    assert "drafts" not in rows_on(tmp_path, "decoding", fake)[0].of
    fake.greedy_only = False
    row, *_ = rows_on(tmp_path / "again", "decoding", fake)
    loop = row.figures["for_one"][1]
    assert pytest.approx(row.value * loop * 2) == statistics.median(row.figures["ours"])
    assert "128 of 256 tokens came from drafts, and do not count" in row.of


@pytest.mark.parametrize("told", [{"completion_tokens": 1}, {"first_s": None}, {}])
def test_an_answer_that_is_too_short_has_no_rate(told: Any):
    """The speed of an answer is measured from its first text to its end."""
    answer = Answer(status=200, first_s=1.0, ended_s=3.0)
    request = Request(messages=(), warm=True)
    whole = Sample(request=request, answer=attrs.evolve(answer, completion_tokens=5))
    assert 2.0 == rate(whole)
    with pytest.raises(NoResult, match="too short to measure"):
        rate(Sample(request=request, answer=attrs.evolve(answer, **told)))


# --- given up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["given up", "beside others"])
def test_a_copy_has_to_be_a_hit(name: str, tmp_path: Path):
    """A server that is cold after a pause gives no row."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), reuses=0)

    with pytest.raises(NoResult, match="the cache was not hit"):
        rows_on(tmp_path, name, beside=beside)


def test_a_slab_released_too_soon_gives_no_row(tmp_path: Path):
    """A turn that is to find its slab has to."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), holds=0)

    with pytest.raises(NoResult, match="given up before its next turn"):
        rows_on(tmp_path, "given up", beside=beside)


def test_a_slab_that_is_not_released_gives_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server that keeps its slabs copies nothing."""
    monkeypatch.setattr(given_up, "WAIT_S", 0.05)

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), holds=1 << 20)

    with pytest.raises(NeverAtRest, match="did not release a slab"):
        rows_on(tmp_path, "given up", beside=beside)


def test_an_answer_that_ends_too_soon_has_no_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A client that was not in the middle of an answer did not wait."""
    monkeypatch.setattr(given_up, "SPOKEN_TOKENS", 4)
    with pytest.raises(NoResult, match="ended too early"):
        rows_on(tmp_path, "beside others")


def test_a_pause_is_one_that_reaches_into_the_time():
    """The longest of them, and of no other."""
    heard_s = [0.0, 5.0, 6.0, 8.0, 9.0, 13.0]
    assert 2.0 == given_up.longest_s(heard_s, 5.0, 9.0)
    assert 4.0 == given_up.longest_s(heard_s, 5.5, 9.1)
    assert 5.0 == given_up.longest_s(heard_s, 4.9, 6.0)
    for began_s, until_s in ((-1.0, 6.0), (5.0, 13.5)):
        with pytest.raises(NoResult):
            given_up.longest_s(heard_s, began_s, until_s)


# --- prefill -------------------------------------------------------------------------------------


def test_cold_prompts_are_those_of_the_peer(tmp_path: Path):
    """Both get the same new prompts, of either length, as often."""
    own, peer = Noted(prefill_s=0), Noted(prefill_s=0)
    rows = rows_on(tmp_path, "cold prompts", own, peer=peer)
    assert [
        "first token of a cold prompt of 100 tokens / mlx-lm's",
        "first token of a cold prompt of 200 tokens / mlx-lm's",
    ] == [row.name for row in rows]
    assert [1, 1] == [len(times) for times in rows[1].figures.values()]
    assert set(peer.prompts) < set(own.prompts)
    assert pytest.approx([100, 200], rel=0.1) == [len(one.split()) for one in peer.prompts]


class Noted(Fake):
    """Knows what it was asked."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.prompts: list[str] = []

    def cached(self, prompt: list[str], body: Any) -> int:
        """As of a sound one."""
        self.prompts.append(" ".join(prompt))
        return super().cached(prompt, body)


class Warm(Fake):
    """Has a part of each prompt before it is sent."""

    def cached(self, prompt: list[str], body: Any) -> int:
        """A fifth, in whole blocks."""
        found = super().cached(prompt, body)
        return found or len(prompt) // 5 // BLOCK_WORDS * BLOCK_WORDS


@pytest.mark.parametrize("name", ["cold prompts", "listener"])
def test_a_prompt_that_is_not_cold_gives_no_row(name: str, tmp_path: Path):
    """A prompt of which a part was reused is no cold one."""
    with pytest.raises(NoResult, match="was not cold: "):
        rows_on(tmp_path, name, Warm(prefill_s=0))


def test_a_listener_notices_a_prefill(tmp_path: Path):
    """
    The longest pause beside a prefill, of the distance before it: this server decodes for one while
    it prefills for another, and not with this fault.
    """
    (sound,) = rows_on(tmp_path, "listener", quick(prefill_s=0.2))
    (row,) = rows_on(tmp_path / "again", "listener", Pausing(prefill_s=0))
    assert sound.value < row.value
    assert row.figures["longest_s"][0] >= 0.2
    assert row.is_missed


class Pausing(Fake):
    """It sends nothing to one client while it prefills for another."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.pausing = threading.Event()
        self.pausing.set()

    def cached(self, prompt: list[str], body: Any) -> int:
        """As of a sound one, after a while."""
        if len(prompt) > 100:
            self.pausing.clear()
            time.sleep(0.2)
            self.pausing.set()
        return super().cached(prompt, body)

    def paused(self) -> None:
        """Wait until nothing is prefilled."""
        self.pausing.wait()


@pytest.mark.parametrize(("pass_s", "goal"), [(0.021, 1.5), (0.019, None)])
def test_a_goal_for_a_listener_needs_a_slow_pass(pass_s: float, goal: float | None, tmp_path: Path):
    """Where a pass over one row takes less than 20 ms, the figure is only shown."""

    def loops(_kind: Kind, _model: Path, *, decodes: Any, **_: Any) -> Bare:
        took = tuple(pass_s * steps for _, _, steps in decodes)
        return Bare(block_tokens=CHUNK, decode_shapes=(1,), spans_s=(), decodes_s=took)

    (row,) = rows_on(tmp_path, "listener", bare=loops)
    assert goal == row.goal
    assert "a pass over one row takes" in row.of


def test_a_listener_hears_the_whole_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One whose answer had hardly begun, or had ended, shows nothing."""
    monkeypatch.setattr(prefill, "SPOKEN_TOKENS", 4)
    with pytest.raises(NoResult, match="ended too early"):
        rows_on(tmp_path, "listener")


@pytest.mark.parametrize(("tokens", "known"), [(110, True), (4, False)])
def test_a_usual_distance_needs_some_pieces(tokens: int, known: bool, tmp_path: Path):
    """Of an answer with fewer pieces than were to be waited for it is not known."""
    with staged(tmp_path, quick()) as scene:
        speaker = given_up.Speaker(scene.ours(), "Hm.", tokens=tokens, first=8)
        speaker.end()
        request = Request(messages=(user("And then?"),), warm=False)
        other = stage.ask(scene.ours(), request)
    with contextlib.nullcontext() if known else pytest.raises(NoResult, match="hardly begun"):
        assert 0.002 < speaker.usual_s(other) < 0.5


# --- speculation ---------------------------------------------------------------------------------


def test_speculation_is_shown_with_its_drafts(tmp_path: Path):
    """Two kinds of answers; of the greedy ones, tokens came from drafts."""
    quoting, plain = rows_on(tmp_path, "speculation")
    assert (1.5, 0.97) == (quoting.goal, plain.goal)
    assert (96, 120, 60) == tuple(quoting.figures[of] for of in ("tokens", "drafted", "accepted"))
    assert (96, 0, 0) == tuple(plain.figures[of] for of in ("tokens", "drafted", "accepted"))
    assert "of 96 tokens 60 came from drafts of 120" in quoting.of


def drafting(**changes: Any) -> Beside:
    """Servers with speculation and without, the first of them changed."""

    def beside(kind: Kind) -> Fake:
        fake = sound_beside(kind)
        return fake if "--no-speculation" in kind.command else changed(fake, **changes)

    return beside


def test_without_an_accepted_token_there_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that has no drafts shows nothing of them; its self-test says why."""
    with pytest.raises(NoResult, match=r"no token of a draft was accepted$"):
        rows_on(tmp_path, "speculation", beside=drafting(each=0))
    monkeypatch.setattr(drafts, "without_drafts", lambda _: "one row a pass")
    with pytest.raises(NoResult, match="no token of a draft was accepted: one row a pass"):
        rows_on(tmp_path / "again", "speculation", beside=drafting(each=0))


def test_the_journal_says_why_there_are_no_drafts():
    """The last self-test counts."""
    rows = rows_of("continuation")
    (told,) = {
        json.loads(row.public)["without_drafts"] for row in rows if row.kind == "self_test_finished"
    }
    assert told == drafts.without_drafts(MemoryStore(rows))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fault": "a hit has other bits"}, "a warm answer with speculation differs from the cold"),
        ({"fault": "a hit has other words"}, "a warm answer with speculation differs"),
        ({"hides": ["logprobs"]}, "there are no log-probabilities to compare"),
        ({"reuses": 0}, "the cache was not hit"),
    ],
    ids=["bits", "words", "no log-probabilities", "no hit"],
)
def test_speculation_that_changes_an_answer_gives_no_row(changes: Any, words: str, tmp_path: Path):
    """Warm answers with speculation are compared with a cold one that had none."""
    with pytest.raises(NoResult, match=words):
        rows_on(tmp_path, "speculation", beside=drafting(**changes))


# --- recovery ------------------------------------------------------------------------------------


def test_blocks_not_read_from_disk_give_no_row(tmp_path: Path):
    """A hit after a restart has to be one of files."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), counts={})

    with pytest.raises(NoResult, match="nothing was read from the disk"):
        rows_on(tmp_path, "restart", beside=beside)


def test_blocks_lost_in_a_restart_give_no_row(tmp_path: Path):
    """A server that is cold after a restart gives no row."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), reuses=0)

    with pytest.raises(NoResult, match="after a restart: the cache was not hit"):
        rows_on(tmp_path, "restart", beside=beside)


def test_a_cut_that_keeps_all_prefills_a_tenth(tmp_path: Path):
    """Of a prompt that was cut off at 90 %, a tenth and the end of a chunk are prefilled again."""
    (row,) = rows_on(tmp_path, "cut off")
    assert not row.is_missed
    assert 0.05 < row.value < 0.15


def test_a_cut_that_keeps_half_misses_the_goal(tmp_path: Path):
    """A server that keeps half of what was prefilled misses the goal."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), fault="a cut keeps half")

    (row,) = rows_on(tmp_path, "cut off", beside=beside)
    assert row.is_missed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fault": "a cut keeps nothing"}, "the cache was not hit"),
        ({"tells_prefill": 0}, "no prefill was seen at 90% in 4 tries"),
    ],
    ids=["nothing kept", "not caught"],
)
def test_a_cut_that_shows_nothing_gives_no_row(changes: Any, words: str, tmp_path: Path):
    """Nothing is shown where nothing was kept, and where the client never left in prefill."""

    def beside(kind: Kind) -> Fake:
        return changed(sound_beside(kind), **changes)

    with pytest.raises(NoResult, match=words):
        rows_on(tmp_path, "cut off", beside=beside)


def test_comments_tell_how_far_a_prefill_is():
    """Both numbers have to be there."""
    told = [recovery.prefilled(one) for one in ("prefill 45/50", "prefill 45", "writing", "")]
    assert [0.9, None, None, None] == told


# --- throughput ----------------------------------------------------------------------------------


def test_a_peer_that_fails_among_many_is_named(tmp_path: Path):
    """The server that did not answer is named, because a peer's failure is not our fault."""
    with pytest.raises(NoAnswer) as found:
        rows_on(tmp_path, "throughput", peer=Fake("streams have no end", prefill_s=0))
    assert "mlx-lm" == found.value.server


def test_eight_are_under_way_at_once(tmp_path: Path):
    """Eight conversations are held at the same time, by both, equally often."""
    own, peer = quick(prefill_s=0.05), quick(prefill_s=0.05)
    (row,) = rows_on(tmp_path, "throughput", own, peer=peer)
    assert own.crowds
    assert peer.crowds
    assert [2, 2] == [len(rates) for rates in row.figures.values()]
    assert 2 * 8 * 2 == peer.served


# --- reuse ---------------------------------------------------------------------------------------


def of_work(place: int) -> list[bool]:
    """Which requests of a kind of work could be hits, in a hundred and one."""
    play = WORK[place].play(Drawn("salt", "work"), lambda tokens: tokens, 101)
    return [request.warm for request in play]


def test_work_is_as_the_goals_want_it():
    """
    In a hundred requests and one the shares that the goals name can be reached, and are not
    exceeded by much: what begins alike is sent before it can be a hit.
    """
    chat, in_order, any_order, batch, mixed = (sum(of_work(place)) for place in range(5))
    assert (100, 100) == (chat, batch)
    assert (97, 96) == (in_order, any_order)
    assert 80 == mixed


def test_requests_of_a_kind_of_work_follow_from_the_salt():
    """The same salt gives the same requests."""
    for kind in (*WORK, SHORT_BATCH):
        one, other = (list(kind.play(Drawn("s", "w"), lambda n: n, 9)) for _ in range(2))
        assert one == other


def test_a_hit_rate_is_of_those_that_could_be_hits(tmp_path: Path):
    """Requests whose beginning was there count; where some share nothing, those count too."""
    chat, speed = rows_on(tmp_path, "chat")
    assert (20, 20, 1.0) == (chat.figures["hits"], chat.figures["of"], chat.value)
    assert "where the passes alone give" in speed.of
    (mixed,) = rows_on(tmp_path / "again", "mixed")
    assert (16, 20) == (mixed.figures["hits"], mixed.figures["of"])


def test_a_speed_up_is_reported_with_its_bound(tmp_path: Path):
    """The medians of the same requests, cold and warm, and what the passes alone would give."""

    def passes(*arguments: Any, spans: Any = (), **named: Any) -> Bare:
        took = tuple(float(tokens - reused) for reused, tokens in spans)
        return attrs.evolve(alone(*arguments, **named), spans_s=took)

    _, speed = rows_on(tmp_path, "batch", bare=passes)
    found = speed.figures
    assert found["cold_s"] / found["warm_s"] == speed.value
    cached, prompt = found["span"]
    assert prompt / (prompt - cached) == found["limit"]


def test_a_short_instruction_is_shown_with_smaller_chunks(tmp_path: Path):
    """
    The served size may reuse nothing of a short instruction; that is reported, with what smaller
    chunks reuse. Only if none reuses anything is there no row.
    """
    rows = rows_on(tmp_path, "short batch", Fake(reuses=0, prefill_s=0))
    assert [0.0, 1.0] == [row.value for row in rows]
    assert [True, False] == [row.is_missed for row in rows]
    nothing = lambda _: Fake(reuses=0, prefill_s=0)  # noqa: E731  # said once
    with pytest.raises(NoResult, match="nothing was reused with any size of chunks"):
        rows_on(tmp_path / "again", "short batch", Fake(reuses=0, prefill_s=0), beside=nothing)


@pytest.mark.parametrize("name", ["short turns", "first chat"])
def test_short_turns_reuse_from_the_second_on(name: str, tmp_path: Path):
    """Each of them but the first reuses something, and computes again at most a token."""
    share, again = rows_on(tmp_path, name)
    assert not share.is_missed
    assert 5 == len(share.figures["turns"]) == share.checked + 4
    assert share.value == min(cached / prompt for cached, prompt in share.figures["turns"])
    assert (0, 1, False) == (again.value, again.goal, again.is_missed)
    assert {share.name.split(":")[0]} == {again.name.split(":")[0]}


def test_short_turns_that_reuse_nothing_miss_the_goal(tmp_path: Path):
    """One turn is enough."""
    share, _ = rows_on(tmp_path, "short turns", Fake(reuses=0, prefill_s=0))
    assert (0.0, True, 0) == (share.value, share.is_missed, share.checked)


# --- capacity ------------------------------------------------------------------------------------


def test_a_shared_prompt_is_held_once(tmp_path: Path):
    """More conversations fit where they have a system prompt in common."""
    (row,) = rows_on(tmp_path, "capacity")
    assert row.value > 2
    assert row.figures["each for itself"] * 13 <= 200


def test_nothing_leaves_and_nothing_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A budget that is never full says nothing of how much fits."""
    monkeypatch.setattr(capacity, "MOST", 5)
    with pytest.raises(NoResult, match="5 conversations were opened, and no block was evicted"):
        rows_on(tmp_path, "capacity", beside=lambda _: Bounded(1000))


def test_what_left_has_to_be_missed(tmp_path: Path):
    """A server that counts blocks as gone and has them still is not full."""
    with pytest.raises(NoResult, match="lost nothing"):
        rows_on(tmp_path, "capacity", beside=lambda _: Bounded(200, forgetful=False))


def test_six_in_turn_reuse_most_of_what_room_for_six_gives(tmp_path: Path):
    """
    A server that keeps five of six, and a part of the sixth, reuses as much; one that evicts what
    was used longest ago misses the goal.
    """
    rooms: list[int] = []

    def by_recency(kind: Kind) -> Fake:
        rooms.append(room_of(kind))
        # One block in thirteen is that of the turn before, which this server does not keep.
        return Bounded(rooms[-1] // 13 * 12)

    (row,) = rows_on(tmp_path, "in turn")
    assert (False, 0.6) == (row.is_missed, row.goal)
    assert 5 / 6 <= row.value <= 1
    (row,) = rows_on(tmp_path / "again", "in turn", beside=by_recency)
    assert row.is_missed
    six, five = rooms
    assert (five * 6, True) == (six * 5, five > 50)


def test_six_in_turn_that_fit_give_no_row(tmp_path: Path):
    """Memory for five that evicts nothing shows nothing; neither does one for six that does."""
    with pytest.raises(NoResult, match="no block was evicted from memory for 5"):
        rows_on(tmp_path, "in turn", beside=lambda _: Bounded(1000))
    with pytest.raises(NoResult, match="6 conversations in turn: the cache was not hit"):
        rows_on(tmp_path / "again", "in turn", beside=lambda _: Bounded(50))


# --- matching ------------------------------------------------------------------------------------


def test_matching_finds_all_blocks():
    """The decision that is timed is a continuation on all blocks of the conversation before it."""
    index = matching.made_index(1000, 5000, 16)
    took = matching.timed(index, 3)
    assert (1000 - 100) // 16 == index.due
    assert {"keys": 3, "choice": 3, "loads": 3, "path": 3} == {
        step: len(times) for step, times in took.items()
    }
    assert 5000 == len(index.state.blocks)


def test_matching_that_finds_less_gives_no_result():
    """A block that is missing in the middle, and a conversation that is not known."""
    index = matching.made_index(1000, 100, 16)
    assert index.session.last is not None
    key = index.session.last.prompt_keys[20]
    less = attrs.evolve(index.state, blocks=index.state.blocks.delete(key))
    with pytest.raises(NoResult, match="20 blocks of 56 were found"):
        matching.timed(attrs.evolve(index, state=less), 1)
    other = attrs.evolve(index, chain=(("system", "x", "xx"), ("user", "y", "yy")))
    with pytest.raises(NoResult, match="matching: new_session, diverged"):
        matching.timed(other, 1)


def test_matching_is_reported_beside_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The time of all steps, of that of a pass alone."""
    monkeypatch.setattr(matching, "PROMPT_TOKENS", 1000)
    monkeypatch.setattr(matching, "BLOCKS", 1000)
    slow = attrs.evolve(alone(servers.ours(), tmp_path), spans_s=(1e6,))
    with staged(tmp_path, quick(), bare=lambda *_, **__: slow) as scene:
        (row,) = MATCHING.measures[0].rows(scene)
    assert not row.is_missed
    assert "1,000 tokens against 1,000 blocks" in row.name


def test_the_events_of_a_turn_are_those_of_a_server():
    """
    Turn by turn the conversation continues with all that its slab holds, and no rule is broken.
    """
    index = matching.made_index(1000, 500, 16)
    talk = Conversation(index.state, index.session, matching.SECRET)
    took = [talk.turn() for _ in range(3)]
    assert [["begin", "answer", "settle"]] * 3 == [list(steps) for steps in took]
    assert all(seconds > 0 for steps in took for seconds in steps.values())
    held = talk.session
    assert (SessionState.IDLE, 1000 - 100 + 3 * (100 + 16)) == (
        held.state,
        len(talk.last.sequence),
    )
    assert len(talk.last.sequence) // 16 == len(held.slab_keys)


def test_a_turn_that_reuses_less_gives_no_result():
    """A quarantined block in the middle of the slab."""
    index = matching.made_index(1000, 500, 16)
    assert index.session.last is not None
    key = index.session.last.prompt_keys[20]
    doubted = attrs.evolve(index.state.blocks[key], bug_id="bug")
    state = attrs.evolve(index.state, blocks=index.state.blocks.set(key, doubted))
    with pytest.raises(NoResult, match="not all of 56 blocks stayed in memory"):
        Conversation(state, index.session, matching.SECRET).turn()


def test_a_turn_is_reported_beside_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The time of all events of a turn on a long history, of that of a pass alone."""
    monkeypatch.setattr(matching, "PROMPT_TOKENS", 1000)
    monkeypatch.setattr(matching, "SHORT_TOKENS", 500)
    monkeypatch.setattr(matching, "BLOCKS_OF_TURNS", 1000)
    for pass_s, missed in ((1e6, False), (1e-6, True)):
        alone_s = attrs.evolve(alone(servers.ours(), tmp_path), spans_s=(pass_s,))
        with staged(tmp_path, quick(), bare=lambda *_, _s=alone_s, **__: _s) as scene:
            (row,) = MATCHING.measures[1].rows(scene)
        assert missed == row.is_missed
        assert {"pass_s", "long_s", "short_s"} == set(row.figures)


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "missed", "told", "goal"),
    [
        (Row(name="r", value=1.2, goal=1.2), False, "1.2", "at most 1.2"),
        (Row(name="r", value=1.21, goal=1.2), True, "1.21", "at most 1.2"),
        (Row(name="r", value=0.949, goal=0.95, better="more"), True, "0.949", "at least 0.95"),
        (Row(name="r", value=0.98, goal=0.98, better="more"), False, "0.98", "at least 0.98"),
        (Row(name="r", value=0.123, goal=0.15, shown="share"), False, "12.3%", "at most 15%"),
        (Row(name="r", value=63, goal=63, shown="count"), False, "63", "at most 63"),
        (Row(name="r", value=1234.5), False, "1.23e+03", ""),
    ],
)
def test_a_row_knows_its_goal(row: Row, missed: bool, told: str, goal: str):
    """A goal is reached when it is met; without one there is no verdict."""
    assert (missed, told, goal) == (row.is_missed, row.told, row.told_goal)
    assert ("" if row.goal is None else "missed" if missed else "reached") == row.verdict


def test_parts_and_their_steps_have_names_of_their_own():
    """A part is selected by its name, and a missing result is reported by the name of its step."""
    names = [part.name for part in PARTS]
    assert len(names) == len(set(names))
    steps = [measure.name for part in PARTS for measure in part.measures]
    assert len(steps) == len(set(steps))


# --- the stage -----------------------------------------------------------------------------------


def test_words_are_learnt_from_the_server(tmp_path: Path):
    """How many words make a number of tokens: here one each, besides those around them."""
    with staged(tmp_path, quick()) as scene:
        server = scene.ours()
        words = stage.words_of(server, scene.drawn("lengths"))
        text = scene.drawn("long").text(words(500))
        sample = stage.ask(
            server, Request(messages=(system(text), user("Hm.")), warm=False, answer_tokens=1)
        )
    assert 480 < (sample.answer.prompt_tokens or 0) < 520


def test_a_server_that_counts_nothing_cannot_be_measured(tmp_path: Path):
    """Lengths are in tokens, and only the server knows them."""
    with (
        staged(tmp_path, Fake(hides=["usage"], prefill_s=0)) as scene,
        pytest.raises(NoResult, match="cairn does not report the length of a prompt"),
    ):
        stage.words_of(scene.ours(), scene.drawn("lengths"))


def test_what_the_process_wrote_is_in_the_order_of_the_question():
    """A span that is asked for twice is measured once."""
    found = {"block_tokens": 64, "decode_shapes": [2, 4], "spans": [[1, 3, 2], [9]], "decodes": [5]}
    bare = stage.bare_of(found, [(64, 80), (0, 64), (64, 80)], [(0, 64), (64, 80)])
    assert ((9, 2, 9), (5,)) == (bare.spans_s, bare.decodes_s)


def test_a_model_alone_that_fails_says_why(tmp_path: Path):
    """A process that does not finish is reported with its last output."""
    with pytest.raises(DidNotStart, match="the model alone ended with 1: "):
        stage.alone(servers.ours(), tmp_path / "none", spans=[(0, 8)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_model_alone_is_measured(model_directory: Path):
    """Passes and loops of a model with nothing around it."""
    bare = stage.alone(
        servers.ours(), model_directory, spans=[(0, 100), (64, 100)], decodes=[(2, 40, 5)]
    )
    assert 2 == len(bare.spans_s)
    assert 0 < min(*bare.spans_s, *bare.decodes_s)
