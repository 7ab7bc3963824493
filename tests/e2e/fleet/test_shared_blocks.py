"""Nodes that share blocks: a conversation that moves to another node goes on with its KV."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cairn.journal import events as ev
from tests.e2e.operation.test_startup import refusal
from tests.support.processes.fleet import Fleet
from tests.support.processes.postgres import Postgres
from tests.support.processes.subprocess_server import (
    Answer,
    Serving,
    ask,
    assistant,
    eventually,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "
LENGTH = 100
"""How often the first message says so: a prompt of well over a thousand tokens."""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder that all nodes see."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def fleet(postgres: Postgres, tmp_path: Path, shared: Path, model_directory: Path) -> Fleet:
    """A fleet that shares blocks, of which no node runs."""
    options = ("--model", model_directory, "--blocks", shared)
    return Fleet(postgres.new_database(), tmp_path, options)


def files_of(shared: Path, node: str) -> dict[str, Path]:
    """The block files of a node, by their keys."""
    return {path.stem: path for path in sorted((shared / node).rglob("*.safetensors"))}


def next_turn(talk: list[dict[str, str]], answer: Answer) -> list[dict[str, str]]:
    """The conversation with its answer, and the next user message."""
    return [*talk, assistant(answer.text), user("And then?")]


def talk_on(node: Serving) -> list[dict[str, str]]:
    """A conversation of two turns on a node, and the message that comes next."""
    talk = [user(PATH * LENGTH)]
    for _ in range(2):
        talk = next_turn(talk, ask(node, *talk, max_tokens=8))
    return talk


@contextmanager
def moved(fleet: Fleet, shared: Path) -> Iterator[tuple[Serving, list[dict[str, str]]]]:
    """A node with a conversation whose blocks are in files, and the messages of its next turn."""
    with fleet.node("n1") as one:
        talk = talk_on(one)
        one.wait_idle()
        prompt = fleet.of_kind("n1", ev.RequestReceived)[-1].prompt_tokens
        block = fleet.of_kind("n1", ev.ModelLoaded)[0].block_tokens
        eventually(lambda: len(files_of(shared, "n1")) >= prompt // block)
        yield one, talk
        one.wait_idle()
        assert 0 == one.stop()


def adopted(fleet: Fleet, node: str) -> list[ev.BlockAdopted]:
    """The blocks that a node has adopted."""
    return fleet.of_kind(node, ev.BlockAdopted)


# --- a conversation moves -------------------------------------------------------------------------


def test_a_conversation_that_moves(fleet: Fleet, shared: Path, postgres: Postgres):
    """
    The other node reuses nearly as much as the first one would, and its answer has the same bits as
    one that reuses nothing. It adopts each block by the row of the node that sealed it, and leaves
    that node's files as they are. An adoption whose row is gone later is found.
    """
    with moved(fleet, shared) as (one, talk), fleet.node("n2") as two:
        files = {path: path.read_bytes() for path in files_of(shared, "n1").values()}
        there = ask(two, *talk, max_tokens=8, logprobs=True)
        here = ask(one, *talk, max_tokens=8, logprobs=True)
        cold = ask(one, *talk, max_tokens=8, logprobs=True, cache_prompt=False)
        assert here.bits == there.bits == cold.bits
        assert 0 == cold.cached_tokens
        assert there.cached_tokens >= 0.95 * here.cached_tokens > 1000
        sealed = {row.position: row for row in fleet.recorded("n1")}
        for event in adopted(fleet, "n2"):
            row = sealed[event.position].event
            assert isinstance(row, ev.BlockSealed)
            assert ("n1", row.key, row.digest) == (event.node, event.key, event.digest)
        two.wait_idle()
        _, explained, _ = run_ops("explain", *fleet.where("n2"))
        assert f"Node n1 computed {len(adopted(fleet, 'n2'))} of the copied blocks." in explained
        assert "Node n" not in run_ops("explain", *fleet.where("n1"))[1]
        assert 0 == two.stop()
        assert files.items() <= {path: path.read_bytes() for path in files}.items()
        assert not {event.key for event in adopted(fleet, "n2")} & files_of(shared, "n2").keys()
    fleet.assert_valid("n1", "n2")
    code, verdict = fleet.audit()
    assert (0, 0) == (code, verdict["broken"])
    adoptions = adopted(fleet, "n2")
    assert verdict["named_rows"]["present"] >= len(adoptions)
    assert verdict["shared_blocks"] >= len({event.key for event in adoptions})
    with postgres.connect(fleet.name) as connection:
        last = max(event.position for event in adoptions)
        connection.execute(f"DELETE FROM node_n1.events WHERE position >= {last}")
    code, verdict = fleet.audit()
    missing = [one["message"] for one in verdict["findings"] if "block_adopted" in one["message"]]
    assert (1, True) == (code, f"row {last} of n1 (block_adopted) was removed" in missing[0])


def test_a_node_that_shares_no_blocks(fleet: Fleet, shared: Path, model_directory: Path):
    """The control: without `--blocks` a conversation that moves is computed from its beginning."""
    alone = Fleet(fleet.url, fleet.folder, ("--model", model_directory))
    with moved(fleet, shared) as (one, talk), alone.node("n2") as two:
        there = ask(two, *talk, max_tokens=8, logprobs=True)
        assert 0 == there.cached_tokens
        assert ask(one, *talk, max_tokens=8, logprobs=True).bits == there.bits
        assert not adopted(fleet, "n2")


@pytest.mark.long
def test_a_node_that_starts_again(fleet: Fleet, shared: Path):
    """
    What a node adopted is gone with its memory, and is adopted again, by the same rows. Its own
    files are found again.
    """
    with moved(fleet, shared) as (_, talk):
        with fleet.node("n2") as two:
            first = ask(two, *talk, max_tokens=8)
            before = adopted(fleet, "n2")
            two.wait_idle()
            assert 0 == two.stop()
        with fleet.node("n2") as two:
            again = ask(two, *next_turn(talk, first), max_tokens=8)
            assert again.cached_tokens >= first.cached_tokens
            assert [attributes(one) for one in before] == [
                attributes(one) for one in adopted(fleet, "n2")[len(before) :]
            ]
            two.wait_idle()
            assert 0 == two.stop()
    fleet.assert_valid("n1", "n2")


def attributes(event: ev.BlockAdopted) -> tuple[Any, ...]:
    """What names a block, and the row by which it was adopted."""
    return event.key, event.digest, event.node, event.position, event.row_hash


# --- files that cannot be used --------------------------------------------------------------------


def test_a_file_that_is_flipped(fleet: Fleet, shared: Path):
    """It is not used, with both nodes named, and the answer is the same. The file stays."""
    with moved(fleet, shared) as (_, talk), fleet.node("n2") as two:
        sealed = fleet.of_kind("n1", ev.BlockSealed)
        path = files_of(shared, "n1")[sealed[2].key]
        octets = bytearray(path.read_bytes())
        octets[-1] ^= 1
        path.write_bytes(octets)
        there = ask(two, *talk, max_tokens=8, logprobs=True)
        assert there.bits == ask(two, *talk, max_tokens=8, logprobs=True, cache_prompt=False).bits
        assert sealed[1].end == there.cached_tokens
        (rejected,) = fleet.of_kind("n2", ev.BlockFileRejected)
        assert (sealed[2].key, "digest", "n1") == (rejected.key, rejected.reason, rejected.node)
        assert rejected.moved_to is None
        assert bytes(octets) == path.read_bytes()
        (said,) = (one for one in two.log() if "a block file was rejected" == one["event"])
        assert ("n1", "n2") == (said["written_by"], said["rejected_by"])
        two.wait_idle()
        assert 0 == two.stop()
    fleet.assert_valid("n1", "n2")


@pytest.mark.long
def test_a_file_that_is_gone(fleet: Fleet, shared: Path):
    """It is a miss: what comes before it is adopted, the rest is computed."""
    with moved(fleet, shared) as (_, talk), fleet.node("n2") as two:
        sealed = fleet.of_kind("n1", ev.BlockSealed)
        files_of(shared, "n1")[sealed[2].key].unlink()
        there = ask(two, *talk, max_tokens=8, logprobs=True)
        assert there.bits == ask(two, *talk, max_tokens=8, logprobs=True, cache_prompt=False).bits
        assert sealed[1].end == there.cached_tokens
        assert not fleet.of_kind("n2", ev.BlockFileRejected)
        two.wait_idle()
        assert 0 == two.stop()
    fleet.assert_valid("n2")


def test_two_fingerprints(fleet: Fleet, shared: Path):
    """They share nothing, because the fingerprint is in every key."""
    with moved(fleet, shared) as (_, talk), fleet.node("n2", "--decode-rows", 2) as two:
        assert 0 == ask(two, *talk, max_tokens=8).cached_tokens
        assert not adopted(fleet, "n2")
        assert not fleet.of_kind("n2", ev.BlockFileRejected)
        two.wait_idle()
        assert 0 == two.stop()


# --- files that are forgotten ---------------------------------------------------------------------


def test_forgetting_without_the_folder(fleet: Fleet, shared: Path):
    """
    `ops forget` and `ops journal prune` refuse to look in the data directory, which has an empty
    folder of blocks, and change nothing. With another folder, a file that is not there is left.
    With the node's folder, the files go, and the node that adopted them is named.
    """
    with moved(fleet, shared) as (_, talk), fleet.node("n2") as two:
        ask(two, *talk, max_tokens=8)
        two.wait_idle()
        assert 0 == two.stop()
    (fleet.home("n1") / "blocks").mkdir(exist_ok=True)
    files, rows = files_of(shared, "n1"), fleet.recorded("n1")
    assert files
    session = fleet.of_kind("n1", ev.SessionOpened)[0].session
    forget = ("forget", *fleet.where("n1"), "--yes", session)
    prune = ("journal", "prune", *fleet.where("n1"), "--before", "0m", "--recent", "--close-idle")
    for command in (forget, prune):
        code, _, err = run_ops(*command)
        assert (2, True) == (code, "Add --blocks DIR" in err), err
    assert (files, rows) == (files_of(shared, "n1"), fleet.recorded("n1"))
    other = fleet.folder / "other"
    (other / "n1").mkdir(parents=True)
    code, _, err = run_ops(*forget, "--blocks", other)
    assert (2, True) == (code, "If the node uses another --blocks" in err), err
    assert not fleet.of_kind("n1", ev.BlockFileRemoved)
    code, out, err = run_ops(*forget, "--blocks", shared)
    assert (0, {}) == (code, files_of(shared, "n1")), err
    assert "- on node n2, whose journal has blocks of the same text" in out
    assert files.keys() == {event.key for event in fleet.of_kind("n1", ev.BlockFileRemoved)}
    _, out, _ = run_ops("verify", *fleet.where("n1"))
    assert "broken: 0" in out.splitlines()


@pytest.mark.long
def test_a_node_whose_blocks_move(fleet: Fleet, shared: Path, model_directory: Path):
    """
    A node with files in the shared folder does not start without it, nor the other way round,
    before a start has removed them.
    """
    alone = Fleet(fleet.url, fleet.folder, ("--model", model_directory))
    local = fleet.home("n1") / "blocks"
    for before, after in ((alone, fleet), (fleet, alone)):
        with before.node("n1") as one:
            talk_on(one)
            one.wait_idle()
            assert 0 == one.stop()
        assert files_of(shared, "n1") or list(local.rglob("*.safetensors"))
        rows = fleet.recorded("n1")
        own = ("--journal", after.url, "--node", "n1", *after.options)
        assert "--disk-mb 0" in refusal("--data-dir", fleet.home("n1"), *own)
        assert rows == fleet.recorded("n1")
        with before.node("n1", "--disk-mb", 0) as one:
            assert 0 == one.stop()
        assert not files_of(shared, "n1")
        assert not list(local.rglob("*.safetensors"))
        with after.node("n1") as one:
            assert 0 == one.stop()
    fleet.assert_valid("n1")


# --- options --------------------------------------------------------------------------------------


def test_blocks_of_no_node(tmp_path: Path, shared: Path):
    """`--blocks` is refused without `--node`, or if the folder is missing or cannot be written."""
    home = ("--data-dir", tmp_path / "home")
    assert "Add --node NAME" in refusal(*home, "--blocks", shared)
    code, _, err = run_ops("serve", *home, "--node", "n1", "--blocks", tmp_path / "none")
    assert (2, True) == (code, "does not exist" in err), err
    closed = Path("/proc") if Path("/proc/self").exists() else tmp_path / "closed"
    if closed.name == "closed":
        closed.mkdir(mode=0o500)
    code, _, err = run_ops("serve", *home, "--node", "n1", "--blocks", closed)
    assert (2, True) == (code, f"{closed} cannot be written" in err), err
    assert not (tmp_path / "home").exists()
