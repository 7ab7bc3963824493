"""
Measures a fleet: two nodes that serve Pebble, PostgreSQL on the loopback in a temporary folder, and
HAProxy with docs/how-to/fleet.cfg.

Run it as ``make fleet-numbers`` or ``python -P -m tools.fleet_numbers``; ``--only NAME`` chooses
figures. It prints a row of a table for each, and ends with 3 if a goal is missed. Each comparison
has a control, something that must come out differently. Times are those of an otherwise idle
machine; counts are valid beside other work.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
from tqdm import tqdm

from cairn.engine.model.builtin import builtin_directory
from cairn.journal.rows.database.urls import node_url
from cairn.ops.common.locations import snapshot_path
from tests.support.models.dtype_models import HALF, make_model
from tests.support.processes import subprocess_server
from tests.support.processes.fleet import Fleet
from tests.support.processes.haproxy import free_port, running_haproxy
from tests.support.processes.postgres import DURABLE, Postgres, running_postgres
from tests.support.processes.subprocess_server import (
    Answer,
    Serving,
    ask,
    assistant,
    eventually,
    run_ops,
    started,
    together,
    user,
)

NODES = ("n1", "n2")
SYSTEM = "You are brief and answer in one sentence. " * 8
CLIENTS = 4
"""Clients at once, where it does not matter when an answer comes."""
REPEATS = 3
"""Of a measurement that is slow."""
_MISSED = 3
_REFUSED = 2


class Failed(Exception):
    """A figure could not be measured. The message says why."""


@attrs.frozen
class Figure:
    """
    A row of the table.

    Attributes:
        made_of: of what, and what the control gave.
    """

    name: str
    value: str
    goal: str
    is_reached: bool
    made_of: str

    def row(self) -> str:
        """The row, in Markdown."""
        reached = "reached" if self.is_reached else "**missed**"
        return f"| {self.name} | {self.value} | {self.goal} | {reached} | {self.made_of} |"


@attrs.frozen
class Place:
    """
    Where it is measured.

    Attributes:
        folder: for the data directories of servers.
        check_s: how long HAProxy waits for an answer to a health check.
    """

    postgres: Postgres
    folder: Path
    check_s: int

    def fleet(self, name: str) -> Fleet:
        """A fleet with a database and a folder of its own."""
        (self.folder / name).mkdir()
        options = ("--model", builtin_directory())
        return Fleet(self.postgres.new_database(), self.folder / name, options)

    @contextlib.contextmanager
    def router(
        self, nodes: dict[str, Serving], *, without: Sequence[str] = ()
    ) -> Iterator[Serving]:
        """HAProxy before the nodes of a fleet."""
        places = {name: "{}:{}".format(*node.address) for name, node in nodes.items()}
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as folder,
            running_haproxy(Path(folder), places, check_s=self.check_s, without=without) as router,
        ):
            yield router


@contextlib.contextmanager
def running(fleet: Fleet) -> Iterator[dict[str, Serving]]:
    """Both nodes of a fleet, which have valid journals when they have stopped."""
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(fleet.node(name)) for name in NODES}
        yield nodes
        for node in nodes.values():
            node.wait_idle()
            if node.stop() != 0:
                raise Failed(f"a node failed: {node.stderr()}")
    fleet.assert_valid(*NODES)


# --- turns that the router keeps on their node ----------------------------------------------------

HEADERS = ("x-claude-code-session-id", "x-session-id", "session-id")
FIELDS = ("session_id", "prompt_cache_key", "metadata.user_id")
WORDS = ("words", "words and system", "words in blocks", "words in blocks and system")
KEYS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": (*HEADERS, *FIELDS, *WORDS),
    "/v1/messages": (*HEADERS, *FIELDS, *WORDS),
    "/v1/responses": (*HEADERS, *FIELDS, *WORDS, "previous_response_id"),
    "/v1/completions": (*HEADERS, *FIELDS),
    "/api/chat": (*HEADERS, *FIELDS, *WORDS[:2]),
    "/api/generate": (*HEADERS, *FIELDS),
    "/v1/agents": ("name",),
}
"""How a conversation may be known, by protocol."""
LATER_TURNS = 2


@attrs.define
class Talk:
    """
    A conversation of a client that sends all of it each time.

    Attributes:
        said: the client's and the model's words, in turn.
        id: of the last response, or of the agent.
        context: the token ids that Ollama's generate returned.
        node: of the first turn.
    """

    path: str
    key: str
    number: int
    said: list[str] = attrs.field(factory=list)
    id: str = ""
    context: list[int] = attrs.field(factory=list)
    node: str = ""

    def turn(self, client: httpx.Client) -> tuple[str, bool]:
        """
        Send the next turn.

        Returns:
            The node that answered, and whether it continued a session.
        """
        if self.path == "/v1/agents" and not self.id:
            self.id = sent(client, self.path, {}).json()["agent_id"]
            self.node = self.id.partition(".")[0]
        # What is not to tell conversations apart is equal in all of them.
        about = str(self.number) if self.key in (*WORDS, "name") else "stones"
        self.said.append(f"Please say more of {about}, part {len(self.said)}.")
        body, headers = self.fields(), {}
        if self.key in HEADERS:
            headers[self.key] = f"session {self.number}"
        elif self.key == "metadata.user_id":
            body["metadata"] = {"user_id": f"user_{'a' * 80}_session_{self.number}"}
        elif self.key in FIELDS:
            body[self.key] = f"session {self.number}"
        path = f"{self.path}/{self.id}/generate" if self.path == "/v1/agents" else self.path
        answer = sent(client, path, body, headers)
        self.said.append(self.answered(answer.json()))
        node = answer.headers["x-request-id"].partition(".")[0]
        self.node = self.node or node
        return node, answer.headers["x-cairn-path"] != "new_session"

    def fields(self) -> dict[str, Any]:
        """The body of the next request, without a key."""
        system = SYSTEM if "system" in self.key or self.key not in WORDS else ""
        messages = [
            self.message("assistant" if place % 2 else "user", text)
            for place, text in enumerate(self.said)
        ]
        whole = [self.message("system", system), *messages] if system else messages
        match self.path:
            case "/v1/chat/completions":
                return {"messages": whole, "max_tokens": 4}
            case "/v1/messages":
                own = self.message("system", system)["content"]
                more = {"system": own} if system else {}
                return {**more, "model": "any", "messages": messages, "max_tokens": 4}
            case "/v1/responses" if self.key == "previous_response_id":
                before = {"previous_response_id": self.id} if self.id else {}
                last = self.said[-1]
                return {**before, "model": "any", "input": last, "max_output_tokens": 4}
            case "/v1/responses":
                words: Any = messages if len(messages) > 1 or "blocks" in self.key else self.said[0]
                own = {"instructions": system} if system else {}
                return {**own, "model": "any", "input": words, "max_output_tokens": 4}
            case "/v1/completions":
                return {"prompt": "\n".join([SYSTEM, *self.said]), "max_tokens": 4}
            case "/api/chat":
                options = {"num_predict": 4}
                return {"model": "any", "messages": whole, "stream": False, "options": options}
            case "/api/generate":
                body = {"model": "any", "prompt": self.said[-1], "stream": False, "system": SYSTEM}
                return {**body, "options": {"num_predict": 4}, "context": self.context or None}
            case _:
                return {"messages": messages[-1:], "max_tokens": 4}

    def message(self, role: str, text: str) -> dict[str, Any]:
        """A message whose content is a string, or a list of blocks."""
        if "blocks" not in self.key:
            return {"role": role, "content": text}
        is_answer = role == "assistant" and self.path == "/v1/responses"
        return {"role": role, "content": [{"type": self.block(is_answer), "text": text}]}

    def block(self, is_answer: bool) -> str:
        """The type of a block of text."""
        if self.path != "/v1/responses":
            return "text"
        return "output_text" if is_answer else "input_text"

    def answered(self, body: dict[str, Any]) -> str:
        """The words of an answer. Notes what the next turn needs of it."""
        match self.path:
            case "/v1/chat/completions" | "/v1/agents":
                found = body["choices"][0]["message"]["content"]
            case "/v1/messages":
                found = body["content"][0]["text"]
            case "/v1/responses":
                self.id = body["id"]
                found = body["output"][-1]["content"][0]["text"]
            case "/v1/completions":
                found = body["choices"][0]["text"]
            case "/api/chat":
                found = body["message"]["content"]
            case _:
                self.context = body.get("context", [])
                found = body["response"]
        return str(found) or "Yes."


def sent(
    client: httpx.Client, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    """An answer that is no error."""
    answer = client.post(path, json=body, headers=headers)
    if answer.status_code not in (200, 201):
        raise Failed(f"{path} was answered with {answer.status_code}: {answer.text}")
    return answer


def later_turns(client: httpx.Client, talks: list[Talk], label: str) -> tuple[int, int, int]:
    """
    Hold conversations, a turn of each in turn, in random order.

    Returns:
        How many later turns there were, how many went to the node of the first one, and how many
        continued a session there.
    """
    drawn = random.Random(1)
    turns = [talk for _ in range(1 + LATER_TURNS) for talk in drawn.sample(talks, len(talks))]
    later = kept = continued = 0
    for talk in tqdm(turns, label, disable=None):
        before = talk.node if talk.said else ""
        node, does = talk.turn(client)
        if before:
            later, kept = later + 1, kept + (node == before)
            continued += does
    return later, kept, continued


def kept(place: Place) -> Iterator[Figure]:
    """Later turns that go to the node of the first one."""
    fleet = place.fleet("kept")
    cases = [(path, key) for path, keys in KEYS.items() for key in keys]
    each = 500 // (LATER_TURNS * len(cases)) + 1

    def talks(first: int, of: Sequence[tuple[str, str]]) -> list[Talk]:
        return [
            Talk(path, key, first + 100 * case + number)
            for case, (path, key) in enumerate(of)
            for number in range(each)
        ]

    with running(fleet) as nodes:
        with (
            place.router(nodes) as router,
            httpx.Client(base_url=router.url, timeout=120) as client,
        ):
            mine = talks(0, cases)
            later, stayed, continued = later_turns(client, mine, "turns through the router")
            spread = {name: sum(talk.node == name for talk in mine) for name in NODES}
        with (
            place.router(nodes, without=("stick on",)) as router,
            httpx.Client(base_url=router.url, timeout=120) as client,
        ):
            control = later_turns(client, talks(100_000, cases[:10]), "the control")
    yield Figure(
        "later turns kept by the router",
        f"{stayed} of {later}",
        "all of 500",
        stayed == later >= 500 and min(spread.values()) > 0 and control[1] < control[0],
        f"{len(cases)} protocols and keys, conversations by node {spread}; {continued} continued a "
        f"session; control (no stick table) {control[1]} of {control[0]}",
    )


# --- answers after a move -------------------------------------------------------------------------

MOVES, CONTROLS = 200, 20


def question(number: int) -> dict[str, Any]:
    """
    A conversation's second turn, without the first answer: every second one is sampled. What it
    begins with is in no other conversation, so a node that did not see it computes all of it.
    """
    first = f"Story {number}: {number} stones lay by path {number * 7}. " * (1 + number % 6)
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
    return {"messages": [user(first)], "max_tokens": 16, **sampled}


def second_turn(first: Answer, number: int) -> dict[str, Any]:
    """The request of a second turn."""
    body = question(number)
    more = [assistant(first.text or "Yes."), user(f"And what of stone {number}?")]
    return {**body, "messages": [*body["messages"], *more]}


def moved(place: Place) -> Iterator[Figure]:
    """Answers of a node that continues a conversation, and of one to which it moves."""
    fleet = place.fleet("moved")
    half = make_model(builtin_directory(), place.folder / "half", HALF)
    equal = controls = 0
    with (
        running(fleet) as nodes,
        started(place.folder / "moved-half", "--model", half, "--dtype", "model") as other,
    ):
        for number in tqdm(range(MOVES), "moves", disable=None):
            here, there = (nodes[name] for name in (NODES if number % 2 else NODES[::-1]))
            more = second_turn(ask(here, **question(number)), number)
            stays, moves = ask(here, **more), ask(there, **more)
            # All prompts begin with the same few tokens of the template.
            if 2 * moves.cached_tokens > stays.cached_tokens:
                raise Failed(f"{stays} continues nothing, or {moves} did not move")
            equal += stays.bits == moves.bits
            if number < CONTROLS:
                controls += stays.bits == ask(other, **more).bits
    yield Figure(
        "answers equal after a move, words and log-probabilities",
        f"{equal} of {MOVES}",
        "all of 200",
        equal == MOVES >= 200 and controls == 0,
        f"half of them sampled; control (weights in {HALF}) {controls} of {CONTROLS} equal",
    )


# --- turns after a kill ---------------------------------------------------------------------------

KILLS, TALKS = 4, 52


def killed(place: Place) -> Iterator[Figure]:
    """Turns that are sent as soon as a node was killed."""
    fleet = place.fleet("killed")
    errors: list[str] = []
    turns = lost = 0
    longest_s = 0.0
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(fleet.node(name)) for name in NODES}
        for kill in tqdm(range(KILLS), "kills", disable=None):
            with place.router(nodes) as router:
                talks = [Talk("/v1/chat/completions", "session_id", n) for n in range(TALKS)]
                for talk in talks:
                    talk.number += 1000 * (kill + 1)
                clients = [
                    stack.enter_context(httpx.Client(base_url=router.url, timeout=120))
                    for _ in range(CLIENTS)
                ]
                if failed := tried(clients, talks)[0]:
                    raise Failed(f"before a node was killed: {failed[0]}")
                gone = NODES[kill % 2]
                nodes[gone].kill()
                failed, took_s = tried(clients, talks)
                errors += failed
                turns += len(talks)
                lost += sum(talk.node == gone for talk in talks)
                longest_s = max(longest_s, took_s)
                with httpx.Client(base_url=nodes[gone].url) as alone:
                    (control, *_), _ = tried([alone], talks[:1])
            nodes[gone] = stack.enter_context(fleet.node(gone))
        for node in nodes.values():
            node.wait_idle()
            node.stop()
    fleet.assert_valid(*NODES)
    yield Figure(
        "client errors in turns after kill -9",
        f"{len(errors)} of {turns}",
        "0 of 100",
        not errors and lost >= 100,
        f"{KILLS} kills, {CLIENTS} clients; {lost} turns had lost their node; the longest took "
        f"{longest_s:.1f} s; control (asked of the node itself): {control}",
    )
    for error in errors[:3]:
        print(error, file=sys.stderr)


def tried(clients: Sequence[httpx.Client], talks: Sequence[Talk]) -> tuple[list[str], float]:
    """
    Send a turn of each conversation, by several clients.

    Returns:
        The errors, and how many seconds the longest turn took.
    """
    errors: list[str] = []
    times: list[float] = []

    def send(client: httpx.Client, mine: Sequence[Talk]) -> None:
        for talk in mine:
            begun = time.perf_counter()
            try:
                talk.turn(client)
            except (Failed, httpx.HTTPError) as error:
                errors.append(f"{type(error).__name__}: {error}")
            times.append(time.perf_counter() - begun)

    calls = [
        lambda client=client, place=place: send(client, talks[place :: len(clients)])
        for place, client in enumerate(clients)
    ]
    together(calls)
    return errors, max(times)


# --- a takeover -----------------------------------------------------------------------------------

ROWS = 100_000


def takeover(place: Place) -> Iterator[Figure]:
    """From the begin of `ops takeover` to the first answer of the new server."""
    fleet = place.fleet("takeover")
    url = node_url(fleet.url, "n1")
    tool, home = Path(__file__).with_name("long_journal.py"), fleet.home("n1")
    where = ["--journal", url, "--sealed", home, fleet.folder / "made"]
    make = [tool, "--step", "make", "--rows", ROWS, *where]
    subprocess.run([sys.executable, "-P", *map(str, make)], check=True)
    for snapshot in (True, False):
        steps: list[tuple[float, ...]] = []
        for number in tqdm(range(REPEATS), "takeovers", disable=None):
            steps.append(taken_over(fleet, fleet.folder / f"home-{snapshot}-{number}", snapshot))
        columns = [statistics.median(column) for column in zip(*steps, strict=True)]
        whole, first, second, first_cpu, second_cpu = columns
        with_it = "with a snapshot" if snapshot else "without a snapshot"
        rows = len(fleet.events("n1"))
        yield Figure(
            f"takeover until it serves, {with_it}",
            f"{whole:.1f} s",
            f"at most 10 s with {ROWS:,} rows",
            whole <= 10 and rows >= ROWS,
            f"median of {REPEATS}; `ops takeover` {first:.1f} s ({first_cpu:.1f} s of CPU), start "
            f"to first answer {second:.1f} s ({second_cpu:.1f} s of CPU); {rows:,} rows",
        )
    fleet.assert_valid("n1")


def taken_over(fleet: Fleet, home: Path, snapshot: bool) -> tuple[float, ...]:
    """
    Take a server over that hangs, and start another one on its data.

    Args:
        home: the data directory of the other server.
        snapshot: whether the last run left a snapshot of the journal.

    Returns:
        The seconds of all, of `ops takeover`, and from the start to the end of the first answer,
        and the CPU seconds of these two.
    """
    if snapshot:
        with fleet.node("n1") as before:
            ask(before, user("Hello"), max_tokens=4)
            before.wait_idle()
            before.stop()
    with fleet.node("n1") as old:
        ask(old, user("Hello"), max_tokens=4)
        old.wait_idle()
        old.signal(signal.SIGSTOP)
        shutil.copytree(fleet.home("n1"), home)
        if not snapshot:
            snapshot_path(home).unlink(missing_ok=True)
        begun, cpu_s = time.perf_counter(), children_s()
        code, out, err = run_ops("takeover", "n1", "--journal", fleet.url, "--yes")
        if code:
            raise Failed(f"ops takeover: {out}{err}")
        between, of_takeover = time.perf_counter(), children_s() - cpu_s
        with started(home, "--journal", fleet.url, "--node", "n1", *fleet.options) as new:
            ask(new, user("Hello"), max_tokens=4)
            ended, of_start = time.perf_counter(), processor_s(new)
            old.kill()  # idle, it would find out only when it next writes
            new.wait_idle()
            new.stop()
    return ended - begun, between - begun, ended - between, of_takeover, of_start


def children_s() -> float:
    """The processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def processor_s(server: Serving) -> float:
    """The processor time of a server, by its metrics."""
    found = re.search(r"^process_cpu_seconds_total (\S+)$", server.metrics(), re.MULTILINE)
    assert found is not None
    return float(found[1])


