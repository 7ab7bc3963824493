"""A chat on a terminal and through a pipe, with a scripted service and with real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec
import pytest

from cairn.actors.errors import Broken, CannotRecord, QueueFull, Stopping
from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Said, Thought
from cairn.journal.rows.database.urls import journal_url
from cairn.ops.chat import server as chat_server
from cairn.ops.chat.client import StillStarting, Stream, look, read_url
from cairn.ops.chat.replies import Cairn, Chunk, Error, Health, Usage
from cairn.ops.chat.terminal import screen as chat_screen
from cairn.ops.chat.terminal.rendering import Plain
from cairn.ops.chat.transcript import (
    Answer,
    harmless,
    read_line,
    refusal,
    summary,
    waiting_words,
)
from cairn.ops.serve.data_dir import hold, make_home, server_at
from tests.http.fake_service import ACCEPTED, FINISHED, PREFILLING, Hold
from tests.ops.chat.conftest import HEALTH, faked, piped, script, stub
from tests.support.processes.subprocess_server import DEADLINE_S, eventually, started

BUG = "1baf1f86-0c3b-4a53-9c0f-2b7f5c6d7e8f"
SUMMARY = "new_session (cold_start) · 128 of 2048 tokens reused · first token after N ms"


# --- what is shown -------------------------------------------------------------------------------


def test_nothing_in_an_answer_steers_the_terminal():
    """Lines and tabs stay; characters that move the cursor or reverse the text are escaped."""
    assert "a\n\tb" == harmless("a\r\n\tb")
    assert "\\x1b[2J\\x9b1A\\x07\\x08\\x7f\\x00" == harmless("\x1b[2J\x9b1A\x07\x08\x7f\x00")
    assert "\\u202e\\u2066" == harmless("\u202e\u2066")
    assert "Grüße 🪨 山" == harmless("Grüße 🪨 山")


def test_thoughts_are_separate_from_the_answer():
    """Thoughts have their own field and are not part of the text."""
    answer = Answer()
    chunks = [
        {"choices": [{"delta": {"reasoning_content": "Hm", "reasoning": "Hm"}}]},
        {"choices": [{"delta": {"content": "Yes."}, "finish_reason": "stop"}]},
    ]
    taken = [answer.take(msgspec.convert(chunk, Chunk), after_s=0.5) for chunk in chunks]
    assert [[("Hm", True)], [("Yes.", False)]] == taken
    assert ("Yes.", "Hm", 0.5, "stop") == (
        *(answer.text, answer.thoughts),
        *(answer.first_s, answer.finish_reason),
    )


def test_the_separator_of_thoughts_and_text():
    """Tags if nothing else separates them; an answer ends its line."""
    written: list[str] = []
    plain = Plain(written.append)
    pieces = [("One ", True), ("two", True), ("Yes", False), (".", False)]
    for text, is_thought in pieces:
        plain.feed(text, is_thought=is_thought)
    plain.finish()
    plain.finish()
    assert "<think>\nOne two\n</think>\n\nYes.\n" == "".join(written)


@pytest.mark.parametrize(
    ("line", "read"),
    [
        (" Hello \n", ("", "Hello")),
        ("/new", ("new", "")),
        ("/edit  two  words ", ("edit", "two  words")),
        ("/edit\ttwo\n lines", ("edit", "two\n lines")),
        ("/ edit", ("help", "edit")),
        ("//path", ("", "/path")),
        ("/", ("help", "")),
        ("\n", ("", "")),
    ],
)
def test_a_line_is_a_message_or_a_command(line: str, read: tuple[str, str]):
    """One slash begins a command; two begin a message that starts with a slash."""
    assert read == read_line(line)


def test_the_line_below_an_answer():
    """It shows what is known: the path, reused tokens, the time, and whether it was cut off."""
    cairn = Cairn(path="continuation", reused_tokens=192)
    usage = Usage(prompt_tokens=245, completion_tokens=24)
    answer = Answer("x", cairn, usage, "stop", 0.0384)
    assert "continuation · 192 of 245 tokens reused · first token after 38 ms" == summary(answer)
    assert summary(attrs.evolve(answer, finish_reason="length")).endswith("cut off after 24 tokens")
    assert "continuation · 192 tokens reused" == summary(Answer("", cairn))
    early = Answer("", Cairn(path="continuation", reused_tokens=0), Usage(51, 9))
    assert "continuation · 0 of 51 tokens reused (nothing to reuse yet; see /why)" == summary(early)
    cold = Cairn(path="new_session", reused_tokens=0, reason="cold_start")
    assert "new_session (cold_start) · 0 tokens reused" == summary(Answer("", cold))


def test_a_keep_alive_in_words():
    """It says what the server is doing."""
    assert "waiting in the server's queue" == waiting_words("waiting")
    assert "reading the prompt: 512 of 2048 tokens" == waiting_words("prefill 512/2048")
    assert "reading the prompt" == waiting_words("prefill 512")
    assert "the model is writing" == waiting_words("writing")


def test_an_error_and_what_to_do():
    """A bug leads to its replay, an overload to a retry time, an unexpected error to the log."""
    bug = Error(f"internal cache invariant violation; bug id {BUG}", "kv_cache_inv_violation")
    assert (
        f"A cache invariant was violated in the server: bug id {BUG}. "
        f"`ops replay {BUG} --data-dir d` shows what happened."
    ) == refusal(bug, 500, None, " --data-dir d")
    full = Error("too many wait", "queue_full")
    assert (
        "The server did not answer (429 queue_full): too many wait. Try again in 7 s."
    ) == refusal(full, 429, "7", "")
    long = Error("prompt is too long: 9 tokens > 8 maximum", "context_length_exceeded")
    assert refusal(long, 400, None, "").endswith("8 maximum. /new starts a new conversation.")
    unforeseen = Error(f"internal error; error id {BUG} stands in the log", "internal_error")
    assert refusal(unforeseen, 500, None, "").endswith(f"log. `ops tail --grep {BUG}` shows it.")
    assert "\\x1b" in refusal(Error("\x1b[2J"), 500, None, "")


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/v1/", "http://[::1]:8000"),
        ("https://host/cairn/v1", "https://host/cairn"),
    ],
)
def test_an_address_as_typed(typed: str, url: str):
    """Without a scheme, or as other clients expect it."""
    assert url == read_url(typed)


@pytest.mark.parametrize(
    "typed", ["http://a..b", "http://host/\xfc", "http://host:x", "ftp://host"]
)
def test_an_invalid_address(typed: str):
    """An address that no connection can be made to is refused in a sentence."""
    with pytest.raises(click.BadParameter, match="is not a URL"):
        read_url(typed)


# --- through a pipe ------------------------------------------------------------------------------


def remarks(stderr: str) -> list[str]:
    """The text on stderr, without times."""
    return re.sub(r"after [0-9]+ ms", "after N ms", stderr).splitlines()


def test_a_conversation_through_a_pipe():
    """Only answers go to stdout; each turn sends the whole conversation."""
    with faked(script("Hi", " there"), script("Bye\n")) as server:
        result = piped("Hello\n\nGo\n", "--url", server.url, "--system", "Be short.")
    assert (0, "Hi there\nBye\n") == (result.exit_code, result.stdout)
    chatting = f"Chatting with cairn/small-1 at {server.url}."
    assert [chatting, SUMMARY, SUMMARY] == remarks(result.stderr)
    first = [("system", "Be short."), ("user", "Hello")]
    assert [first, [*first, ("assistant", "Hi there"), ("user", "Go")]] == server.asked()


def test_thoughts_go_back():
    """As the server recommends it, even for an answer that was cut off in its thoughts."""
    thought = Delta(parts=(Thought("Hm"),))
    words = Delta(parts=(Said("Yes"),))
    with faked((ACCEPTED, thought, words, FINISHED), (ACCEPTED, thought, FINISHED)) as server:
        piped("one\ntwo\nthree\n", "--url", server.url)
    last = server.conversations()[-1].messages
    assert [(None, "one"), ("Hm", "Yes"), (None, "two"), ("Hm", ""), (None, "three")] == [
        (message.reasoning, message.content) for message in last
    ]


def test_the_request():
    """
    Only named sampling options are sent; the server chooses the rest. The model is the one served.
    """
    options = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 7, "--max-tokens", 5, "--think")
    with faked() as server:
        piped("a\n", "--url", server.url, *options)
        piped("a\n", "--url", server.url)
    named, plain = server.service.commands
    assert (0.5, 0.9, 7, 5) == (
        *(named.sampling.temperature, named.sampling.top_p),
        *(named.seed, named.max_tokens),
    )
    assert (None, None) == (plain.seed, plain.max_tokens)
    assert server.service.facts.defaults == plain.sampling
    assert [True, False] == [
        conversation.template["enable_thinking"] for conversation in server.conversations()
    ]
    assert {"cairn/small-1"} == {named.requested_model, plain.requested_model}


def test_commands_of_the_chat():
    """They change the next requests, and nothing else."""
    lines = (
        "/system Be kind.\none\n/edit two\n/again\n/think\n/system\nthree\n/new\n//four\n"
        "/help\n/quit\nfive\n"
    )
    with faked(script("A"), script("B"), script("C"), script("D"), script("E")) as server:
        result = piped(lines, "--url", server.url)
    assert (0, "A\nB\nC\nD\nE\n") == (result.exit_code, result.stdout)
    kind = ("system", "Be kind.")
    assert [
        [kind, ("user", "one")],
        [kind, ("user", "two")],
        [kind, ("user", "two")],
        [("user", "two"), ("assistant", "C"), ("user", "three")],
        [("user", "/four")],
    ] == server.asked()
    assert [False, False, False, True, True] == [
        conversation.template["enable_thinking"] for conversation in server.conversations()
    ]
    assert "/edit [TEXT]" in result.stderr


def test_why():
    """The last answer's path in words; the server is asked for it with each request."""
    because = "None of the 9 prompt tokens was reused.\x1b[2J"
    accepted = attrs.evolve(ACCEPTED, explanation=because)
    with faked((accepted, Delta(parts=(Said("A"),)), FINISHED)) as server:
        result = piped("one\n/why\n", "--url", server.url)
    assert [True] == [command.explain for command in server.service.commands]
    assert (0, "A\n") == (result.exit_code, result.stdout)
    assert "None of the 9 prompt tokens was reused.\\x1b[2J" == result.stderr.splitlines()[-1]


