"""
The server is killed while it works: everything that a client received is in the journal, and the
next server continues from there.
"""

from __future__ import annotations

from typing import Any

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assert_valid,
    assistant,
    eventually,
    user,
)

PATH = "The stone lies on the path, and the path goes over the hill. "


def committed(server: Serving, request: str) -> tuple[str, list[float]]:
    """The text that was released for a request, with the log-probabilities of its tokens."""
    drawn = server.events(ev.CacheExtended, request=request)
    logprobs = [logprob for event in drawn for logprob in event.logprobs]
    return server.released(request)[0], logprobs


def assert_journaled(server: Serving, client: Listener) -> None:
    """Assert that everything that a client received is journaled, exactly as it was received."""
    text, logprobs = committed(server, client.request)
    assert text.startswith(client.text)
    seen = [logprob for _, logprob in client.tokens]
    assert logprobs[: len(seen)] == seen
    assert server.released(client.request)[1] >= len(seen)


def _all_written(server: Serving) -> bool:
    """Whether every full block of the conversation has a file. The short one has none."""
    blocks = server.health()["blocks"]
    return 0 < blocks["count"] - 1 == blocks["disk_count"]


def at_work(server: Serving, lengthy: Any) -> list[Listener]:
    """Three requests that decode, one in prefill, and one in the queue."""
    clients = [Listener(server, **{**lengthy[n % 2], "seed": n}, max_tokens=250) for n in range(3)]
    clients += [Listener(server, user(PATH * 90), max_tokens=4)]
    for client in clients:
        client.accepted()
    waiting = Listener(server, user("Is anybody there?"))
    server.queued(1)
    clients[0].decoding(20)
    assert not waiting.chunks
    return [*clients, waiting]


def test_killed_while_it_serves(start: Start, cold: Serving, lengthy: Any):
    """
    Nothing that a client received is lost, the other requests have ended, and the conversation can
    continue.
    """
    server = start()
    talk = [user(PATH * 12)]
    talk += [assistant(ask(server, *talk).text), user("And then?")]
    eventually(lambda: _all_written(server))
    clients = at_work(server, lengthy)
    server.kill()
    for client in clients:
        assert not client.end().done
    taken = [client for client in clients if client.chunks]
    assert clients[:4] == taken
    assert_valid(server.data_dir)
    for client in taken:
        assert_journaled(server, client)
    known = {event.request for event in server.events(ev.RequestReceived)}
    assert len(taken) + 1 == len(known)  # the queued request left no trace

    again = start(data_dir=server.data_dir)
    lost = again.events(ev.ServerLost)
    assert [server.events(ev.ServerStarted)[0].boot] == [event.boot for event in lost]
    assert {"queued": 0, "running": 0} == again.health()["queue"]
    assert {"idle"} == set(again.health()["sessions"])
    assert 0 == again.health()["blocks"]["count"]

    first = ask(again, *talk)
    assert ("continuation", None) == (first.path, first.reason)
    assert first.cached_tokens >= 128  # from files that were written before the kill
    assert ask(cold, *talk, cache_prompt=False).bits == first.bits
    second = ask(again, *talk, assistant(first.text), user("Go on."))
    assert ("continuation", None) == (second.path, second.reason)
    assert second.session == first.session
    assert second.cached_tokens >= 128


def test_killed_in_prefill_and_at_the_first_token(start: Start, cold: Serving, lengthy: Any):
    """Answers that were cut off are the same when the request is repeated."""
    server = start()
    first = Listener(server, **lengthy[0], max_tokens=250).decoding(1)
    server.kill()
    seen = first.end().tokens
    assert_journaled(server, first)

    again = start(data_dir=server.data_dir)
    answer = ask(again, **lengthy[0], max_tokens=250)
    assert answer.tokens[: len(seen)] == seen
    assert ask(cold, **lengthy[0], max_tokens=250, cache_prompt=False).bits == answer.bits
    assert ("continuation", None) == (answer.path, answer.reason)
    second = Listener(again, user(PATH * 90), max_tokens=4).accepted()
    again.kill()
    assert () == second.end().tokens
    assert ("", 0) == again.released(second.request)

    third = start(data_dir=server.data_dir)
    assert 2 == len(third.events(ev.ServerLost))
    answer = ask(third, user(PATH * 90), max_tokens=4)
    assert ask(cold, user(PATH * 90), max_tokens=4, cache_prompt=False).bits == answer.bits
    assert second.chunks[0]["cairn"]["session"] == answer.session
