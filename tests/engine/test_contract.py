"""
The engine contract, tested on both of its implementations: the one that runs models and the fake.

What only one of them has (bits, files on disk) is tested separately.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from cairn.engine.contract import Engine
from cairn.engine.errors import EngineFault, GrammarDeadEnd
from cairn.engine.mlx.engine import MlxEngine
from cairn.engine.mlx.model import load_model
from cairn.engine.reports import (
    DecodeRow,
    DrawSpec,
    FileReport,
    LoadReport,
    MemoryReport,
    PassReport,
    RejectReport,
    UnwrittenReport,
)
from cairn.engine.row_class import RowClass
from cairn.engine.sampling import Sampling
from cairn.journal.events import Coverage
from tests.support.fake_engine import FakeEngine

CHUNK = 16
IDS = tuple(5 * place % 97 + 3 for place in range(3 * CHUNK))
GREEDY = DrawSpec(sampling=Sampling(temperature=0.0), seed=0)
PLENTY = 1 << 40
ENGINES: dict[str, type[Engine]] = {"mlx": MlxEngine, "fake": FakeEngine}


@pytest.fixture(scope="module")
def mlx_engine(model_directory: Path) -> Callable[[], MlxEngine]:
    """Makes engines over the random model."""
    loaded = load_model(str(model_directory))
    return lambda: MlxEngine(loaded, decode_rows=4)


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest, mlx_engine: Callable[[], MlxEngine]) -> Engine:
    """An empty engine."""
    return mlx_engine() if request.param == "mlx" else FakeEngine()


@pytest.fixture
def filed(engine: Engine, tmp_path: Path) -> Engine:
    """An engine that may write files, with one block in memory: "first"."""
    seal(engine, "first")
    engine.open_files(tmp_path, "f" * 16, {}, run="run-1")
    return engine


class Allowing:
    """Allows only some tokens; if there are none, it raises a dead end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)
        self.asked: list[tuple[int, ...]] = []
        self.adopted: list[Allowing] = []

    def fork(self) -> Allowing:
        """It has no state, except for what it was asked."""
        forked = Allowing(*self.tokens)
        forked.asked = self.asked
        return forked

    def adopt(self, fork: Any) -> None:
        """Take note."""
        self.adopted.append(fork)

    def allowed(self, answer: Sequence[int]) -> npt.NDArray[np.bool_]:
        """A mask as long as the random model's vocabulary."""
        self.asked.append(tuple(answer))
        if not self.tokens:
            raise GrammarDeadEnd("no token can come next")
        mask = np.zeros(2048, dtype=np.bool_)
        mask[self.tokens] = True
        return mask


def open_with(engine: Engine, ids: Sequence[int] = IDS[:CHUNK]) -> int:
    """A slab that holds these tokens."""
    slab = engine.open_slab(512).slab
    for start in range(0, len(ids), CHUNK):
        engine.run_chunk(slab, ids[start : start + CHUNK], None)
    return slab


def seal(engine: Engine, *keys: str) -> tuple[str, ...]:
    """A block for each key, of the first chunks; their digests."""
    slab = open_with(engine, IDS[: len(keys) * CHUNK])
    found = [
        engine.seal(slab, key, place * CHUNK, (place + 1) * CHUNK, store=True).digest
        for place, key in enumerate(keys)
    ]
    engine.close_slab(slab)
    return tuple(found)


def held(coverage: Coverage) -> set[tuple[int, int]]:
    """What the layers hold, by a coverage."""
    return {(start, end) for _, start, end in coverage}


def row(slab: int, token: int = 7, draw: DrawSpec = GREEDY) -> DecodeRow:
    """A row of a decode pass."""
    return DecodeRow(slab=slab, token=token, draw=draw)


def decode(engine: Engine, *rows: DecodeRow | None) -> Sequence[Any]:
    """The reports of a pass with these rows in front."""
    return engine.decode([*rows, *[None] * (engine.decode_rows - len(rows))])