# --- what HAProxy adds ----------------------------------------------------------------------------

PAIRS = 300


def first_token(place: Place) -> Iterator[Figure]:
    """The time to the first token through HAProxy and without it, in turns."""
    fleet = place.fleet("first-token")
    body = json.dumps(
        {
            "messages": [user(SYSTEM * 3), assistant("Yes."), user("Go on, please.")],
            "max_tokens": 1,
            "stream": True,
            "session_id": "mine",
        }
    )
    with running(fleet) as nodes, place.router(nodes) as router:
        client = http.client.HTTPConnection(*router.address)
        node = timed(client, body)[1]
        ways = {"direct": http.client.HTTPConnection(*nodes[node].address), "through": client}
        found: dict[str, list[float]] = {way: [] for way in ways}
        order = list(ways)
        for _ in tqdm(range(PAIRS), "pairs of requests", disable=None):
            random.shuffle(order)
            for way in order:
                nodes[node].wait_idle()
                seconds, by = timed(ways[way], body)
                if by != node:
                    raise Failed(f"a request went to {by}, and not to {node}")
                found[way].append(seconds * 1000)
        for connection in ways.values():
            connection.close()
    apart = [through - direct for direct, through in zip(*found.values(), strict=True)]
    added = statistics.median(apart)
    yield Figure(
        "time to first token through HAProxy less direct",
        f"{added:.2f} ms",
        "at most 3 ms",
        added <= 3,
        f"median of {PAIRS} pairs, quartiles {quartiles(apart)} ms; medians "
        + ", ".join(f"{way} {statistics.median(times):.1f} ms" for way, times in found.items()),
    )


