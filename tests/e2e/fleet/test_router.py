"""HAProxy with docs/how-to/fleet.cfg: which node a request goes to, and what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from tests.support.processes.haproxy import (
    CONFIGURATION,
    Node,
    installed,
    running_haproxy,
    running_node,
)
from tests.support.processes.subprocess_server import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not installed(), reason="HAProxy is not installed"),
]

Request = tuple[str, dict[str, Any], dict[str, str]]  # path, body, headers
TURNS, CONVERSATIONS = 3, 6
CHECK_S = 5
LONGEST_WAIT_S = 5.0
"""How long a request waits at most for a node that hangs, with the numbers of the file."""
SYSTEM = "You are brief. " * 2000


@attrs.frozen
class Fleet:
    """A router with a client of it, and two nodes that stand in for servers."""

    client: httpx.Client
    nodes: dict[str, Node]

    def ask(self, request: Request) -> httpx.Response:
        """Send a request to the router."""
        path, body, headers = request
        return self.client.post(path, json=body, headers=headers)

    def node_of(self, request: Request) -> str:
        """Send a request; the node that answered it."""
        answer = self.ask(request)
        assert 200 == answer.status_code, answer.text
        named: str = answer.json()["node"]
        return named

    def asked(self, path: str) -> int:
        """How often nodes got a request for a path."""
        return sum(node.asked.count(path) for node in self.nodes.values())


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A router over two nodes that are well."""
    with (
        running_node("n1") as one,
        running_node("n2") as two,
        # A node that is well may take longer than a second on a machine that runs other tests.
        running_haproxy(
            tmp_path, {"n1": one.address, "n2": two.address}, check_s=CHECK_S
        ) as router,
        httpx.Client(base_url=router.url, timeout=60) as client,
    ):
        yield Fleet(client, {"n1": one, "n2": two})


def message(role: str, text: str, blocks: bool) -> dict[str, Any]:
    """A message whose content is a string, or a list of blocks."""
    return {"role": role, "content": [{"type": "text", "text": text}] if blocks else text}


def chat(number: int, turn: int, *, blocks: bool = False, system: str | None = SYSTEM) -> Any:
    """A conversation at a turn, as a list of messages."""
    first = [] if system is None else [message("system", system, blocks)]
    for n in range(turn):
        first += [message("user", f"question {n} of {number}", blocks)]
        first += [message("assistant", f"answer {n} of {number}", blocks)]
    return [*first, message("user", f"question {turn} of {number}", blocks)]


def by_header(name: str) -> Callable[[int, int], Request]:
    """Requests with equal bodies, which a header tells apart."""
    return lambda number, turn: (
        "/v1/chat/completions",
        {"messages": chat(0, turn)},
        {name: f"session {number}"},
    )


def by_field(name: str) -> Callable[[int, int], Request]:
    """Requests with equal messages, which a field of the body tells apart."""

    def made(number: int, turn: int) -> Request:
        key = f"user_{'a' * 80}_session_{number}"  # Claude Code's differ only at the end
        fields = {"metadata": {"user_id": key}} if name == "metadata.user_id" else {name: key}
        return "/v1/messages", {**fields, "messages": chat(0, turn)}, {}

    return made


def by_words(path: str, *, blocks: bool, system: bool) -> Callable[[int, int], Request]:
    """Requests without any key."""

    def made(number: int, turn: int) -> Request:
        if path == "/v1/completions":
            return path, {"prompt": f"text {number}"}, {}
        if path == "/v1/chat/completions":
            messages = chat(number, turn, blocks=blocks, system=SYSTEM if system else None)
            return path, {"messages": messages}, {}
        messages = chat(number, turn, blocks=blocks, system=None)
        if path == "/v1/responses":
            own = {"instructions": SYSTEM} if system else {}
            first = f"text {number}" if not (blocks or turn) else messages
            return path, {**own, "input": messages if blocks else first}, {}
        whole: Any = [{"type": "text", "text": SYSTEM}] if blocks else SYSTEM
        return path, {**({"system": whole} if system else {}), "messages": messages}, {}

    return made


HEADERS = ["x-claude-code-session-id", "x-session-id", "session-id"]
FIELDS = ["session_id", "prompt_cache_key", "metadata.user_id"]
CASES = [
    *((name, by_header(name)) for name in HEADERS),
    *((name, by_field(name)) for name in FIELDS),
    *(
        (f"{path} {blocks=} {system=}", by_words(path, blocks=blocks, system=system))
        for path in ("/v1/chat/completions", "/v1/messages")
        for blocks in (False, True)
        for system in (False, True)
    ),
    ("responses in blocks", by_words("/v1/responses", blocks=True, system=True)),
    ("completions", by_words("/v1/completions", blocks=False, system=False)),
]


def test_later_turns_stay_with_their_node(fleet: Fleet):
    """
    All turns of a conversation go to the node of its first one, by whatever it is known, and the
    conversations are spread over the nodes.
    """
    for name, made in CASES:
        first = [fleet.node_of(made(number, 0)) for number in range(CONVERSATIONS)]
        assert {"n1", "n2"} == set(first), name
        for turn in range(1, TURNS):
            later = [fleet.node_of(made(number, turn)) for number in range(CONVERSATIONS)]
            assert first == later, (name, turn)