@pytest.mark.parametrize("line", ["/dance", "/again", "/edit x", "/edit"])
def test_a_command_that_fails(line: str):
    """The reason is shown, and a pipe exits with 1: there is no prompt."""
    with faked() as server:
        result = piped(f"{line}\nHello\n", "--url", server.url)
    assert (1, "", []) == (result.exit_code, result.stdout, server.asked())
    assert 2 == len(result.stderr.splitlines())


def test_an_explanation_that_there_is_not():
    """The reason is shown, and the chat goes on, also through a pipe."""
    with faked(script("Hi")) as server:
        result = piped("/why\nHello\n", "--url", server.url)
    assert (0, "Hi\n") == (result.exit_code, result.stdout)
    assert "There is no answer yet to explain." in result.stderr


def test_an_answer_through_a_pipe_is_plain():
    """No colours; thoughts have their tags; control characters are shown."""
    thought = Delta(parts=(Thought("Hm"),))
    words = Delta(parts=(Said("\x1b[2JYes"),))
    with faked((ACCEPTED, thought, words, FINISHED)) as server:
        result = piped("Hello\n", "--url", server.url)
    assert "<think>\nHm\n</think>\n\n\\x1b[2JYes\n" == result.stdout
    assert "\x1b" not in result.stderr


def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch):
    """Proxy settings in the environment do not apply to this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with faked(script("Hi")) as server:
        assert "Hi\n" == piped("Hello\n", "--url", server.url).stdout


REFUSALS = [
    (QueueFull("too many requests wait", retry_after_s=7), "429 queue_full", "in 7 s"),
    (CannotRecord(retry_after_s=5), "503 journal_stalled", "in 5 s"),
    (Broken(BUG), BUG, f"`ops replay {BUG}`"),
]


@pytest.mark.parametrize(("error", "named", "hint"), REFUSALS, ids=["429", "503", "500"])
def test_a_refusal(error: Exception, named: str, hint: str):
    """A sentence says what to do, and the user is asked once; a pipe exits with 1."""
    with faked(refusal=error) as server:
        result = piped("Hello\nBye\n", "--url", server.url)
    assert (1, "") == (result.exit_code, result.stdout)
    _, said, kept = result.stderr.splitlines()
    assert named in said
    assert hint in said
    assert "The conversation is unchanged." == kept
    assert 1 == len(server.service.commands)


def test_only_the_end_of_a_lost_server_is_awaited(monkeypatch: pytest.MonkeyPatch):
    """A server that refused still runs, so waiting for its end would be useless."""
    asked: list[str] = []

    def end_words(server: chat_server.Server) -> str:
        asked.append(server.url)
        return "It has gone."

    monkeypatch.setattr(chat_server.Server, "end_words", end_words)
    with faked(refusal=CannotRecord(retry_after_s=5)) as server:
        assert "503 journal_stalled" in piped("Hello\n", "--url", server.url).stderr
    assert [] == asked

    def half(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(HEALTH if handler.path == "/health" else b": waiting\n\n")

    with stub(half) as url:
        assert "It has gone." in piped("Hello\n", "--url", url).stderr
    assert [url] == asked


def test_the_time_is_the_servers(monkeypatch: pytest.MonkeyPatch):
    """Time is measured from the request, not from earlier terminal output."""
    now_s = [0.0]

    class Slow(chat_screen.Waiting):
        def __enter__(self) -> Slow:
            now_s[0] += 100.0
            return self

    monkeypatch.setattr(chat_screen, "Waiting", Slow)
    monkeypatch.setattr("cairn.ops.chat.terminal.screen.time.monotonic", lambda: now_s[0])
    with faked(script("Hi")) as server:
        assert "first token after 0 ms" in piped("Hello\n", "--url", server.url).stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Broken(BUG), f"`ops replay {BUG}`"),
        (Stopping("the server stops", retry_after_s=1), "(server_stopping): the server stops."),
        (RuntimeError("a surprise"), "`ops tail --grep "),
    ],
    ids=["broken", "stopping", "unforeseen"],
)
def test_an_error_within_an_answer(error: Exception, said: str):
    """The partial answer is shown, ends its line, and is not kept."""
    with faked((ACCEPTED, Delta(parts=(Said("Half"),)), error)) as server:
        result = piped("Hello\n", "--url", server.url)
    assert (1, "Half\n") == (result.exit_code, result.stdout)
    assert said in result.stderr


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b'data: {"choices": [{"delta": {"content": "Ha"}}]}\n\n', "is incomplete"),
        (b"data: <html>\n\n", "sent an invalid answer"),
        (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', "sent an invalid answer"),
    ],
)
def test_an_invalid_stream(sent: bytes, said: str):
    """A truncated answer is refused, and so is any other response."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(HEALTH if handler.path == "/health" else sent)

    with stub(answer) as url:
        result = piped("Hello\n", "--url", url)
    assert 1 == result.exit_code
    assert said in result.stderr
    assert "The conversation is unchanged." in result.stderr