def timed(connection: http.client.HTTPConnection, body: str) -> tuple[float, str]:
    """The seconds until the first token of a stream, and the node that sent it."""
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    took = 0.0
    with connection.getresponse() as answer:
        node = answer.headers["x-request-id"].partition(".")[0]
        for line in answer:
            if not took and content(line):
                took = time.perf_counter() - begun
    if not took:
        raise Failed("a stream had no token")
    return took, node


def content(line: bytes) -> str:
    """The words in a line of a stream."""
    if not line.startswith(b"data: {"):
        return ""
    choices = json.loads(line.removeprefix(b"data: ")).get("choices", ())
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def quartiles(values: Sequence[float]) -> str:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values, n=4)
    return f"{first:.2f} and {third:.2f}"


# --- PostgreSQL and SQLite ------------------------------------------------------------------------

ANSWERS, TOKENS = 12, 600


def rate(place: Place) -> Iterator[Figure]:
    """Tokens a second with the journal in PostgreSQL and in SQLite, in turns."""
    fleet = place.fleet("rate")
    model = builtin_directory()
    config = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    endless = {str(token): -100 for token in config["eos_token_id"]}
    with (
        fleet.node("n1") as postgresql,
        started(place.folder / "rate-sqlite", *fleet.options) as sqlite,
    ):
        servers = {"PostgreSQL": postgresql, "SQLite": sqlite}
        found: dict[str, list[float]] = {name: [] for name in servers}
        order = list(servers)
        for number in tqdm(range(ANSWERS + 1), "pairs of answers", disable=None):
            body = {
                "messages": [user(f"Tell me of {number} stones.")],
                "max_tokens": TOKENS,
                "stream": True,
                "logit_bias": endless,
                "temperature": 3.0,
                "seed": number,
            }
            for name in order:
                servers[name].wait_idle()
                found[name].append(tokens_a_second(servers[name], body))
            order.reverse()
        for server in servers.values():
            server.wait_idle()
            server.stop()
    first, second = (values[1:] for values in found.values())  # without the one that warms up
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    middle = statistics.median(ratios)
    yield Figure(
        "tokens a second, PostgreSQL on the loopback / SQLite",
        f"{middle:.3f}",
        "at least 0.95",
        middle >= 0.95,
        f"median of {ANSWERS} pairs of answers of {TOKENS} tokens, quartiles {quartiles(ratios)}; "
        f"medians {statistics.median(first):.1f} / {statistics.median(second):.1f}",
    )