def test_the_first_key_counts(fleet: Fleet):
    """A header counts more than a field, and a field more than the words."""
    one = ("/v1/chat/completions", {"messages": chat(1, 0)}, {"x-session-id": "one"})
    node = fleet.node_of(one)
    for number in range(2, 8):
        other = {"session_id": f"s{number}", "messages": chat(number, 0)}
        assert node == fleet.node_of((one[0], other, one[2]))


def test_without_any_key(fleet: Fleet):
    """Requests that say nothing are spread."""
    assert {"n1", "n2"} == {fleet.node_of(("/v1/embeddings", {}, {})) for _ in range(6)}


def test_what_one_node_has(fleet: Fleet):
    """A response or an agent is asked of the node that its id names, and of no other."""
    for node in ("n1", "n2"):
        for path in (
            f"/v1/responses/resp_{node}.0d1e",
            f"/v1/agents/{node}.notes",
            f"/v1/agents/{node}.notes/generate",
        ):
            assert [node] * 3 == [fleet.node_of((path, {}, {})) for _ in range(3)], path
        body = {"previous_response_id": f"resp_{node}.0d1e", "input": "And?"}
        assert [node] * 3 == [fleet.node_of(("/v1/responses", body, {})) for _ in range(3)]
    # An id without a node, or with one that there is not, may be anywhere.
    for path in ("/v1/responses/resp_0d1e", "/v1/agents/notes", "/v1/agents/n9.notes"):
        assert 200 == fleet.ask((path, {}, {})).status_code


def answered(fleet: Fleet, path: str) -> bool:
    """Whether a request gets an answer, and not an error of the router."""
    try:
        status = fleet.ask((path, {}, {})).status_code
    except httpx.RemoteProtocolError:
        return False  # as HAProxy ends a connection on which it has answered before
    assert status in (200, 502)
    return status == 200


def test_a_node_that_drops_requests(fleet: Fleet):
    """
    A turn of a chat goes to another node, without an error for its client. One to an agent is sent
    once, because a second one might be kept too.
    """
    fleet.nodes["n1"].fault = "drops"
    made = by_words("/v1/chat/completions", blocks=False, system=True)
    assert {"n2"} == {fleet.node_of(made(number, 0)) for number in range(6)}
    assert fleet.nodes["n1"].asked
    path = "/v1/agents/n1.notes/generate"
    assert not answered(fleet, path)
    assert 1 == fleet.asked(path)
    assert {True, False} == {answered(fleet, "/v1/agents") for _ in range(6)}
    assert 6 == fleet.asked("/v1/agents")


def test_a_node_that_refuses(fleet: Fleet):
    """A 503 of a node, whose journal stalls perhaps, is not the client's if another answers."""
    fleet.nodes["n1"].fault = "refuses"
    made = by_words("/v1/messages", blocks=True, system=True)
    assert {"n2"} == {fleet.node_of(made(number, 0)) for number in range(6)}
    assert 503 == fleet.ask(("/v1/agents/n1.notes", {}, {})).status_code
    assert 1 == fleet.asked("/v1/agents/n1.notes")


def check_error(answer: httpx.Response, status: int, kind: str, code: str) -> None:
    """An error of the router has the form of a node's, and says when to try again."""
    assert (status, "2") == (answer.status_code, answer.headers["retry-after"])
    assert "application/json" == answer.headers["content-type"]
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert (kind, code) == (error["type"], error["code"])


def test_errors_of_the_router(tmp_path: Path):
    """A node that is down, drops a request or takes too long is an error that clients can read."""
    with running_node("n1") as one, running_node("n2") as two:
        nodes = {"n1": one.address, "n2": two.address}
        # Checks of a node that hangs fail after its request has.
        with running_haproxy(tmp_path, nodes, check_s=2 * CHECK_S, server_s=1) as router:
            path = f"{router.url}/v1/agents/n1.notes"
            one.fault = "drops"
            answer = httpx.post(path, json={}, timeout=60)
            check_error(answer, 502, "internal_error", "node_failed")
            one.fault = "hangs"
            answer = httpx.post(path, json={}, timeout=60)
            check_error(answer, 504, "timeout_error", "node_timed_out")
            eventually(lambda: httpx.post(path, json={}, timeout=60).status_code == 503)
            answer = httpx.post(path, json={}, timeout=60)
            check_error(answer, 503, "overloaded_error", "node_down")


def test_how_long_a_request_waits():
    """
    The numbers of the file bound how long a node that hangs keeps a request: until the next check,
    and then as many checks as may fail, each with the time that it may take.
    """
    text = CONFIGURATION.read_text(encoding="utf-8")
    numbers = re.search(r"timeout check (\d+)s.*check inter (\d+)s fall (\d+) ", text, re.DOTALL)
    assert numbers is not None
    check_s, inter_s, fall = map(int, numbers.groups())
    assert inter_s + fall * check_s + (fall - 1) * inter_s <= LONGEST_WAIT_S
    assert "on-marked-down shutdown-sessions" in text


def test_a_node_that_hangs(fleet: Fleet):
    """A request that it has is answered by another node, once it misses two health checks."""
    fleet.nodes["n1"].fault = "hangs"
    made = by_header("x-session-id")
    assert {"n2"} == {fleet.node_of(made(number, 0)) for number in range(4)}
    down: Request = ("/v1/agents/n1.notes", {}, {})
    eventually(lambda: 503 == fleet.ask(down).status_code)
    fleet.nodes["n1"].fault = "none"
    fleet.nodes["n1"].awake.set()
    eventually(lambda: 200 == fleet.ask(down).status_code)