def test_an_address_without_a_server():
    """The sentence names the address, and what to do."""
    with faked() as server:
        pass
    result = piped("Hello\n", "--url", server.url)
    assert (2, "") == (result.exit_code, result.stdout)
    assert result.stderr.startswith(f"Nothing answers at {server.url}. Start a server there ")


START = {"status": "starting", "step": "reading the journal", "done": 1, "total": 4}


def test_an_address_where_a_server_starts(monkeypatch: pytest.MonkeyPatch):
    """The chat waits for it, and says once what it does."""
    looks = iter(range(3))

    def starts(url: str, key: str | None = None) -> Health | None:
        if next(looks, None) is not None:
            raise StillStarting(url, "reading the journal, 25 %")
        return look(url, key)

    monkeypatch.setattr(chat_server, "look", starts)
    with faked(script("Hi")) as server:
        result = piped("Hello\n", "--url", server.url)
    assert (0, "Hi\n") == (result.exit_code, result.stdout)
    said = f"The server at {server.url} is starting: reading the journal, 25 %. The chat begins"
    assert 1 == result.stderr.count(said)


def test_what_a_server_that_starts_answers():
    """The step, and how much of it is done."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(503)
        handler.end_headers()
        handler.wfile.write(json.dumps(START).encode())

    with stub(answer) as url, pytest.raises(StillStarting) as found:
        look(url)
    assert "reading the journal, 25 %" == found.value.step


def test_ctrl_c_while_another_server_starts(terminal):
    """It ends the chat with a sentence, and not the server."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(503)
        handler.end_headers()
        handler.wfile.write(json.dumps(START).encode())

    with stub(answer) as url:
        chat = terminal("--url", url)
        chat.until("The chat begins when it is ready")
        chat.type("\x03")
        chat.until("Stopped before the chat began.")
        assert 130 == chat.wait()