def tokens_a_second(server: Serving, body: dict[str, Any]) -> float:
    """How fast an answer is streamed, from its first token on."""
    connection = http.client.HTTPConnection(*server.address)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    times: list[float] = []
    with connection.getresponse() as answer:
        for line in answer:
            if content(line):
                times.append(time.perf_counter())
    connection.close()
    if len(times) < 2:
        raise Failed("an answer had no tokens")
    return (TOKENS - 1) / (times[-1] - times[0])


# --- blocks that are shared -----------------------------------------------------------------------

LONG_TALKS = 5
LONG = "The stone lies on the path, and the path goes over the hill. " * 100


def reused(place: Place) -> Iterator[Figure]:
    """Tokens that a next turn reuses on a node to which it moves, and on its own."""
    alone = place.fleet("reused")
    shared = alone.folder / "shared"
    shared.mkdir(mode=0o700)
    fleet = attrs.evolve(alone, options=(*alone.options, "--blocks", shared))
    found = dict.fromkeys(("own", "other", "control"), 0)
    equal = 0
    with running(fleet) as nodes, alone.node("n3") as control:
        own, other = nodes.values()
        talks, blocks = [], 0
        for number in tqdm(range(LONG_TALKS), "first turns", disable=None):
            first = ask(own, user(f"Story {number}. {LONG}"), max_tokens=8)
            blocks += first.prompt_tokens // own.health()["block_tokens"]
            said = (user(f"Story {number}. {LONG}"), assistant(first.text or "Yes."))
            talks.append((*said, user("And then?")))
        own.wait_idle()
        eventually(lambda: len(list(shared.glob("n1/**/*.safetensors"))) >= blocks)
        for talk in tqdm(talks, "moves", disable=None):
            # Its own node last: what it computes for this turn is not there to be adopted.
            moves, alone_there, stays = (
                ask(one, *talk, max_tokens=8) for one in (other, control, own)
            )
            equal += stays.bits == moves.bits
            found["own"] += stays.cached_tokens
            found["other"] += moves.cached_tokens
            found["control"] += alone_there.cached_tokens
        control.wait_idle()
        control.stop()
    share = found["other"] / found["own"]
    yield Figure(
        "tokens reused on the first turn after a move, of those on its own node, with `--blocks`",
        f"{share:.3f}",
        "at least 0.95",
        share >= 0.95 and equal == LONG_TALKS and found["control"] < 0.05 * found["own"],
        f"{found['other']:,} of {found['own']:,} in {LONG_TALKS} conversations, {equal} answers "
        f"equal; control (without `--blocks`) {found['control']}",
    )


