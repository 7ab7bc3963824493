"""
Files on disk are changed by others, between two runs and while the server runs: either the answers
are those of an undamaged server, or it reports what is wrong and stops.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.e2e.operation.test_startup import refusal, rows
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assistant,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def next_turn(talk: list[dict[str, str]], text: str) -> list[dict[str, str]]:
    """The conversation with its answer, and the next user message."""
    return [*talk, assistant(text), user("And then?")]


def files_of(server: Serving) -> dict[Path, bytes]:
    """The block files and their contents."""
    return {path: path.read_bytes() for path in (server.data_dir / "blocks").rglob("*.safetensors")}


# --- the model ----------------------------------------------------------------------------------


@pytest.fixture
def model(model_directory: Path, tmp_path: Path) -> Path:
    """A copy of the model that the test may change."""
    copy = tmp_path / "model"
    shutil.copytree(model_directory, copy)
    return copy


def change_a_weight(model: Path) -> None:
    """Flip the sign of one number in the last tensor; done twice, the file is as before."""
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0x80]))


@pytest.mark.long
def test_a_weight_that_changed_between_two_runs(start: Start, cold: Serving, model: Path):
    """
    The changed model has another fingerprint and reuses nothing of the first one, whose files stay;
    once the weight is restored, they are reused.
    """
    server = start("--model", model)
    talk = [user(PATH * 20)]
    first = ask(server, *talk)
    talk = next_turn(talk, first.text)
    assert 0 == server.stop()
    before = files_of(server)

    change_a_weight(model)
    other = start("--model", model, data_dir=server.data_dir)
    second = ask(other, *talk)
    assert (0, "new_session", "fingerprint_changed") == (
        second.cached_tokens,
        second.path,
        second.reason,
    )
    assert ask(other, *talk, cache_prompt=False).bits == second.bits
    assert 0 == other.stop()
    fingerprints = [event.fingerprint for event in other.events(ev.ModelLoaded)]
    assert 2 == len(set(fingerprints))
    assert [] == other.events(ev.BlockLoaded)
    assert before
    assert before.items() <= files_of(other).items()

    change_a_weight(model)
    again = start("--model", model, data_dir=server.data_dir)
    third = ask(again, *talk)
    assert fingerprints[0] == again.health()["fingerprint"]
    assert (first.session, "continuation") == (third.session, third.path)
    assert third.cached_tokens >= first.prompt_tokens // 64 * 64 > 0
    assert ask(cold, *talk, cache_prompt=False).bits == third.bits


def cut_the_config(model: Path) -> None:
    """Remove half of config.json."""
    os.truncate(model / "config.json", (model / "config.json").stat().st_size // 2)


def put_another_tokenizer(model: Path) -> None:
    """Put an empty tokenizer without a template in place."""
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    (model / "chat_template.jinja").write_text("", encoding="utf-8")


def cut_the_weights(model: Path) -> None:
    """Remove half of the weights, in the file that was read."""
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size // 2)


@pytest.mark.long
def test_a_model_that_changes_while_it_is_served(start: Start, cold: Serving, model: Path):
    """
    The server no longer reads its files: answers stay the same even when the whole directory is
    gone. The next start reports what is missing.
    """
    server = start("--model", model)
    talk = [user(PATH * 20)]
    first = ask(server, *talk)
    for change in (cut_the_config, put_another_tokenizer, cut_the_weights, shutil.rmtree):
        change(model)
        talk = next_turn(talk, first.text)
        first = ask(server, *talk)
        expected = ask(cold, *talk, cache_prompt=False)
        assert (expected.bits, "continuation") == (first.bits, first.path), change
        assert ask(server, *talk, cache_prompt=False).bits == expected.bits
    server.wait_idle()
    assert 0 == server.stop()
    sentence = refusal("--data-dir", server.data_dir, "--model", model)
    assert f"There is no model directory at '{model}'" in sentence


# --- block files --------------------------------------------------------------------------------


def cut_off(path: Path, other: Path) -> None:
    """Cut the file in half."""
    os.truncate(path, path.stat().st_size // 2)


def put_another(path: Path, other: Path) -> None:
    """Put another block's file in its place."""
    shutil.copy(other, path)


def remove(path: Path, other: Path) -> None:
    """Remove the file."""
    path.unlink()


def put_a_folder(path: Path, other: Path) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()