@pytest.mark.parametrize("name", ENGINES)
def test_it_declares_and_implements_the_whole_contract(name: str) -> None:
    """With the names and the defaults of the contract, so that a call fits either."""
    made = ENGINES[name]
    methods = {
        method: inspect.signature(function)
        for method, function in inspect.getmembers(Engine, inspect.isfunction)
        if not method.startswith("_")
    }

    assert Engine in made.__mro__
    assert not inspect.isabstract(made)
    assert 19 == len(methods)
    for method, contract in methods.items():
        given = inspect.signature(getattr(made, method)).parameters
        wanted = [(one.name, one.kind, one.default) for one in contract.parameters.values()]
        found = [(one.name, one.kind, one.default) for one in given.values()]
        assert wanted == found[: len(wanted)], method
        assert all(default is not inspect.Parameter.empty for *_, default in found[len(wanted) :])


# --- slabs ---------------------------------------------------------------------------------------


def test_slabs_are_opened_and_closed(engine: Engine) -> None:
    """Each slab has its own number, and reports have what is held afterwards."""
    first, second = engine.open_slab(512), engine.open_slab(1024)
    assert first.slab != second.slab
    assert (512, 1) == (first.capacity_tokens, first.pool_slabs)
    assert (1024, 2) == (second.capacity_tokens, second.pool_slabs)
    assert first.bytes + second.bytes == second.pool_bytes == engine.memory().slab_bytes
    assert 2 * first.bytes == second.bytes

    closed = engine.close_slab(first.slab)
    assert (first.slab, 512, first.bytes) == (closed.slab, closed.capacity_tokens, closed.bytes)
    assert (1, second.bytes) == (closed.pool_slabs, closed.pool_bytes)
    assert engine.open_slab(512).slab not in (first.slab, second.slab)


def test_memory_is_measured_and_given_back(engine: Engine) -> None:
    """Closed slabs and evicted blocks are not counted; the others stay."""
    slab = open_with(engine)
    sealed = engine.seal(slab, "one", 0, CHUNK, store=True)
    before = engine.memory()
    assert isinstance(before, MemoryReport)
    assert sealed.bytes == before.block_bytes

    engine.give_back_memory()
    assert before.slab_bytes == engine.memory().slab_bytes
    assert before.block_bytes == engine.memory().block_bytes
    engine.close_slab(slab)
    engine.evict("one")
    assert (0, 0) == (engine.memory().slab_bytes, engine.memory().block_bytes)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.close_slab(9),
        lambda engine: engine.held_tokens(9),
        lambda engine: engine.trim(9, 0),
        lambda engine: engine.run_chunk(9, [1], None),
        lambda engine: engine.seal(9, "one", 0, CHUNK, store=False),
        lambda engine: engine.share(9, [], 0),
    ],
    ids=["close", "held", "trim", "run", "seal", "share"],
)
def test_a_slab_that_is_not_open(engine: Engine, call: Callable[[Engine], object]) -> None:
    """Any call with it is a fault."""
    with pytest.raises(EngineFault):
        call(engine)


def test_a_slab_is_cut_back(engine: Engine) -> None:
    """The report has what it held, and what is left."""
    slab = open_with(engine, IDS)
    report = engine.trim(slab, CHUNK)
    assert len(IDS) == report.cached_tokens
    assert {(0, CHUNK)} == held(report.coverage)
    assert CHUNK == engine.held_tokens(slab)


# --- passes --------------------------------------------------------------------------------------


def test_a_prefill_pass_adds_its_tokens(engine: Engine) -> None:
    """The report has the tokens that ran and their positions; a token is drawn only on request."""
    slab = engine.open_slab(512).slab
    first = engine.run_chunk(slab, IDS[:CHUNK], None)
    last = engine.run_chunk(slab, IDS[CHUNK : CHUNK + 3], GREEDY)

    assert (0, CHUNK, IDS[:CHUNK], None) == (first.start, first.end, first.ran, first.drawn)
    assert {(0, CHUNK)} == held(first.coverage)
    assert (CHUNK, CHUNK + 3, IDS[CHUNK : CHUNK + 3]) == (last.start, last.end, last.ran)
    assert {(0, CHUNK + 3)} == held(last.coverage)
    assert last.drawn is not None
    assert last.drawn.logprob <= 0
    assert CHUNK + 3 == engine.held_tokens(slab)


def test_a_prefill_pass_that_does_not_fit(engine: Engine) -> None:
    """A slab is never run over."""
    slab = engine.open_slab(CHUNK).slab
    engine.run_chunk(slab, IDS[:CHUNK], None)
    with pytest.raises(EngineFault):
        engine.run_chunk(slab, IDS[:1], None)


