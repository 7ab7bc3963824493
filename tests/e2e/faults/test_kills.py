"""
Twenty servers over one data directory, each killed at some point, while conversations continue from
one to the next.

A seed determines what happens and when each kill comes; CAIRN_KILL_SEED sets another one.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cairn.journal import events as ev
from cairn.journal.replay import Replay
from cairn.journal.rows.codec import decode
from tests.e2e.faults.journaled import assert_journaled
from tests.support.processes.subprocess_server import (
    DEADLINE_S,
    PLAIN,
    Listener,
    Serving,
    ask,
    assert_valid,
    assistant,
    eventually,
    killed_at,
    reading,
    started,
    user,
)

SEED = int(os.environ.get("CAIRN_KILL_SEED", "20"))
MOMENTS = (
    *["loading the model", "reading the weights", "loading the model"],
    *["taken"] * 4,
    *["token"] * 5,
    *["answered"] * 4,
    *["committed"] * 4,
)
PATH = "The stone lies on the path, and the path goes over the hill. "


class Talker:
    """
    A client whose conversation continues for as long as a server answers, and with the next one.

    Attributes:
        talk: the messages so far; the last one is the user's.
        streams: the received part of each streamed answer.
        answers: (request, text) of each answer that was sent whole.
    """

    def __init__(self, number: int, *, named: bool, streaming: bool) -> None:
        self.talk = [user(f"Number {number}: {PATH * 9}")]
        self.name = {"session_id": f"talker/{number}"} if named else {}
        self.streaming = streaming
        self.streams: list[Listener] = []
        self.answers: list[tuple[str, str]] = []
        self.turns = 0

    def go_on(self, server: Serving) -> None:
        """Send messages until the server is gone."""
        while (text := self._heard(server)) is not None:
            self.turns += 1
            self.talk += [assistant(text), user(f"And then? {PATH * (self.turns % 3)}")]

    def _heard(self, server: Serving) -> str | None:
        """The next answer; None if the server was killed before its end."""
        if self.streaming:
            with contextlib.suppress(OSError):
                stream = Listener(server, *self.talk, max_tokens=24, **self.name)
                self.streams.append(stream)
                stream.end()
                assert stream.refusal is None
                return stream.text if stream.done else None
            return None
        body = {**PLAIN, **self.name, "messages": self.talk}
        try:
            url = f"{server.url}/v1/chat/completions"
            response = httpx.post(url, json=body, timeout=DEADLINE_S)
        except httpx.TransportError:
            return None
        answer = response.json()
        assert 200 == response.status_code, answer
        text: str = answer["choices"][0]["message"]["content"]
        self.answers.append((answer["id"].removeprefix("chatcmpl-"), text))
        return text


def moment(
    name: str, chance: random.Random, server: Serving, talkers: list[Talker]
) -> Callable[[], bool]:
    """A function that returns whether this moment of the run has come."""
    seen = {talker: len(talker.streams) for talker in talkers}
    turns = sum(talker.turns for talker in talkers)
    position = server.position()

    def streams() -> list[Listener]:
        return [s for talker, before in seen.items() for s in talker.streams[before:]]

    match name:
        case "taken":
            return lambda: any(stream.chunks for stream in streams())
        case "token":
            tokens = chance.randint(1, 60)
            return lambda: sum(len(stream.tokens) for stream in streams()) >= tokens
        case "answered":
            count = chance.randint(1, 5)
            return lambda: sum(talker.turns for talker in talkers) >= turns + count
        case _:
            more = chance.randint(1, 120)
            return lambda: server.position() >= position + more


def assert_nothing_is_open(data_dir: Path) -> None:
    """Assert that only the current run has open requests in the journal."""
    fold = Replay()
    with reading(data_dir) as store:
        for row in store.read():
            fold.feed(row)
            if isinstance(decode(row).event, ev.ServerLost):
                assert not fold.state.requests
    assert () == tuple(fold.report().findings)
    assert not fold.report().not_checked


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times(tmp_path: Path, model_directory: Path, cold: Serving):
    """
    Each killed run is recorded as lost once, everything received is journaled, and the
    conversations continue.
    """
    print(f"CAIRN_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    home, options = tmp_path / "home", ("--model", model_directory)
    talkers = [Talker(n, named=n % 2 == 0, streaming=n != 3) for n in range(4)]
    threads = ThreadPoolExecutor(len(talkers))
    for name in chance.sample(MOMENTS, len(MOMENTS)):
        if name not in ("taken", "token", "answered", "committed"):
            killed_at(name, home, *options)
            continue
        with started(home, *options) as server:
            come = moment(name, chance, server, talkers)
            going_on = [threads.submit(talker.go_on, server) for talker in talkers]
            eventually(come)
            server.kill()
            for each in going_on:
                each.result(DEADLINE_S)
        streams = [stream for talker in talkers for stream in talker.streams]
        assert_journaled(home, streams, [one for talker in talkers for one in talker.answers])

    with started(home, *options) as server:
        boots = [event.boot for event in server.events(ev.ServerStarted)]
        assert len(MOMENTS) + 1 == len(boots)
        assert boots[:-1] == [event.boot for event in server.events(ev.ServerLost)]
        for talker in talkers:
            answer = ask(server, *talker.talk, **talker.name)
            assert ask(cold, *talker.talk, cache_prompt=False).bits == answer.bits
            assert answer.session == talker.name.get("session_id", answer.session)
            more = [*talker.talk, assistant(answer.text), user("Go on.")]
            second = ask(server, *more, **talker.name)
            assert ("continuation", answer.session) == (second.path, second.session)
            assert second.cached_tokens > 0
        assert sum(talker.turns for talker in talkers) >= 8
        server.wait_idle()
        assert 0 == server.stop()
    assert_nothing_is_open(home)
    assert_valid(home)