# --- the tool -------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[Place], Iterator[Figure]]] = {
    "kept": kept,
    "moved": moved,
    "killed": killed,
    "takeover": takeover,
    "first-token": first_token,
    "rate": rate,
    "reused": reused,
}


def main() -> None:
    """Measure what is chosen, and print a table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip().split("\n\n")[0],
        epilog='Example: make fleet-numbers ARGS="--only kept --only moved"',
    )
    parser.add_argument("--only", action="append", choices=list(FIGURES), help="may be repeated")
    parser.add_argument(
        "--check-s",
        type=int,
        default=1,
        help="how long HAProxy waits for an answer to a health check; a busy machine needs more "
        "than the second of fleet.cfg",
    )
    parser.add_argument("--patience-s", type=float, default=120.0, help="for a server that starts")
    given = parser.parse_args()
    subprocess_server.DEADLINE_S = given.patience_s
    os.environ["CAIRN_CONFIG"] = os.devnull
    missed = False
    print("| figure | value | goal | | made of |\n| --- | --- | --- | --- | --- |", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="cairn-fleet-") as folder,
        running_postgres(DURABLE, port=free_port()) as postgres,
    ):
        os.environ["CAIRN_CACHE_DIR"] = folder  # each model is tested once
        place = Place(postgres, Path(folder), given.check_s)
        for name in given.only or FIGURES:
            try:
                for figure in FIGURES[name](place):
                    print(figure.row(), flush=True)
                    missed |= not figure.is_reached
            except Failed as error:
                print(f"{name} was not measured: {error}", file=sys.stderr)
                sys.exit(_REFUSED)
    if missed:
        sys.exit(_MISSED)


if __name__ == "__main__":
    main()