def test_without_a_row_class_passes_are_canonical(engine: Engine) -> None:
    """It is not known before it was measured."""
    assert engine.row_class is None


@pytest.mark.parametrize("least", [1, 5])
def test_with_a_row_class_passes_begin_anywhere(engine: Engine, least: int) -> None:
    """The reports have the tokens and not the dummies; too many tokens are a fault."""
    row_class = RowClass(segment=CHUNK, quantum=1, least=least, most=24, product=0)
    vars(engine)["_row_class" if isinstance(engine, MlxEngine) else "row_class"] = row_class
    assert row_class == engine.row_class
    slab = engine.open_slab(512).slab
    for size in (3, 1, 17, 24):
        start = engine.held_tokens(slab)
        ids = (IDS * 2)[start : start + size]
        report = engine.run_chunk(slab, ids, GREEDY)
        assert (start, start + size, ids) == (report.start, report.end, report.ran)
        assert {(0, start + size)} == held(report.coverage)
        assert report.drawn is not None
    with pytest.raises(EngineFault):
        engine.run_chunk(slab, IDS[:25], None)
    with pytest.raises(EngineFault):
        engine.run_chunk(slab, (), None)
    assert 45 == engine.held_tokens(slab)


def test_a_dead_end_in_prefill_runs_nothing(engine: Engine) -> None:
    """The grammar is asked before the pass."""
    slab = open_with(engine)
    with pytest.raises(GrammarDeadEnd):
        engine.run_chunk(slab, IDS[:3], DrawSpec(sampling=Sampling(), seed=0, matcher=Allowing()))
    assert CHUNK == engine.held_tokens(slab)


def test_a_decode_pass_adds_a_token_to_each_row(engine: Engine) -> None:
    """Reports are in the order of rows, with None for a row that is not used."""
    first, second = open_with(engine), open_with(engine, IDS)
    reports = decode(engine, row(first, 5), None, row(second, 6))

    assert engine.decode_rows == len(reports)
    one, empty, other = reports[:3]
    assert empty is None is reports[3]
    assert (CHUNK, CHUNK + 1, (5,)) == (one.start, one.end, one.ran)
    assert (len(IDS), len(IDS) + 1, (6,)) == (other.start, other.end, other.ran)
    assert {(0, CHUNK + 1)} == held(one.coverage)
    assert one.drawn is not None is not other.drawn
    assert (CHUNK + 1, len(IDS) + 1) == (engine.held_tokens(first), engine.held_tokens(second))


def test_the_grammar_is_asked_with_the_answer_so_far(engine: Engine) -> None:
    """The matcher gets the tokens before the drawn one, in prefill and decode passes."""
    slab, matcher = open_with(engine), Allowing(ord("a"))
    draw = DrawSpec(sampling=Sampling(), seed=0, matcher=matcher)
    engine.run_chunk(slab, IDS[:3], draw)
    decode(engine, row(slab, ord("a"), draw.after(ord("a"))))
    assert [(), (ord("a"),)] == matcher.asked


def test_a_row_that_fails_leaves_the_others_alone(engine: Engine) -> None:
    """Its report is the fault; its slab, if it has one, does not change."""
    full = engine.open_slab(CHUNK).slab
    engine.run_chunk(full, IDS[:CHUNK], None)
    stuck, fine = open_with(engine), open_with(engine)
    dead_end = DrawSpec(sampling=Sampling(), seed=0, matcher=Allowing())
    reports = decode(engine, row(full), row(9), row(stuck, draw=dead_end), row(fine))

    assert [EngineFault, EngineFault, GrammarDeadEnd, PassReport] == [type(one) for one in reports]
    assert [CHUNK, CHUNK, CHUNK + 1] == [engine.held_tokens(one) for one in (full, stuck, fine)]


def test_a_decode_pass_of_another_width(engine: Engine) -> None:
    """A pass has one of the numbers of rows that were found to give the same bits."""
    slab = open_with(engine)
    assert engine.decode_rows == engine.decode_shapes[-1]
    for count in set(range(engine.decode_rows + 2)) - set(engine.decode_shapes):
        with pytest.raises(EngineFault):
            engine.decode([row(slab), *[None] * (count - 1)][:count])
    assert CHUNK == engine.held_tokens(slab)
    for count in engine.decode_shapes:
        reports = engine.decode([row(slab), *[None] * (count - 1)])
        assert [True] + [False] * (count - 1) == [one is not None for one in reports]
    assert CHUNK + len(engine.decode_shapes) == engine.held_tokens(slab)


