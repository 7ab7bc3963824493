"""The tour of a chat, with a real server and Pebble."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from cairn.ops.chat import tour as chat_tour
from tests.ops.chat.conftest import faked, piped

ROW = re.compile(
    r"Caught: row \d+ of the journal is block_file_rejected, because the file's digest"
)


def bars(stderr: str) -> list[str]:
    """The bar and the tokens of each answer."""
    return re.findall(r"[█░#.]{20} \d+ of \d+ tokens reused", stderr)


def reused(stderr: str) -> list[int]:
    """How many tokens each answer reused."""
    return [int(bar.split()[1]) for bar in bars(stderr)]


def left_in(folder: Path) -> list[str]:
    """What a tour left of its own."""
    return [one.name for one in folder.iterdir() if one.name.startswith("cairn-tour-")]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which tours have theirs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    return tmp_path


def test_the_tour(temporary: Path):
    """
    A fact, a question, an edit, a restart and a flipped bit, each with its bar. The damage costs
    reuse, and changes no answer. Nothing is left, and the chat's own server was not asked.
    """
    with faked() as server:
        result = piped("/tour\n", "--url", server.url)
    assert 0 == result.exit_code, result.stderr
    assert [
        *("Noted.", "Your name is Jordis.", "You live in Zanport."),
        *("Your name is Jordis.", "Your name is Jordis."),
    ] == result.stdout.splitlines()
    fact, question, edit, restart, flipped = reused(result.stderr)
    assert 0 == fact
    assert min(question, edit, restart) > flipped > 0
    assert ROW.search(result.stderr)
    assert "The answer is the same" in result.stderr
    assert "`ops verify` checked it: broken: 0" in result.stderr
    assert [] == left_in(temporary)
    assert [] == server.asked()


@pytest.mark.long
def test_a_bit_that_is_not_flipped(temporary: Path, monkeypatch: pytest.MonkeyPatch):
    """The tour says that nothing was caught: what it shows is not staged."""
    monkeypatch.setattr(chat_tour, "bit_flipped", lambda _: None)
    with faked() as server:
        result = piped("/tour\n", "--url", server.url)
    assert 1 == result.exit_code
    assert "The flipped bit was not caught" in result.stderr
    assert [] == left_in(temporary)


@pytest.mark.long
def test_a_tour_that_is_left(terminal, tmp_path: Path):
    """By Ctrl-C: its server and its directory go, and the chat goes on."""
    with faked() as server:
        chat = terminal("--url", server.url, TMPDIR=str(tmp_path))
        chat.say("/tour")
        chat.until("Press Enter to go on")
        assert 1 == len(left_in(tmp_path))
        chat.waits_for_keys()
        chat.type("\x03")
        chat.until("The tour has ended. Your chat is as it was.")
        assert [] == left_in(tmp_path)
        assert 0 == chat.end()
    assert os.environ.get("CAIRN_DATA_DIR")
