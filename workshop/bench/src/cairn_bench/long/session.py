"""
A long session: two clients and a server for hours, with a line on disk for each turn.

``long_plan`` decides what the clients say, ``long_record`` writes the record, ``long_report``
evaluates it, and ``long_command`` is the command line. A turn that fails is recorded and sent
again; the session ends early only if the server stops answering.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import attrs

from cairn.ops.common.locations import bytes_on_disk, url_of
from cairn_bench.long.plan import AGENT, Asked, Plan, Talker, agent, second
from cairn_bench.long.record import ANSWERED, LEFT, Ended, Look, Record, Turn, WentOn
from cairn_bench.servers.processes import NeverAtRest, Running
from cairn_conform.client import Client
from cairn_conform.client_answers import Answer

DEADLINE_S: Final = 120.0
"""For each turn; a longer one is an error."""

OVER: Final = "it was over"
STOPPED: Final = "it was stopped by a signal"
NO_ANSWER: Final = "the server stopped answering"

_UNANSWERED_MAX: Final = 10
_COLD_EACH: Final = 8
_LEAVES_AFTER_PIECES: Final = 3
_RSS = re.compile(r"^VmRSS:\s+(\d+) kB$", flags=re.M)
_KIB: Final = 1024


def hold(
    server: Running,
    record: Record,
    stop: threading.Event,
    *,
    data: Path,
    told: Callable[[Turn], None] = lambda _: None,
) -> None:
    """
    Hold a session, or the rest of it, and record it.

    Args:
        stop: set to end the session after the current turn.
        data: the server's directory.
        told: called with each turn of the first client.
    """
    session = record.session
    clock = Clock(session.seconds)
    if session.lines:
        record.add(WentOn(at_s=clock.now_s()))
    clients = Clients(session.begun.plan, server.client, clock)
    for turn in session.turns:
        clients.remember(turn)
    with contextlib.closing(clients):
        record.add(looked(server, data, clock.now_s()))
        why = _held(session.begun.plan, clients, record, stop, server, data, clock, told)
    if why == OVER:
        with contextlib.suppress(NeverAtRest):
            server.wait_at_rest()
    record.add(looked(server, data, clock.now_s()))
    record.add(Ended(at_s=clock.now_s(), why=why))


class Clock:
    """Seconds since the session began, over all processes that held it."""

    def __init__(self, begun_s: float = 0.0) -> None:
        self._zero_s = time.monotonic() - begun_s

    def now_s(self) -> float:
        """The line to show."""
        return round(time.monotonic() - self._zero_s, 3)


def _held(
    plan: Plan,
    clients: Clients,
    record: Record,
    stop: threading.Event,
    server: Running,
    data: Path,
    clock: Clock,
    told: Callable[[Turn], None],
) -> str:
    """Hold turn after turn until the session is over; returns the reason."""
    look_s = clock.now_s() + plan.look_s
    unanswered = 0
    while (begun_s := clock.now_s()) < plan.seconds and not stop.is_set():
        for turn in clients.turn():
            record.add(turn)
            if turn.client == AGENT:
                told(turn)
                unanswered = unanswered + 1 if turn.is_error else 0
        if unanswered == _UNANSWERED_MAX:
            return NO_ANSWER
        if clock.now_s() >= look_s:
            record.add(looked(server, data, clock.now_s()))
            look_s += plan.look_s
        next_s = max(begun_s + plan.every_s, clock.now_s() + plan.pause_s)
        stop.wait(max(0.0, min(next_s, plan.seconds) - clock.now_s()))
    return STOPPED if stop.is_set() else OVER


class Clients:
    """Both clients of one server."""

    def __init__(self, plan: Plan, client: Client, clock: Clock) -> None:
        self._plan = plan
        self._client = client
        self._clock = clock
        self._talkers = {talker.name: talker for talker in (agent(plan), second(plan))}
        self._turns = 0
        self._beside = ThreadPoolExecutor(1)

    def close(self) -> None:
        """Do not wait: requests in progress end with the server, or at their deadline."""
        self._beside.shutdown(wait=False)

    def remember(self, turn: Turn) -> None:
        """Replay a turn that was held before."""
        self._turns += turn.client == AGENT
        _hear(self._talkers[turn.client], turn)

    def turn(self) -> Iterator[Turn]:
        """
        Hold the first client's next turn, and during it one of the second client if that is due.
        """
        first, other = self._talkers.values()
        self._turns += 1
        among = self._turns % self._plan.interrupts_each == 0
        beside = self._beside.submit(self._ask, other.ask(), True) if among else None
        asked = first.ask()
        turn = self._ask(asked, among)
        if turn.is_answered and self._turns % _COLD_EACH == 0:
            turn = attrs.evolve(turn, as_cold=self._is_as_cold(asked, turn))
        _hear(first, turn)
        yield turn
        if beside is not None:
            turn = beside.result()
            _hear(other, turn)
            yield turn

    def _is_as_cold(self, asked: Asked, turn: Turn) -> bool | None:
        """
        Send the same request bypassing the cache, in the pause after the turn, and compare the
        answers. None if there was no such answer.
        """
        answer = self._client.ask({**asked.body, "cache_prompt": False})
        if outcome_of(answer)[0] != ANSWERED or answer.cached_tokens:
            return None
        return answer.text == turn.text

    def _ask(self, asked: Asked, among: bool) -> Turn:
        turn = Turn(
            at_s=self._clock.now_s(),
            client=asked.client,
            conversation=asked.conversation,
            turn=asked.turn,
            continues=asked.continues,
            thinking=asked.thinking,
            among=among,
            path=None,
            outcome=LEFT,
        )
        if asked.leaves:
            left = self._client.leave(asked.body, pieces=_LEAVES_AFTER_PIECES)
            return attrs.evolve(turn, total_s=round(left.after_s, 6))
        return _answered(turn, self._client.ask(asked.body))


def _hear(talker: Talker, turn: Turn) -> None:
    if turn.is_answered:
        talker.hear(turn.text, turn.tokens)
    else:
        talker.hear_nothing()


def _answered(turn: Turn, answer: Answer) -> Turn:
    """A turn with its outcome."""
    outcome, why = outcome_of(answer)
    if outcome != ANSWERED:
        return attrs.evolve(turn, outcome=outcome, why=why)
    return attrs.evolve(
        turn,
        outcome=outcome,
        path=answer.path,
        first_s=round((answer.first_s or answer.ended_s) - answer.began_s, 6),
        total_s=round(answer.ended_s - answer.began_s, 6),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        text=answer.text,
    )


def outcome_of(answer: Answer) -> tuple[str, str]:
    """The kind of outcome, and an error in words."""
    if answer.hung:
        return "timeout", answer.outcome
    if answer.status == 0:
        return "no connection", answer.outcome
    if answer.status != 200:
        return f"status {answer.status}", answer.outcome
    if answer.fault:
        return "broken answer", answer.outcome
    if not answer.done:
        return "broken answer", "the stream ended without [DONE]"
    return ANSWERED, ""


# --- looks ---------------------------------------------------------------------------------------


def looked(server: Running, data: Path, at_s: float) -> Look:
    """
    The current state of the server.

    Args:
        data: its directory.
    """
    content = server.client.content("/metrics")
    health = server.client.get("/health")
    found = Look(
        at_s=at_s,
        slab_bytes_max=_limit(health, "pool", "bytes_total"),
        block_bytes_max=_limit(health, "blocks", "bytes_total"),
        disk_bytes_max=_limit(health, "blocks", "disk_bytes_total"),
        journal_bytes=sum(bytes_on_disk(url_of(data, None))),
        rss_bytes=None if server.pid is None else rss_bytes(server.pid),
        load=round(os.getloadavg()[0], 2),
    )
    if content is None:
        return found
    metrics = readings(content.decode(errors="replace"))
    return attrs.evolve(
        found,
        violations=total(metrics, "cairn_cache_invariant_violations_total"),
        slab_bytes=total(metrics, 'cairn_scheduler_pool_bytes{state="in_use"}'),
        block_bytes=total(metrics, "cairn_block_bytes"),
        disk_bytes=total(metrics, "cairn_disk_block_bytes"),
        evicted=total(metrics, "cairn_blocks_evicted_total"),
        spilled=total(metrics, "cairn_blocks_spilled_total"),
        loaded=total(metrics, "cairn_blocks_loaded_total"),
        dropped=total(metrics, "cairn_blocks_dropped_total"),
        journal_rows=total(metrics, "cairn_journal_position"),
    )


def readings(text: str) -> Mapping[str, float]:
    """The samples of a scrape, by their names with labels. Invalid lines are skipped."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            with contextlib.suppress(ValueError):
                found[name] = float(value)
    return found


def total(metrics: Mapping[str, float], name: str) -> int | None:
    """One sample, or the sum of all with that name and any labels; None if there is none."""
    values = [value for key, value in metrics.items() if key == name or key.startswith(f"{name}{{")]
    return int(sum(values)) if values else None


def rss_bytes(pid: int) -> int | None:
    """The resident memory of a process; None if it is not available."""
    with contextlib.suppress(OSError):
        found = _RSS.search(Path(f"/proc/{pid}/status").read_text("utf-8"))
        return int(found[1]) * _KIB if found else None
    with contextlib.suppress(OSError, ValueError):  # not Linux
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        return int(subprocess.run(command, capture_output=True, check=False).stdout) * _KIB
    return None


def _limit(health: Any, part: str, name: str) -> int | None:
    value = health.get(part) if isinstance(health, Mapping) else None
    limit = value.get(name) if isinstance(value, Mapping) else None
    return limit if isinstance(limit, int) else None