def drafting(engine: Engine) -> Engine:
    """The engine, allowed to have draft rows."""
    engine.without_drafts = ""  # type: ignore[misc]
    return engine


def passes_of(engine: Engine, slab: int, steps: int, draw: DrawSpec = GREEDY) -> list[PassReport]:
    """Passes of a token each: what an answer draws without drafts."""
    found: list[PassReport] = []
    for _ in range(steps):
        token = 7 if not found else tokens_of(found[-1])[-1]
        draw = draw.after(token)
        found.append(decode(engine, row(slab, token, draw))[0])
    return found


def tokens_of(report: PassReport) -> list[int]:
    """The tokens that a pass drew."""
    return [one.token for one in report.all_drawn]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_draft_is_accepted_as_far_as_it_is_right(engine: Engine, right: int) -> None:
    """The report and the slab are as after as many passes of one token; the rest is cut off."""
    single = passes_of(engine, open_with(engine), 4)
    drawn = [tokens_of(one)[0] for one in single]
    wrong = (drawn[right] + 1) % 128 if right < 3 else 0
    draft = (*drawn[:right], *[wrong] * (3 - right))
    slab = open_with(drafting(engine))
    [report] = engine.decode([attrs.evolve(row(slab), draft=draft)])

    assert isinstance(report, PassReport)
    end = CHUNK + 1 + right
    assert (CHUNK, end, (7, *draft[:right])) == (report.start, report.end, report.ran)
    assert (drawn[: right + 1], 3) == (tokens_of(report), report.drafted)
    assert {(0, end)} == held(report.coverage)
    assert end == engine.held_tokens(slab)
    # It goes on as the other did.
    if right < 3:
        after = decode(engine, row(slab, drawn[right]))[0]
        assert (drawn[right + 1], end) == (tokens_of(after)[0], after.start)


def test_drafts_of_several_sessions(engine: Engine) -> None:
    """Each report is of its own session, beside a row without one."""
    first, second = open_with(drafting(engine)), open_with(engine, IDS)
    reports = engine.decode([attrs.evolve(row(first), draft=(1,)), None, row(second, 6)])
    assert [(7,), None, (6,)] == [one.ran[:1] if one else None for one in reports]  # type: ignore[union-attr]
    assert len(IDS) + 1 == engine.held_tokens(second)


def test_a_draft_ends_where_the_grammar_does(engine: Engine) -> None:
    """Its other tokens have no row; the matcher is asked with those before."""
    matcher = Allowing(5)
    draw = DrawSpec(sampling=Sampling(temperature=0.0), seed=0, matcher=matcher)
    slab = open_with(drafting(engine))
    [report] = engine.decode([DecodeRow(slab=slab, token=7, draw=draw, draft=(5, 6, 5))])
    assert isinstance(report, PassReport)
    assert 1 == report.drafted
    assert (5,) in matcher.asked
    assert not [asked for asked in matcher.asked if 6 in asked]
    assert len(report.accepted) == len(matcher.adopted)


def test_a_draft_without_room_or_without_leave(engine: Engine) -> None:
    """A slab that is too full for all rows is the row's fault; without leave nothing runs."""
    slab = engine.open_slab(CHUNK + 3).slab
    engine.run_chunk(slab, IDS[:CHUNK], None)
    asked = attrs.evolve(row(slab), draft=(1, 2, 3))
    [report] = drafting(engine).decode([asked])
    assert isinstance(report, EngineFault)
    engine.without_drafts = "not here"  # type: ignore[misc]
    with pytest.raises(EngineFault, match="not here"):
        engine.decode([asked])
    assert CHUNK == engine.held_tokens(slab)


def test_the_memory_of_decode_passes(engine: Engine) -> None:
    """Slabs that do not grow take as much before a pass as after it."""
    slab = open_with(engine)
    before = engine.memory().slab_bytes
    decode(engine, row(slab))
    assert engine.grows is (engine.memory().slab_bytes != before) is False


# --- blocks --------------------------------------------------------------------------------------


