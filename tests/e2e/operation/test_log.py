"""
The log next to the journal: one line per request, with the same ids, shown by the same command.
"""

from __future__ import annotations

import json
from typing import Any

from cairn.journal import events as ev
from tests.support.processes.subprocess_server import (
    Serving,
    ask,
    assistant,
    eventually,
    run_ops,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def tail(server: Serving, *options: object) -> list[dict[str, Any]]:
    """The output of `ops tail` if it is not a terminal."""
    code, out, err = run_ops("tail", "--data-dir", server.data_dir, "-n", 10_000, *options)
    assert 0 == code, err
    return [json.loads(line) for line in out.splitlines()]


def test_log_and_journal_agree(shared: Serving):
    """
    Each request of a conversation is one line of the log, with the session, path and numbers that
    the journal has for the same request id; `ops tail` finds both by the session.
    """
    first = ask(shared, user(PATH * 12), session_id="asked twice")
    talk = [user(PATH * 12), assistant(first.text), user("And then?")]
    second = ask(shared, *talk, session_id="asked twice")
    shared.wait_idle()
    lines = eventually(
        lambda: (
            found
            if len(found := tail(shared, "--session", "asked twice", "event=request")) == 2
            else None
        )
    )
    finished = shared.events(ev.RequestFinished, session="asked twice")
    paths = shared.events(ev.PathSelected, session="asked twice")
    assert [event.request for event in finished] == [line["request"] for line in lines]
    assert [(p.path, p.reason, p.reused_tokens) for p in paths] == [
        (line["path"], line["reason"], line["reused_tokens"]) for line in lines
    ]
    assert [second.prompt_tokens, second.cached_tokens] == [
        lines[1]["prompt_tokens"],
        lines[1]["reused_tokens"],
    ]
    for line in lines:
        assert line["prompt_tokens"] == line["reused_tokens"] + line["prefilled_tokens"]
        assert 0 <= line["first_token_ms"] <= line["total_ms"]

    listed = tail(shared, "--journal", "--session", "asked twice", "kind=request_finished")
    assert [event.request for event in finished] == [row["payload"]["request"] for row in listed]