def nothing_here(handler: BaseHTTPRequestHandler) -> None:
    """The response of an unrelated server."""
    handler.send_error(404)


def test_an_address_where_another_server_answers():
    """It is not mistaken for Cairn's."""
    with stub(nothing_here) as url:
        result = piped("Hello\n", "--url", url)
    assert 2 == result.exit_code
    assert f"The server at {url} is not Cairn: GET /health returns 404." in result.stderr


def test_a_server_that_does_not_send_utf8():
    """Neither is that."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b'{"error": {"message": "\xff"}, "model": "\xff"}')

    with stub(answer) as url:
        result = piped("Hello\n", "--url", url)
    assert 2 == result.exit_code
    assert f"The server at {url} is not Cairn: GET /health returns 200." in result.stderr


@pytest.mark.parametrize("more", [("--model", "x"), ("--data-dir", "x")])
def test_a_server_that_is_named_is_not_started(more: tuple[str, str]):
    """An option without effect is refused."""
    result = piped("", "--url", "127.0.0.1:1", *more)
    assert 2 == result.exit_code
    assert "Omit --data-dir and --model" in result.stderr


# --- which server --------------------------------------------------------------------------------


def test_the_server_at_the_default_address(data_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """The chat uses it, and starts none."""
    with faked(script("Hi")) as server:
        monkeypatch.setattr(chat_server, "DEFAULT_URL", server.url)
        assert "Hi\n" == piped("Hello\n").stdout
    assert [] == list(data_dir.iterdir())


def test_a_server_that_holds_the_data_directory_is_talked_to(data_dir: Path):
    """At any address: its lock has it."""
    with faked(script("Hi")) as server, hold(data_dir, journal_url(data_dir)) as held:
        held.record_address(server.url)
        result = piped("Hello\n")
        refused = piped("Hello\n", "--model", "m")
    assert (0, "Hi\n") == (result.exit_code, result.stdout)
    assert f" at {server.url}." in result.stderr
    assert 2 == refused.exit_code
    said = f"A server at {server.url} (process {os.getpid()}) uses {data_dir}, with the model "
    assert refused.stderr.startswith(said)


def test_a_bug_of_a_server_in_another_directory(data_dir: Path, tmp_path: Path):
    """The command in the message has the directory."""
    other = tmp_path / "an other"
    make_home(other)
    broken = Broken(BUG)
    with faked(refusal=broken) as server, hold(other, journal_url(other)) as held:
        held.record_address(server.url)
        said = piped("Hello\n", "--data-dir", other).stderr
    assert f"`ops replay {BUG} --data-dir '{other}'`" in said


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:1"])
def test_a_server_that_cannot_be_found(
    data_dir: Path, address: str | None, monkeypatch: pytest.MonkeyPatch
):
    """
    A server that uses the data directory and does not answer is named, with what to do.
    """
    with stub(nothing_here) as url, hold(data_dir, journal_url(data_dir)) as held:
        monkeypatch.setattr(chat_server, "ADDRESS_S", 0.2)
        # A server other than Cairn's is ignored at the default address.
        monkeypatch.setattr(chat_server, "DEFAULT_URL", url)
        if address:
            held.record_address(address)
        result = piped("Hello\n")
    assert (2, "") == (result.exit_code, result.stdout)
    assert f"(process {os.getpid()}) uses {data_dir}" in result.stderr
    assert ("but does not answer" if address else "Give its address with --url") in result.stderr


def test_a_server_of_the_chats_own(data_dir: Path, model_directory: Path):
    """It serves the named model, and has stopped cleanly when the chat has ended."""
    result = piped("Hello\nGo on\n", "--model", model_directory, "--max-tokens", 4, "--seed", 1)
    assert 0 == result.exit_code, result.stderr
    begun, *turns = result.stderr.splitlines()
    assert begun.startswith(f"Started a server for this chat: {model_directory.name} at http://")
    assert ["new_session (cold_start)", "continuation"] == [turn.split(" · ")[0] for turn in turns]
    assert server_at(data_dir) is None
    assert (data_dir / "logs" / "chat.log").read_text().endswith("Stopped.\n")


@pytest.mark.long
def test_a_server_of_the_chats_own_needs_no_key(
    data_dir: Path, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The configured keys are for a server that others use."""
    (tmp_path / "keys").write_text(f"ann={'k' * 32}\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "c.toml").write_text('api_key_file = "keys"\n')
    monkeypatch.setenv("CAIRN_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("CAIRN_API_KEYS", "k" * 32)
    result = piped("Hello\n", "--model", model_directory, "--max-tokens", 4)
    assert 0 == result.exit_code, result.stderr


def test_a_server_of_the_chats_own_that_does_not_start(data_dir: Path):
    """The server's own sentence is shown, and where its whole output is."""
    result = piped("Hello\n", "--model", data_dir / "none")
    assert 2 == result.exit_code
    said, where = result.stderr.splitlines()
    assert said.startswith("The server of this chat did not start (exit code 2). ")
    assert str(data_dir / "none") in said
    assert str(data_dir / "logs" / "chat.log") in where


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGQUIT, 131)]
)
def test_a_signal_while_a_server_is_made(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
):
    """The signal waits until the chat knows the process, and then ends both."""
    made: list[subprocess.Popen[str]] = []

    class Interrupted(subprocess.Popen[str]):
        def __init__(self, command: object, **options: Any) -> None:
            asleep = (sys.executable, "-c", "import signal; signal.pause()")
            super().__init__(asleep, **options)
            made.append(self)
            signal.raise_signal(number)

    monkeypatch.setattr("cairn.ops.chat.server.subprocess.Popen", Interrupted)
    try:
        assert code == piped("Hello\n").exit_code
        assert [-signal.SIGTERM] == [process.returncode for process in made]
    finally:
        for process in made:
            process.kill()
            process.wait(DEADLINE_S)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(
    ("line", "said"),
    [("/hlep", "/hlep. Did you mean /help?"), ("/zzzzz", "/zzzzz; /help lists the commands.")],
)
def test_a_command_that_there_is_not(line: str, said: str):
    """The nearest one is named, or the one that lists them."""
    with faked(script("Hi")) as server:
        done = piped(f"{line}\n", "--url", server.url)
    assert (1, True) == (done.exit_code, f"There is no command {said}\n" in done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch, number: signal.Signals):
    """An ignored signal stays ignored, as `nohup` requires; any other ends the chat."""

    def raised(stream: Stream) -> Iterator[Chunk | str]:
        signal.raise_signal(number)
        yield from answers(stream)

    answers = Stream.__iter__
    monkeypatch.setattr(Stream, "__iter__", raised)
    with faked(script("Hi")) as server:
        before = signal.signal(number, signal.SIG_IGN)
        try:
            ignored = piped("Hello\n", "--url", server.url)
            # Stands in for an end of this process.
            signal.signal(number, lambda *_: None)
            heard = piped("Hello\n", "--url", server.url)
        finally:
            signal.signal(number, before)
    assert (0, "Hi\n") == (ignored.exit_code, ignored.stdout)
    assert (128 + number, "") == (heard.exit_code, heard.stdout)