def test_blocks_are_sealed(engine: Engine) -> None:
    """The slab does not change; a block that is only hashed is not kept."""
    slab = open_with(engine, IDS)
    hashed = engine.seal(slab, "first", 0, CHUNK, store=False)
    assert (False, 0, 0) == (hashed.stored, hashed.memory_blocks, hashed.memory_bytes)
    assert "" == engine.digest_of("first")

    first = engine.seal(slab, "first", 0, CHUNK, store=True)
    second = engine.seal(slab, "second", CHUNK, 2 * CHUNK, store=True)
    assert hashed.digest == first.digest == engine.digest_of("first")
    assert first.digest != second.digest
    assert (True, 2, first.bytes + second.bytes) == (
        second.stored,
        second.memory_blocks,
        second.memory_bytes,
    )
    assert len(IDS) == engine.held_tokens(slab)


def test_a_block_that_is_there_stays(engine: Engine) -> None:
    """Sealed again under its key, by a slab with other tokens."""
    (digest,) = seal(engine, "first")
    slab = open_with(engine, IDS[CHUNK : 2 * CHUNK])
    report = engine.seal(slab, "first", 0, CHUNK, store=True)
    assert digest != report.digest
    assert digest == engine.digest_of("first")
    assert 1 == report.memory_blocks


def test_blocks_are_copied_into_a_slab(engine: Engine) -> None:
    """One call or several: the copies have the digests of the blocks, and passes go on there."""
    digests = seal(engine, "first", "second", "third")
    slab = engine.open_slab(512).slab
    one = engine.share(slab, ["first"], 0)
    more = engine.share(slab, ["second", "third"], CHUNK)

    assert digests == (*one.digests, *more.digests)
    assert {(0, 3 * CHUNK)} == held(more.coverage)
    assert 3 * CHUNK == engine.held_tokens(slab)
    assert 3 * CHUNK == engine.run_chunk(slab, IDS[:3], GREEDY).start


@pytest.mark.parametrize(("keys", "start"), [(["first", "gone"], 0), (["first"], CHUNK)])
def test_blocks_that_cannot_be_copied(engine: Engine, keys: list[str], start: int) -> None:
    """With a missing block, or a position that is not the slab's end, nothing is copied."""
    seal(engine, "first")
    slab = engine.open_slab(512).slab
    with pytest.raises(EngineFault):
        engine.share(slab, keys, start)
    assert 0 == engine.held_tokens(slab)


@pytest.mark.parametrize("rows", [1, 5, CHUNK])
def test_the_first_rows_of_a_block_are_copied(engine: Engine, rows: int) -> None:
    """The slab goes on after them, and the digest is that of the whole block."""
    digests = seal(engine, "first", "second")
    slab = engine.open_slab(512).slab
    engine.share(slab, ["first"], 0)
    report = engine.share(slab, ["second"], CHUNK, [CHUNK], rows=rows)
    assert digests[1:] == report.digests
    assert {(0, CHUNK + rows)} == held(report.coverage)
    assert CHUNK + rows == engine.held_tokens(slab)
    assert digests[1] == engine.digest_of("second")


@pytest.mark.parametrize(
    ("keys", "start", "rows"),
    [
        (["first"], 0, 0),
        (["first"], 0, -1),
        (["first"], 0, CHUNK + 1),
        (["first", "second"], 0, 3),
        ([], 0, 3),
        (["gone"], 0, 3),
        (["first"], 3, 3),
    ],
)
def test_rows_that_cannot_be_copied(engine: Engine, keys: list[str], start: int, rows: int) -> None:
    """Only the first rows of one block, and no more than it has; else nothing is copied."""
    seal(engine, "first", "second")
    slab = engine.open_slab(512).slab
    with pytest.raises(EngineFault):
        engine.share(slab, keys, start, rows=rows)
    assert 0 == engine.held_tokens(slab)


def test_blocks_are_evicted(engine: Engine) -> None:
    """The report has what is left; a block that is not there is a fault."""
    seal(engine, "first", "second")
    size = engine.memory().block_bytes
    report = engine.evict("first")
    assert ("first", size - report.bytes, 1) == (
        report.key,
        report.memory_bytes,
        report.memory_blocks,
    )
    assert "" == engine.digest_of("first")
    with pytest.raises(EngineFault):
        engine.evict("first")


# --- block files ---------------------------------------------------------------------------------


def test_without_files_nothing_is_written_or_read(engine: Engine) -> None:
    """Before a folder was opened."""
    (digest,) = seal(engine, "first")
    assert engine.spill("first", (0, CHUNK), digest, PLENTY) is None
    assert engine.load("first", digest) is None
    assert engine.drop_file("first") is None


