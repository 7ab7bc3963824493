"""
`ops serve --shadow-check`: answers are recomputed while the server is idle, and the results are
visible.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.request import urlopen

import pytest

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


def counted(server: Serving, result: str) -> float:
    """How many checks had a result, by the metrics."""
    with urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    series = f'cairn_shadow_checks_total{{result="{result}"}} '
    (line,) = [line for line in lines if line.startswith(series)]
    return float(line.removeprefix(series))


def test_answers_are_checked_in_idle_time(start: Callable[..., Serving]):
    """
    Two turns, the second of them warm, are the same when they are computed cold: in the metrics,
    the log and the journal, which is valid and has the share among the server's settings.
    """
    server = start("--shadow-check", 1)
    first = ask(server, user(PATH * 12))
    talk = [user(PATH * 12), assistant(first.text), user("And then?")]
    ask(server, *talk)
    eventually(lambda: counted(server, "same") == 2)
    assert 0 == counted(server, "differs") == counted(server, "skipped")

    requests = {event.request for event in server.events(ev.RequestFinished)}
    eventually(lambda: len(server.events(ev.ShadowEnded, result="same")) == 2)
    assert requests == {event.request for event in server.events(ev.ShadowChecked)}
    lines = [line for line in server.log() if line["event"] == "shadow check"]
    assert requests == {line["request"] for line in lines if line["ended"] == "same"}
    (began,) = server.events(ev.ServerStarted)
    assert 1.0 == began.settings["shadow_check"]


@pytest.mark.long
def test_it_can_be_switched_off(start: Callable[..., Serving]):
    """With 0 nothing is checked, which is journaled."""
    server = start("--shadow-check", 0)
    ask(server, user("Hello"))
    server.settled()
    assert [] == server.events(ev.ShadowStarted)
    (began,) = server.events(ev.ServerStarted)
    assert 0.0 == began.settings["shadow_check"]


def test_a_share_outside_of_the_range_is_refused():
    """Other values are refused before the server starts."""
    for share in ("-0.1", "1.01", "nan", "some"):
        code, _, err = run_ops("serve", "--shadow-check", share)
        assert 2 == code
        assert "--shadow-check" in err