def put_a_link(path: Path, other: Path) -> None:
    """Move the complete file elsewhere, and put a link in its place."""
    elsewhere = path.parents[3] / path.name
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def put_a_pipe(path: Path, other: Path) -> None:
    """Put a pipe in its place that has no writer."""
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[Callable[[Path, Path], None], str] = {
    cut_off: "unreadable",
    put_another: "foreign",
    remove: "missing",
    put_a_folder: "unreadable",
    put_a_link: "unreadable",
    put_a_pipe: "unreadable",
}


def test_block_files_that_change_under_a_server(start: Start, cold: Serving):
    """
    Each damage is reported as what it is, the sequence of blocks ends before it, and the answers
    are the cold ones. What is not a file stays where it is.
    """
    server = start("--blocks-mb", 1, "--pool-slabs", 1)
    talks: dict[Any, list[dict[str, str]]] = {}
    sessions: dict[Any, str] = {}
    for place, damage in enumerate([*DAMAGES, "none", "none again"]):  # the last stay in memory
        talk = [user(f"{place}: {PATH * 14}")]
        first = ask(server, *talk)
        talks[damage], sessions[damage] = next_turn(talk, first.text), first.session
    server.wait_idle()
    files = {path.stem: path for path in files_of(server)}
    # From the same position, and so of the same size: only the block key in it differs.
    another = server.events(ev.BlockSealed, session=sessions[remove])[1]
    second: dict[Any, ev.BlockSealed] = {}
    for damage in DAMAGES:
        second[damage] = server.events(ev.BlockSealed, session=sessions[damage])[1]
        damage(files[second[damage].key], files[another.key])

    expected: dict[Any, Any] = {}
    for damage, reason in DAMAGES.items():
        answer = ask(server, *talks[damage])
        # More is gone than its first block has.
        assert (64, "new_session") == (answer.cached_tokens, answer.path), damage
        expected[damage] = ask(cold, *talks[damage], cache_prompt=False).bits
        assert expected[damage] == answer.bits
        (rejected,) = server.events(ev.BlockFileRejected, key=second[damage].key)
        assert reason == rejected.reason, damage
        # A block that was computed again has the same digest as before.
        sealed = server.events(ev.BlockSealed, key=second[damage].key)
        assert {second[damage].digest} == {event.digest for event in sealed}
    assert len(DAMAGES) == len(server.events(ev.BlockFileRejected))
    assert files[second[put_a_folder].key].is_dir()
    assert files[second[put_a_link].key].is_symlink()
    assert files[second[put_a_pipe].key].is_fifo()
    assert 0 == server.health()["bugs"]
    server.wait_idle()
    assert 0 == server.stop()

    again = start(data_dir=server.data_dir)
    for damage in DAMAGES:
        assert expected[damage] == ask(again, *talks[damage]).bits


# --- the journal and the secret -----------------------------------------------------------------


def test_a_row_that_is_edited_while_a_server_writes(start: Start, model_directory: Path):
    """
    The running server is not affected and loses nothing. The next start that folds the whole
    journal refuses the row by its number and writes nothing; all rows before it can be read.
    """
    server = start()
    talk = [user(PATH * 4)]
    first = ask(server, *talk)
    server.wait_idle()
    with sqlite3.connect(server.data_dir / "journal.db", timeout=60) as database:
        position, public = database.execute(
            "SELECT position, public FROM events WHERE kind = 'request_finished'"
        ).fetchone()
        damaged = bytes(public).replace(b'"cached_tokens":0', b'"cached_tokens":9')
        assert damaged != bytes(public)
        database.execute("UPDATE events SET public = ? WHERE position = ?", (damaged, position))
    database.close()

    second = ask(server, *next_turn(talk, first.text))
    assert "continuation" == second.path
    server.wait_idle()
    end = server.position()
    assert 0 == server.stop()
    before = rows(server.data_dir)
    assert len(before) > end
    assert second.session in {event.session for event in server.events(ev.RequestFinished)[1:]}

    sentence = refusal("--data-dir", server.data_dir, "--model", model_directory, "--fold-all")
    assert f"INV-8 at row {position}" in sentence
    assert f"`ops verify --data-dir {server.data_dir}`" in sentence
    assert before == rows(server.data_dir)
    code, out, _ = run_ops("verify", "--data-dir", server.data_dir)
    assert 1 == code
    assert f"first broken: row {position}" in out