def test_a_scan_reports_files_that_are_missing(engine: Engine, tmp_path: Path) -> None:
    """The file is on record but missing."""
    report = engine.open_files(tmp_path, "f" * 16, {"gone": 100}, run="run-2", earlier=["run-1"])
    assert [("gone", "missing")] == [(one.key, one.reason) for one in report.rejected]
    assert (0, 0) == (report.disk_blocks, report.disk_bytes)


def test_a_block_is_written_and_read_again(filed: Engine) -> None:
    """Each only once: an existing file is not written again, nor a block in memory read."""
    digest = filed.digest_of("first")
    written = filed.spill("first", (0, CHUNK), digest, PLENTY)
    assert isinstance(written, FileReport)
    assert ("first", digest, 1) == (written.key, written.digest, written.disk_blocks)
    assert 0 < written.bytes == written.disk_bytes
    assert filed.spill("first", (0, CHUNK), digest, PLENTY) is None
    assert filed.load("first", digest) is None

    filed.evict("first")
    assert filed.spill("first", (0, CHUNK), digest, PLENTY) is None
    read = filed.load("first", digest)
    assert isinstance(read, LoadReport)
    assert ("first", digest, 1) == (read.key, read.digest, read.memory_blocks)
    assert read.bytes == read.memory_bytes == filed.memory().block_bytes
    assert digest == filed.digest_of("first")


def test_a_block_of_another_node_is_read(engine: Engine, tmp_path: Path) -> None:
    """By the digest in that node's journal. A file that has another one is set aside."""
    (digest,) = seal(engine, "first")
    size = engine.memory().block_bytes
    assert engine.adopt("first", "n1", digest, size) is None
    engine.open_files(tmp_path / "n1", "f" * 16, {}, run="run-1", shared=True)
    assert isinstance(engine.spill("first", (0, CHUNK), digest, PLENTY), FileReport)
    engine.evict("first")
    assert engine.adopt("first", "n2", digest, size) is None
    for _ in range(2):  # one in memory stays as it is
        read = engine.adopt("first", "n1", digest, size)
        assert isinstance(read, LoadReport)
        assert ("first", digest, 1, size) == (
            read.key,
            read.digest,
            read.memory_blocks,
            read.memory_bytes,
        )
    assert digest == engine.digest_of("first")
    rejected = engine.adopt("first", "n1", "another", size)
    assert isinstance(rejected, RejectReport)
    assert ("first", "digest") == (rejected.key, rejected.reason)
    assert engine.adopt("first", "n1", digest, size) is None


def test_a_block_of_another_digest_is_not_written(filed: Engine) -> None:
    """The report has the digest that was found."""
    report = filed.spill("first", (0, CHUNK), "another", PLENTY)
    assert isinstance(report, FileReport)
    assert (filed.digest_of("first"), 0, 0) == (report.digest, report.bytes, report.disk_blocks)
    assert not isinstance(report, UnwrittenReport)


def test_a_block_that_exceeds_the_budget_is_not_written(filed: Engine) -> None:
    """Nothing was to be done, then or later."""
    digest = filed.digest_of("first")
    assert filed.spill("first", (0, CHUNK), digest, 1) is None
    assert filed.drop_file("first") is None


def test_a_file_of_another_digest_is_rejected(filed: Engine) -> None:
    """It is no longer counted."""
    digest = filed.digest_of("first")
    filed.spill("first", (0, CHUNK), digest, PLENTY)
    filed.evict("first")
    report = filed.load("first", "another")
    assert isinstance(report, RejectReport)
    assert "first" == report.key
    assert filed.load("first", digest) is None


def test_a_file_is_removed(filed: Engine) -> None:
    """The block in memory stays."""
    digest = filed.digest_of("first")
    written = filed.spill("first", (0, CHUNK), digest, PLENTY)
    dropped = filed.drop_file("first")
    assert isinstance(written, FileReport)
    assert isinstance(dropped, FileReport)
    assert ("first", "", written.bytes) == (dropped.key, dropped.digest, dropped.bytes)
    assert (0, 0) == (dropped.disk_blocks, dropped.disk_bytes)
    assert filed.drop_file("first") is None
    assert digest == filed.digest_of("first")
