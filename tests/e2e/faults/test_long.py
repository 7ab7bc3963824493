"""
Many clients for a long time: a thousand streams of which a third disconnect, and conversations for
half an hour. A seed determines what clients send; CAIRN_SOAK_MINUTES sets how long they go on.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.e2e.faults.journaled import assert_journaled
from tests.support.processes.subprocess_server import (
    Listener,
    Serving,
    ask,
    assistant,
    eventually,
    user,
)

pytestmark = [pytest.mark.soak, pytest.mark.slow]

SEED = 20261126
STREAMS = 1000
AT_ONCE = 40
MINUTES = float(os.environ.get("CAIRN_SOAK_MINUTES", "30"))
DRIFT = 0.05
PATH = "The stone lies on the path, and the path goes over the hill. "


def leaving(server: Serving, messages: list[dict[str, str]], after: int | None) -> Listener:
    """A stream whose client disconnects after this many tokens; with None it stays to the end."""
    stream = Listener(server, *messages, max_tokens=24)
    if after is None:
        return stream.end()
    stream.until(lambda it: it.ended.is_set() or (it.chunks and len(it.tokens) >= after))
    stream.leave()
    return stream


@pytest.mark.timeout(3600)
def test_a_thousand_streams(start: Start, cold: Serving) -> None:
    """
    Forty at a time, of which each third client disconnects: the others get whole answers with the
    bits of cold ones, everything received is journaled, and nothing stays open.
    """
    server = start()
    chance = random.Random(SEED)
    ask(server, user("Hello"))
    server.settled()
    open_files = server.open_files()
    begins = [f"{place}: {PATH * chance.randint(0, 30)}" for place in range(20)]
    talks = [[user(f"{chance.choice(begins)}Number {place}?")] for place in range(STREAMS)]
    leaves = [chance.randint(0, 4) if place % 3 == 0 else None for place in range(STREAMS)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        streams = list(
            threads.map(lambda one: leaving(server, *one), zip(talks, leaves, strict=True))
        )

    stayed = [(s, talk) for s, talk, n in zip(streams, talks, leaves, strict=True) if n is None]
    assert Counter(stream.status for stream in streams) == {200: STREAMS}
    assert all(stream.done and stream.finish_reason for stream, _ in stayed)
    server.wait_idle()
    finished = {event.request for event in server.events(ev.RequestFinished)}
    cancelled = {event.request for event in server.events(ev.RequestCancelled)}
    print(f"{len(finished)} answers were finished, {len(cancelled)} cancelled")
    assert not finished & cancelled
    assert {stream.request for stream in streams} <= finished | cancelled
    assert len(cancelled) > STREAMS / 6
    assert not server.events(ev.InvariantViolated)
    assert_journaled(server.data_dir, streams)
    assert {"queued": 0, "running": 0} == server.health()["queue"]
    eventually(lambda: server.open_files() <= open_files)
    for stream, talk in chance.sample(stayed, 20):
        assert stream.tokens == ask(cold, *talk, cache_prompt=False).tokens


@attrs.frozen(kw_only=True)
class Sample:
    """
    What a server has used up to a moment.

    Attributes:
        cpu_s: processor time of all of its threads.
        tokens: emitted to clients.
        resident_kb: memory in use.
    """

    cpu_s: float
    tokens: int
    resident_kb: int
    open_files: int
    threads: int


def sample(server: Serving) -> Sample:
    """Of this moment."""
    folder = Path(f"/proc/{server.pid}")
    fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    status = (folder / "status").read_text(encoding="utf-8")
    emitted = re.search(r"^cairn_tokens_emitted_total (\S+)$", server.metrics(), flags=re.M)
    resident = re.search(r"^VmRSS:\s+(\d+) kB$", status, flags=re.M)
    assert emitted is not None
    assert resident is not None
    return Sample(
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        tokens=int(float(emitted[1])),
        resident_kb=int(resident[1]),
        open_files=server.open_files(),
        threads=int(fields[17]),
    )


def converse(server: Serving, chance: random.Random, end: float) -> None:
    """Conversations of a client, one after another, until then; it leaves an answer at times."""
    while time.monotonic() < end:
        talk: list[Any] = [user(f"{chance.random()} {PATH * chance.randint(1, 20)}")]
        for _ in range(chance.randint(2, 8)):
            if time.monotonic() >= end:
                return
            after = chance.randint(0, 8) if chance.random() < 0.2 else None
            stream = leaving(server, talk, after)
            assert 200 == stream.status, stream.refusal
            talk += [assistant(stream.text or "..."), user(f"And then? {PATH}")]


@pytest.mark.timeout(MINUTES * 60 + 600)
def test_half_an_hour(start: Start) -> None:
    """
    Four clients converse: processor time a token, memory, files and threads of the last third of
    the time are those of the second.
    """
    server = start("--blocks-mb", 64, "--ttl", "2m")
    begun = time.monotonic()
    end = begun + MINUTES * 60
    samples: list[Sample] = []
    with ThreadPoolExecutor(4) as threads:
        clients = [
            threads.submit(converse, server, random.Random(SEED + place), end) for place in range(4)
        ]
        while time.monotonic() < end:
            time.sleep(MINUTES * 60 / 60)
            samples.append(sample(server))
        for client in clients:
            client.result()
    third = len(samples) // 3
    found = []
    for part in (samples[:third], samples[third : 2 * third], samples[2 * third :]):
        first, last = part[0], part[-1]
        found.append(
            (
                1000 * (last.cpu_s - first.cpu_s) / (last.tokens - first.tokens),
                statistics.median(one.resident_kb for one in part) / 1024,
                max(one.open_files for one in part),
                max(one.threads for one in part),
            )
        )
        print(
            "{:.2f} ms of processor time a token, {:.1f} MiB, "
            "at most {} files and {} threads".format(*found[-1])
        )
    print(f"{samples[-1].tokens} tokens in {MINUTES:g} minutes")
    _, before, after = found
    assert after[0] < (1 + DRIFT) * before[0]
    assert after[1] < (1 + DRIFT) * before[1]
    assert after[2] <= before[2] + 2  # a connection may be open at the one moment, and not before
    assert after[3] <= before[3]
