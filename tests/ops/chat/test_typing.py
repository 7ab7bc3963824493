"""What is typed in a chat on a terminal: lines, history, completion, and keys at any time."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import attrs
import pytest

from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Said
from cairn.ops.chat.terminal.keyboard import HISTORY
from tests.http.fake_service import ACCEPTED, FACTS, FINISHED, Hold
from tests.ops.chat.conftest import Faked, faked, script
from tests.support.processes.subprocess_server import eventually

PASTE, PASTED = "\x1b[200~", "\x1b[201~"
ALT_ENTER, UP, TAB = "\x1b\r", "\x1b[A", "\t"
HELD = (ACCEPTED, Delta(parts=(Said("One "),)))
REST = (Delta(parts=(Said("two."),)), FINISHED)


def last_messages(server: Faked) -> list[str]:
    """The last message of each request."""
    return [asked[-1][1] for asked in server.asked()]


def test_messages_of_several_lines(terminal):
    """By Alt-Enter, and between three quotes, where Enter begins a new line."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.say(f"one{ALT_ENTER}two")
        chat.until(" ms")
        chat.say('"""three')
        chat.until("\n...")
        chat.type('\rfour"""\r')
        chat.until(" ms")
        assert 0 == chat.end()
    assert ["one\ntwo", "three\n\nfour"] == last_messages(server)


def test_the_history_of_earlier_chats(terminal):
    """Is at hand in the next one, and only its owner can read it."""
    with faked(script("Hi")) as server:
        first = terminal("--url", server.url)
        first.say(f"one{ALT_ENTER}two")
        first.until(" ms")
        assert 0 == first.end()
        second = terminal("--url", server.url)
        second.say(UP)
        second.until(" ms")
        assert 0 == second.end()
    assert ["one\ntwo", "one\ntwo"] == last_messages(server)
    path = Path(os.environ["CAIRN_DATA_DIR"]) / HISTORY
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)


def test_a_chat_that_is_not_stored_leaves_no_history(terminal):
    """What was typed is at hand in this chat alone."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url, "--no-store")
        chat.say("one")
        chat.until(" ms")
        chat.say(UP)
        chat.until(" ms")
        assert 0 == chat.end()
    assert ["one", "one"] == last_messages(server)
    assert not (Path(os.environ["CAIRN_DATA_DIR"]) / HISTORY).exists()


def test_a_history_that_cannot_be_stored(terminal):
    """Is reported, and the chat goes on."""
    folder = Path(os.environ["CAIRN_DATA_DIR"])
    (folder / HISTORY).mkdir(parents=True)
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.until("What you type is not stored for the next chat")
        chat.say("one")
        chat.until(" ms")
        assert 0 == chat.end()


def test_tab_completes(terminal):
    """Commands, and what may follow them: here a model."""
    with faked(script("Hi")) as server:
        server.service.others["qwen"] = attrs.evolve(FACTS, model="qwen")
        chat = terminal("--url", server.url)
        chat.asks()
        chat.type(f"/mo{TAB}")
        chat.until("/model")
        chat.type(f" q{TAB}")
        chat.until("qwen")
        chat.type("\r")
        chat.until("qwen answers from the next message on")
        assert 0 == chat.end()


@pytest.mark.long
def test_ways_to_leave(terminal):
    """Commands of other chats, and the bare words, which are no messages."""
    with faked() as server:
        for words in ("/bye", "/exit", "exit", "quit"):
            chat = terminal("--url", server.url)
            chat.say(words)
            assert 0 == chat.wait()
    assert [] == server.asked()


def test_the_greeting_and_its_numbers(terminal):
    """A number before the first message sends an opening; later it is a message."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.until("Cairn ")
        chat.until("cairn/small-1 at ")
        chat.until("2 Explain in three sentences what a KV cache is.")
        chat.until("/tour")
        chat.say("2")
        chat.until("> Explain in three sentences what a KV cache is.\nHi\n")
        chat.say("2")
        chat.until(" ms")
        assert 0 == chat.end()
    assert ["Explain in three sentences what a KV cache is.", "2"] == last_messages(server)


def test_the_last_message_is_edited_in_place(terminal):
    """With /edit alone: it is there to be changed. Ctrl-C leaves it as it is."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.say("Where do I liv")
        chat.until(" ms")
        chat.say("/edit")
        chat.until("edit> Where do I liv")
        chat.type("e?\r")
        chat.until(" ms")
        chat.say("/edit")
        chat.until("edit> Where do I live?")
        chat.waits_for_keys()
        chat.type("\x03")
        chat.until("Nothing was edited.")
        assert 0 == chat.end()
    assert ["Where do I liv", "Where do I live?"] == last_messages(server)


def test_a_chat_is_chosen_from_a_list(terminal):
    """By its number; its last turn is shown."""
    with faked(script("A"), script("B")) as server:
        first = terminal("--url", server.url)
        first.say("one")
        first.until(" ms")
        assert 0 == first.end()
        chat = terminal("--url", server.url, "--resume")
        chat.until("1 turn  one")
        chat.until("Which one?")
        chat.type("1\r")
        chat.until("The last:\n> one\nA")
        chat.say("two")
        chat.until(" ms")
        assert 0 == chat.end()
    assert [("user", "one"), ("assistant", "A"), ("user", "two")] == server.asked()[1]


def test_keys_during_an_answer_wait_for_the_prompt(terminal):
    """They are not shown within the answer. A paste is still one message."""
    hold = Hold()
    with faked((*HELD, hold, *REST), script("Three.")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("One")
        chat.type(f"half a {PASTE}mess\rage{PASTED}\r")
        eventually(lambda: 1 == len(server.asked()))
        server.release(hold)
        chat.until(" two.\nnew_session")
        chat.until("> half a mess\n... age\n")
        chat.until("Three.")
        assert 0 == chat.end()
    assert "> Hello\nOne two.\nnew_session" in chat.text()
    assert ["Hello", "half a mess\nage"] == last_messages(server)


def test_markdown_is_rendered_unless_raw(terminal):
    """As it arrives; --raw shows what the model wrote."""
    text = "# Title\n\n- **one**\n- two\n"
    with faked(script(text[:12], text[12:])) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("\nTitle\n\n • one\n • two\nnew_session")
        assert 0 == chat.end()
        raw = terminal("--url", server.url, "--raw")
        raw.say("Hello")
        raw.until(f"\n{text}new_session")
        assert 0 == raw.end()


def test_one_question_on_a_terminal(terminal):
    """The answer and the line below it, without a greeting or a prompt."""
    with faked(script("**Hi**")) as server:
        chat = terminal("--url", server.url, "Hello")
        assert 0 == chat.wait()
    assert chat.text().startswith("Hi\nnew_session (cold_start)")
    assert "> " not in chat.text()


def test_ctrl_c_stops_the_answer_to_one_question(terminal):
    """And ends with 130, as a command does."""
    with faked((*HELD, Hold())) as server:
        chat = terminal("--url", server.url, "Hello")
        chat.until("One")
        chat.type("\x03")
        assert 130 == chat.wait()


@pytest.mark.long
def test_typing_while_the_server_starts(terminal, data_dir: Path, model_directory: Path):
    """Spoils nothing: it is the first message."""
    chat = terminal("--data-dir", data_dir, "--model", model_directory, "--max-tokens", 4)
    chat.until("starting a server")
    chat.type("Hello\r")
    chat.until("It stops when the chat ends.\n")
    chat.until("> Hello\n")
    chat.until(" ms")
    assert 0 == chat.end()
    assert 1 == chat.text().count("Hello")
