"""Several users of one server: keys, tenants, and what a caller without a key sees."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from cairn.journal import events as ev
from cairn.ops.serve.api_keys import KEYS_VARIABLE
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import Answer, Serving, ask, run_ops, user

ALICE, BOB = "alice-has-this-key-0123", "bob-has-another-key-4567"
OPERATOR = "the-operator-has-this-one-01"
NEXT = "alice-has-the-next-one-89"
STORY = "The stone lies on the path, and the path goes over the hill to the lake. " * 12


def asked(server: Serving, key: str, **more: object) -> Answer:
    """The answer to the story, from the official client with a key."""
    server.use_key(key)
    return ask(server, user(STORY), max_tokens=4, **more)


def test_two_tenants_and_a_restart(start: Start, tmp_path: Path):
    """
    Each key has its own cache and sessions; a tenant finds its own again after a restart and under
    another key, with its blocks from disk. No key is in any file or output of the server.
    """
    home = tmp_path / "home"
    keys = f"alice={ALICE} bob={BOB} local={OPERATOR}"
    server = start(data_dir=home, env={KEYS_VARIABLE: keys})
    assert "for alice, bob, local" in server.greeting()
    first = asked(server, ALICE, session_id="notes")
    assert (0, "new_session", "cold_start") == (first.cached_tokens, first.path, first.reason)
    theirs = asked(server, BOB, session_id="notes")
    assert (0, "new_session", "cold_start") == (theirs.cached_tokens, theirs.path, theirs.reason)
    assert first.bits == theirs.bits
    assert "notes" == first.session == theirs.session
    shared = asked(server, ALICE)
    assert shared.cached_tokens > 0
    server.use_key(OPERATOR)
    server.settled()
    with pytest.raises(openai.AuthenticationError):
        asked(server, "nobody-has-this-key-at-all")
    # Each sees what it emitted itself.
    for key, emitted in ((ALICE, 8), (BOB, 4), (OPERATOR, 12)):
        server.use_key(key)
        assert f"cairn_tokens_emitted_total {emitted}.0" in server.metrics().splitlines()
        assert (key == OPERATOR) == ("queue" in server.health())
    server.wait_idle()
    assert 0 == server.stop()
    assert {"alice", "bob"} == {one.tenant for one in server.events(ev.SessionOpened)}

    file = tmp_path / "keys"
    file.write_text(f"# changed\nbob={BOB}\nalice={NEXT}\nlocal={OPERATOR}\n", encoding="utf-8")
    file.chmod(0o600)
    again = start("--api-key-file", file, data_dir=home)
    with pytest.raises(openai.AuthenticationError):
        asked(again, ALICE)
    mine = asked(again, NEXT, session_id="notes")
    assert mine.cached_tokens > 0
    assert again.events(ev.BlockLoaded)
    assert mine.bits == first.bits
    again.use_key(OPERATOR)
    assert "bob" in again.events(ev.ServerStarted)[-1].settings["tenants"]

    code, out, _ = run_ops("sessions", "--data-dir", home)
    assert 0 == code
    assert "@alice/notes" in out
    assert "@bob/notes" in out
    output = server.stderr() + again.stderr()
    for path in home.rglob("*"):
        if path.is_file():
            held = path.read_bytes()
            assert not any(key.encode() in held for key in (ALICE, BOB, NEXT)), path
    assert not any(key in output for key in (ALICE, BOB, NEXT))


def test_callers_without_a_key_learn_nothing(start: Start):
    """Without a key, a caller sees whether the server is well; any other address is refused."""
    server = start(env={KEYS_VARIABLE: f"alice={ALICE}"})
    for path in ("/", "/metrics", "/v1/models", "/nothing"):
        assert 401 == httpx.get(server.url + path).status_code
    assert {"status": "ok", "api_key": "required"} == httpx.get(f"{server.url}/health").json()
    server.use_key(ALICE)
    assert "model" in server.health()


def test_without_keys_only_this_machine_is_served(tmp_path: Path):
    """
    Another address is refused with what to do, before a model is loaded and anything is journaled.
    So are invalid keys, an empty environment variable, and `--cors` without keys.
    """
    home = tmp_path / "home"

    def refusal(*arguments: object, env: dict[str, str] | None = None) -> str:
        code, out, err = run_ops("serve", "--port", 0, "--data-dir", home, *arguments, env=env)
        assert (2, "") == (code, out)
        assert "Traceback" not in err
        return err.strip().splitlines()[-1]

    for host in ("0.0.0.0", "::"):
        sentence = refusal("--host", host)
        assert f"Other machines can reach {host}" in sentence or "cannot be used" in sentence
        assert "--api-key-file" in sentence or host == "::"
    assert "has no API key" in refusal(env={KEYS_VARIABLE: ""})
    assert "--api-key number 1" in refusal("--api-key", "alice=short")
    assert "Without API keys" in refusal("--cors", "*")
    assert "is not an origin" in refusal("--cors", "chat.example")
    assert not (home / "journal.db").exists()


@pytest.mark.long
def test_the_chat_has_its_key(start: Start):
    """`ops chat` reads its key from the environment; without one it says what to do."""
    server = start(env={KEYS_VARIABLE: f"alice={ALICE}"})
    server.use_key(ALICE)
    code, out, err = run_ops("chat", "--url", server.url)
    assert (2, "") == (code, out)
    assert "requires an API key" in err
    assert "$CAIRN_API_KEY" in err
    code, _, err = run_ops("chat", "--url", server.url, env={"CAIRN_API_KEY": BOB})
    assert 2 == code
    assert "does not know this API key" in err
    assert BOB not in err
    # The pipe is empty: the chat is admitted, and exits.
    code, _, err = run_ops("chat", "--url", server.url, env={"CAIRN_API_KEY": ALICE})
    assert 0 == code
    assert "Chatting with" in err


@pytest.mark.long
def test_a_request_times_out(start: Start, lengthy: tuple[dict[str, object], dict[str, object]]):
    """An answer that takes longer than the operator allows ends, and the journal has the reason."""
    server = start("--request-timeout", 0.5)
    response = server.post(**lengthy[0], max_tokens=100_000)
    error = response.json()["error"]
    assert (504, "timed_out", "timeout_error") == (
        response.status_code,
        error["code"],
        error["type"],
    )
    server.settled()
    (cancelled,) = server.events(ev.RequestCancelled)
    assert "timed_out" == cancelled.stage