@pytest.mark.long
def test_a_row_that_is_removed_while_a_server_writes(start: Start):
    """A journal that lost its last row cannot be continued: the server says so and stops."""
    server = start()
    ask(server, user(PATH))
    server.settled()
    with sqlite3.connect(server.data_dir / "journal.db", timeout=60) as database:
        database.execute("DELETE FROM events WHERE position = (SELECT max(position) FROM events)")
    database.close()

    with contextlib.suppress(httpx.RemoteProtocolError):  # it may end before it can answer
        response = server.post(messages=[user("Is there anybody?")], max_tokens=4)
        assert 503 == response.status_code
    assert 1 == server.wait()
    said = server.stderr().strip().splitlines()[-1]
    assert "does not follow row" in said
    assert str(server.data_dir / "journal.db") in said


def test_a_journal_that_is_removed_while_a_server_writes(start: Start):
    """No answer leaves the server without being journaled: it says so and stops."""
    server = start()
    ask(server, user(PATH))
    server.wait_idle()
    (server.data_dir / "journal.db").unlink()

    with contextlib.suppress(httpx.RemoteProtocolError):  # it may end before it can answer
        response = server.post(messages=[user("Is there anybody?")], max_tokens=4)
        assert 503 == response.status_code
    assert 1 == server.wait()
    assert "was removed, moved or replaced" in server.stderr().strip().splitlines()[-1]


@pytest.mark.long
def test_clients_in_hand_when_the_journal_goes(start: Start, lengthy: Any):
    """A stream and a request that waits for a row end with the error, not with a reset."""
    server = start("--decode-rows", 1)
    running = Listener(server, **lengthy[0], max_tokens=800).decoding(3)
    queued = Listener(server, user("Hello"), max_tokens=2)
    server.queued(1)
    (server.data_dir / "journal.db").unlink()
    # The one has an error event in its stream, the other, which had no answer yet, a status of 503.
    refusal = queued.end().refusal
    assert refusal is not None
    for error in (running.end().error, refusal["error"]):
        assert error is not None
        assert "server_stopping" == error["code"]
        assert "its journal cannot be written" in error["message"]
    assert (200, 503) == (running.status, queued.status)
    assert not running.done
    assert 1 == server.wait()
    assert "was removed, moved or replaced" in server.stderr().strip().splitlines()[-1]
    assert "Traceback" not in server.stderr()


def test_logs_that_are_a_file(tmp_path: Path):
    """The start ends with a sentence."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "logs").touch()
    assert f"The log {home / 'logs' / 'cairn.jsonl'} cannot be written" in refusal(
        "--data-dir", home
    )


@pytest.mark.long
@pytest.mark.parametrize("named", [False, True], ids=["by content", "by name"])
def test_another_secret(start: Start, cold: Serving, named: bool):
    """
    With another secret no earlier blocks are found by their keys or by their file names, and
    nothing fails: answers are correct, and the new block keys are used from then on. Only the first
    rows of the first block are still found, by its tokens.
    """
    server = start()
    name = {"session_id": "of-a-client"} if named else {}
    talk = [user(PATH * 20)]
    first = ask(server, *talk, **name)
    talk = next_turn(talk, first.text)
    assert 0 == server.stop()
    (server.data_dir / "secret").write_bytes(bytes(range(32)))

    other = start(data_dir=server.data_dir)
    second = ask(other, *talk, **name)
    assert (63, "new_session") == (second.cached_tokens, second.path)
    assert ask(cold, *talk, cache_prompt=False).bits == second.bits
    talk = next_turn(talk, second.text)
    third = ask(other, *talk, **name)
    assert (second.session, "continuation") == (third.session, third.path)
    assert third.cached_tokens >= second.prompt_tokens // 64 * 64 > 0
    assert ask(cold, *talk, cache_prompt=False).bits == third.bits
    # No earlier block key is used again for the same tokens.
    other.wait_idle()
    sealed = other.events(ev.BlockSealed)
    assert len(sealed) == len({event.key for event in sealed})


@pytest.mark.long
def test_a_secret_of_another_length(start: Start, model_directory: Path):
    """An invalid secret is refused with what to do, before anything else is read."""
    server = start()
    ask(server, user(PATH))
    assert 0 == server.stop()
    (server.data_dir / "secret").write_bytes(b"short")
    before = rows(server.data_dir)
    sentence = refusal("--data-dir", server.data_dir, "--model", model_directory)
    assert "secret is damaged: it has 5 bytes instead of 32" in sentence
    assert before == rows(server.data_dir)