def test_nothing_heavy_is_loaded():
    """A chat works without MLX and without the web framework."""
    code = (
        "import sys\n"
        "from cairn.ops.cli import ops\n"
        "try:\n"
        "    ops(['chat', '--url', sys.argv[1]])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0, ended.code\n"
        "heavy = {'mlx', 'mlx_lm', 'quart', 'quart_trio', 'hypercorn', 'alembic'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    with faked(script("Hi")) as server:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, server.url],
            input="Hello\n",
            capture_output=True,
            text=True,
            check=True,
        )
    assert "Hi\n[]\n" == done.stdout


# --- on a terminal -------------------------------------------------------------------------------

SGR = re.compile(r"\x1b\[([0-9;]*)m")


def held_by(data_dir: Path) -> int:
    """The process of the server that uses a data directory."""
    found = server_at(data_dir)
    assert found is not None
    return int(found.process)


def test_a_conversation_on_a_terminal(terminal):
    """The answer, a dim line below it, the next prompt; Ctrl-D ends it with 0."""
    with faked(script("Hi", " there")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        line = "new_session (cold_start) · █░░░░░░░░░░░░░░░░░░░ 128 of 2048 tokens reused · first"
        assert f" Hello\nHi there\n{line}" in chat.until(" ms")
        assert "\x1b[2mnew_session (cold_start)" in chat.shown
        assert 0 == chat.end()


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_thoughts_are_dim(terminal, env: Mapping[str, str]):
    """Without colours, thoughts have their tags, and nothing is coloured."""
    thought = Delta(parts=(Thought("Hm"),))
    words = Delta(parts=(Said("Yes\x1b[31m"),))
    with faked((ACCEPTED, thought, words, FINISHED)) as server:
        chat = terminal("--url", server.url, **env)
        chat.say("Hello")
        chat.until("ms")
        assert 0 == chat.end()
    if env:
        assert "\n<think>\nHm\n</think>\n\nYes\\x1b[31m\nnew_session" in chat.text()
        assert {"0"} >= set(SGR.findall(chat.shown))
    else:
        assert "\nHm\n\nYes\\x1b[31m\nnew_session" in chat.text()
        assert "\x1b[2mHm\x1b[0m" in chat.shown


def test_progress_until_the_first_word(terminal):
    """The keep-alives' progress is shown until the first word, and then removed."""
    wait = Hold()
    with faked((ACCEPTED, PREFILLING, wait, *script("Hi")[1:])) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("reading the prompt: 512 of 2048 tokens")
        server.release(wait)
        chat.until("ms")
        assert 0 == chat.end()
    assert "reading the prompt" not in chat.text()
    assert "> Hello\nHi\nnew_session" in chat.text()


def test_ctrl_c_stops_an_answer(terminal):
    """The text so far stays in the conversation, and the server cancels the request."""
    half = (ACCEPTED, Delta(parts=(Said("Half an"),)), Hold())
    with faked(half, script("Whole")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("Half an")
        chat.type("\x03")
        assert "stopped · new_session (cold_start) · 128 tokens reused" in chat.until("first")
        eventually(lambda: 1 == server.service.left)
        chat.say("And?")
        chat.until("Whole")
        assert 0 == chat.end()
    said = [("user", "Hello"), ("assistant", "Half an"), ("user", "And?")]
    assert said == server.asked()[1]


def test_ctrl_c_before_the_first_word(terminal):
    """There was no answer, so the conversation is unchanged."""
    with faked((ACCEPTED, PREFILLING, Hold()), script("Whole")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("reading the prompt: 512")
        chat.type("\x03")
        chat.until("Stopped before the first word")
        chat.say("Once more")
        chat.until("Whole")
        assert 0 == chat.end()
    assert [("user", "Once more")] == server.asked()[1]


LEAVES = "Press Ctrl-C again, or Ctrl-D, to leave."


@pytest.mark.parametrize("typed", ["", "half a mess"])
def test_ctrl_c_at_the_prompt(terminal, typed: str):
    """
    The first clears the line and shows how to leave, and the chat continues; the second leaves.
    """
    with faked(script("Hi"), script("Whole")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("ms")
        chat.asks()
        chat.type(typed)
        chat.until(typed)
        chat.waits_for_keys()
        chat.type("\x03")
        chat.until(LEAVES)
        chat.say("Still there?")
        chat.until("Whole")
        chat.asks()
        chat.type("\x03")  # input in between makes it a first one again
        chat.until(LEAVES)
        chat.asks()
        chat.type("half")
        chat.until("half")
        chat.waits_for_keys()
        chat.type("\x03")
        chat.until(LEAVES)
        chat.asks()
        chat.type("\x03")
        assert 0 == chat.wait()
    said = [("user", "Hello"), ("assistant", "Hi"), ("user", "Still there?")]
    assert [said[:1], said] == server.asked()


def test_a_turn_that_failed_can_be_tried_again(terminal):
    """The message is taken back, and the chat continues."""
    with faked(script("Hi"), script("unsaid")) as server:
        chat = terminal("--url", server.url)
        chat.say("Hello")
        chat.until("Hi")
        server.service.refusal = CannotRecord(retry_after_s=5)
        chat.say("lost")
        chat.until("The conversation is unchanged.")
        server.service.refusal = None
        chat.say("found")
        chat.until("unsaid")
        assert 0 == chat.end()
    assert [("user", "Hello"), ("assistant", "Hi"), ("user", "found")] == server.asked()[-1]


def test_lines_can_be_edited_and_come_again(terminal):
    """With the arrow keys, if readline is available."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.say("Helo")
        chat.until("ms")
        chat.say("\x1b[A\x1b[Dl")
        chat.until("ms")
        assert 0 == chat.end()
    assert [("user", "Helo"), ("user", "Hello")] == [server.asked()[0][0], server.asked()[1][-1]]


def test_pasted_lines_are_one_message(terminal):
    """With any number of lines: the terminal marks where pasted text begins and ends."""
    with faked(script("Hi")) as server:
        chat = terminal("--url", server.url)
        chat.until_raw("\x1b[?2004h")
        chat.say("\x1b[200~one\ntwo\x1b[201~")
        chat.until("ms")
        assert 0 == chat.end()
    assert [[("user", "one\ntwo")]] == server.asked()


@pytest.mark.long
def test_the_chats_own_server_dies(terminal, data_dir: Path, model_directory: Path):
    """It is reported, and the next message starts a new one."""
    chat = terminal("--data-dir", data_dir, "--model", model_directory, "--max-tokens", 4)
    chat.until("It stops when the chat ends.")
    first = held_by(data_dir)
    os.kill(first, signal.SIGSTOP)  # so that the answer takes a while
    chat.say("Hello")
    chat.until("waiting for the answer")
    os.kill(first, signal.SIGKILL)
    chat.until("The server of this chat has ended (killed by SIGKILL). The next message")
    chat.until("The conversation is unchanged.")
    chat.say("Hello")
    chat.until("Started a server for this chat")
    assert first != held_by(data_dir)
    chat.until(" ms")
    assert 0 == chat.end()
    assert server_at(data_dir) is None


@pytest.mark.long
def test_ctrl_c_while_the_server_starts(terminal, data_dir: Path, model_directory: Path):
    """Before the first prompt it ends the chat, and after that it ends the start; both are said."""
    stopped = "Stopped before the server of this chat was ready."
    chat = terminal("--data-dir", data_dir, "--model", model_directory)
    chat.until("starting a server")
    chat.type("\x03")
    chat.until(stopped)
    assert 130 == chat.wait()
    assert server_at(data_dir) is None

    chat = terminal("--data-dir", data_dir, "--model", model_directory, "--max-tokens", 4)
    chat.until("It stops when the chat ends.")
    os.kill(held_by(data_dir), signal.SIGKILL)
    chat.say("Hello")
    chat.until("The server of this chat has ended (killed by SIGKILL). It is started again.")
    chat.until("starting a server")
    chat.type("\x03")
    chat.until(stopped)
    chat.say("Hello")
    chat.until("Started a server for this chat")
    chat.until(" ms")
    assert 0 == chat.end()
    assert server_at(data_dir) is None


@pytest.mark.long
def test_ctrl_c_does_not_reach_the_server(terminal, data_dir: Path, model_directory: Path):
    """The chat's own server keeps running after an answer was stopped."""
    chat = terminal("--data-dir", data_dir, "--model", model_directory, "--max-tokens", 4)
    chat.until("It stops when the chat ends.")
    server = held_by(data_dir)
    os.kill(server, signal.SIGSTOP)
    chat.say("Hello")
    chat.until("waiting for the answer")
    chat.type("\x03")
    chat.until("Stopped before the first word")
    os.kill(server, signal.SIGCONT)
    chat.say("Hello")
    chat.until(" ms")
    assert server == held_by(data_dir)
    assert 0 == chat.end()
    assert server_at(data_dir) is None


@pytest.mark.long_but("1")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_chat_that_is_ended_ends_its_server(
    terminal, data_dir: Path, model_directory: Path, number: signal.Signals
):
    """A signal to the chat also reaches its own server."""
    chat = terminal("--data-dir", data_dir, "--model", model_directory)
    chat.asks()
    assert server_at(data_dir) is not None
    chat.process.send_signal(number)
    assert 128 + number == chat.wait()
    assert server_at(data_dir) is None


@pytest.mark.long
def test_a_terminal_that_is_closed(terminal, data_dir: Path, model_directory: Path):
    """The chat's own server ends with it, even if no output is possible any more."""
    chat = terminal("--data-dir", data_dir, "--model", model_directory)
    chat.asks()
    chat.hang_up()
    assert 0 != chat.process.wait(DEADLINE_S)
    eventually(lambda: server_at(data_dir) is None)


@pytest.mark.long
def test_a_server_records_its_address(tmp_path: Path):
    """In the lock of its data directory, for chats that look for it."""
    with started(tmp_path / "served") as server:
        found = server_at(tmp_path / "served")
        assert found is not None
        assert (str(server.pid), server.url) == (found.process, found.address)
    assert server_at(tmp_path / "served") is None
