"""
Many requests that are almost right, against a whole server: each is answered or refused in its
form, and leaves nothing running or open.

`make fuzz` runs ten thousand, different ones each time; the tests run the same few hundred.
"""

from __future__ import annotations

import collections
import copy
import json
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import httpx
import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cairn.actors.boot import booted
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Statistics
from cairn.actors.server import Server
from cairn.http.app import create_app
from cairn.http.server.listen import bind_socket, serve_http
from cairn.journal.replay import Replay
from cairn.journal.rows.database.schema import migrate
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from tests.http.wire.bad_bodies import IMAGE, nested
from tests.support import in_process_server as running

T = TypeVar("T")

EXAMPLES = int(os.environ.get("CAIRN_FUZZ_EXAMPLES", "0"))
CHAT = "/v1/chat/completions"


# --- a server in a thread ------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Fuzzed:
    """A server whose internal state can be read from other threads."""

    server: Server
    url: str
    store: SqlStore
    token: trio.lowlevel.TrioToken

    def inside(self, look: Callable[[], Awaitable[T]]) -> T:
        """Call a function in the server's own thread."""
        return trio.from_thread.run(look, trio_token=self.token)

    def wait_idle(self) -> None:
        """Wait until no request is open and no session works."""

        async def rest() -> None:
            with trio.fail_after(60):
                while is_busy(self.server.statistics()):  # noqa: ASYNC110 - polled from outside
                    await trio.sleep(0.001)

        self.inside(rest)

    def tasks(self) -> collections.Counter[str]:
        """The names of all tasks."""

        async def count() -> collections.Counter[str]:
            return collections.Counter(task.name for task in every_task())

        return self.inside(count)

    def measured(self) -> tuple[int, int]:
        """The slabs and their bytes, counted by the engine on its own arrays."""

        async def measure() -> tuple[int, int]:
            def pool(engine: Any) -> tuple[int, int]:
                return engine.pool.measure()

            return await self.server.loaded.engine.call(pool, lambda found: found)

        return self.inside(measure)


def is_busy(now: Statistics) -> bool:
    """Whether a request is open or a session works."""
    return bool(now.queued or now.running or set(now.sessions) - {"idle"})


def every_task() -> Iterator[trio.lowlevel.Task]:
    """All tasks of this run of trio."""
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        if task is not None:
            yield task
            waiting += [child for room in task.child_nurseries for child in room.child_tasks]


def where(task: trio.lowlevel.Task) -> str:
    """Where a task and its children wait."""
    frames = [
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in task.iter_await_frames()
    ]
    below = [where(child) for room in task.child_nurseries for child in room.child_tasks]
    return "\n".join([task.name, *(f"    {frame}" for frame in frames), *below])


@contextmanager
def fuzzed(model_directory: Path, home: Path) -> Iterator[Fuzzed]:
    """A server with a short context, few slabs and few sessions, over a journal on disk."""
    url = journal_url(home)
    migrate(url)
    store = SqlStore.open(url)
    ready: queue.SimpleQueue[Fuzzed | BaseException] = queue.SimpleQueue()
    stop: list[Callable[[], None]] = []

    async def main() -> None:
        shutdown = trio.Event()
        stop.append(shutdown.set)
        small = running.settings(
            model_directory,
            pool_bytes=running.MIB,
            pool_slabs=4,
            blocks_bytes=running.MIB,
            limits=Limits(sessions=8, max_tokens=4),
        )
        async with booted(small, store, running.SECRET) as server:

            def served(url: str) -> None:
                token = trio.lowlevel.current_trio_token()
                ready.put(Fuzzed(server=server, url=url, store=store, token=token))

            app, listener = create_app(server), bind_socket("127.0.0.1", 0)
            await serve_http(
                app, listener, shutdown=shutdown, on_ready=served, on_stop=app.streams.stop
            )

    def run() -> None:
        try:
            trio.run(main)
        except BaseException as error:
            ready.put(error)
            raise

    thread = threading.Thread(target=run, name="fuzzed")
    thread.start()
    found = ready.get(timeout=120)
    if isinstance(found, BaseException):
        raise found
    try:
        yield found
    finally:
        found.token.run_sync_soon(stop[0])
        thread.join(120)
        assert not thread.is_alive()
        store.close()


# --- requests ------------------------------------------------------------------------------------

WORDS = (
    "Hello",
    "",
    " ",
    "stone " * 20,
    "The stone lies on the path. " * 60,
    "<|im_end|>\n<|im_start|>system\n",
    "<think>x</think>y",
    "<tool_response>",
    "{{ messages }}{% for x in y %}",
    "\0",
    "\ud800",
    "\ufeff\u2028\ufffe\U0010ffff",
    "e\u0301" * 30,
    "-1",
    "NaN",
    "text",
    "user",
)
texts = st.sampled_from(WORDS) | st.text(max_size=40)
EXTREMES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    20,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    [None],
    [[]] * 3,
    [""] * 5,
    nested(70),
    nested(300),
    {"a": {"a": {}}},
    {"type": "text"},
    {"type": "text", "text": "x"},
    [{"type": "text", "text": "x"}, {"type": "refusal", "refusal": "no"}],
    [IMAGE],
    {"role": "user", "content": "x"},
    {"function": {"name": "f", "arguments": "{"}},
    {"name": "f"},
)
values = (
    st.sampled_from(EXTREMES)
    | texts
    | st.integers()
    | st.floats()
    | st.recursive(
        st.none() | st.booleans() | st.integers() | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=6,
    )
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "s", "strict": True, "schema": {"type": "array", "maxItems": 3}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
messages = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, texts),
    st.builds(lambda text: {"role": "system", "content": text}, texts),
    st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, texts),
    st.builds(
        lambda text: {"role": "assistant", "content": text, "reasoning_content": "Hm."}, texts
    ),
    st.just({"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}),
    st.just({"role": "tool", "content": "3 kg", "tool_call_id": "c", "name": "f"}),
)
optional: dict[str, st.SearchStrategy[Any]] = {
    "model": texts,
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 10**6),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 600).map(str), st.floats(-100, 100), max_size=4),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "max_completion_tokens": st.integers(1, 6),
    "stop": texts | st.lists(texts, max_size=4),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "n": st.just(1),
    "tools": st.just([TOOL, TOOL]),
    "tool_choice": st.sampled_from(["auto", "none", "required", NAMED]),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, STRICT]),
    "chat_template_kwargs": st.dictionaries(texts, values, max_size=2),
    "enable_thinking": st.booleans(),
    "cache_prompt": st.booleans(),
    "cache_mode": st.sampled_from(["full", "prefix"]),
    "session_id": st.sampled_from(["one", "two/2", "dreißig"]),
    "user": texts,
}
header_text = st.text(
    st.characters(min_codepoint=33, max_codepoint=255, exclude_characters="\x7f"), max_size=20
)
headers = st.dictionaries(
    st.sampled_from(
        [
            "x-session-id",
            "x-claude-code-session-id",
            "content-type",
            "accept",
            "cookie",
            "authorization",
            "content-encoding",
            "origin",
            "range",
            "x-forwarded-host",
        ]
    ),
    header_text,
    max_size=2,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place within a value, as a container and a key."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item))
        found += [(item, key) for key in keys]
        waiting += [item[key] for key in keys if isinstance(item[key], dict | list)]
    return found


def changed(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Change a body at one place."""
    there = places(body)
    if not there:
        return
    holder, key = draw(st.sampled_from(there))
    how = draw(st.sampled_from(["other", "other", "gone", "twice", "within", "renamed", "text"]))
    if how == "gone":
        del holder[key]
    elif how == "twice" and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * draw(st.sampled_from([1, 2, 40]))
    elif how == "within":
        holder[key] = draw(st.sampled_from([[holder[key]], {"a": holder[key]}, str(holder[key])]))
    elif how == "renamed" and isinstance(holder, dict):
        holder[draw(texts)] = holder.pop(key)
    elif how == "text" and isinstance(holder[key], str):
        holder[key] = draw(texts)
    else:
        holder[key] = copy.deepcopy(draw(values))


def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes with a mistake in them."""
    place = draw(st.integers(0, len(body)))
    match draw(st.sampled_from(["cut", "in", "over", "bom", "utf-16", "twice", "gone"])):
        case "cut":
            return body[:place]
        case "in":
            return body[:place] + draw(st.binary(min_size=1, max_size=4)) + body[place:]
        case "over":
            return body[:place] + draw(st.binary(min_size=1, max_size=1)) + body[place + 1 :]
        case "bom":
            return b"\xef\xbb\xbf" + body
        case "utf-16":
            return body.decode("utf-8", "replace").encode("utf-16")
        case "twice":
            return body + body
        case _:
            return b""


@attrs.frozen(kw_only=True)
class Asked:
    """A client's request: its body, its headers, and whether it waits for the answer."""

    body: bytes
    headers: dict[str, str]
    stays: bool = True


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    """A good request with no mistakes or some."""
    body: dict[str, Any] = {
        "messages": draw(st.lists(messages, min_size=1, max_size=4)),
        "max_tokens": draw(st.integers(1, 4)),
    }
    for name in draw(st.lists(st.sampled_from(list(optional)), max_size=4, unique=True)):
        body[name] = draw(optional[name])
    body = copy.deepcopy(body)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        changed(draw, body)
    written = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        written = damaged(draw, written)
    return Asked(body=written, headers=draw(headers), stays=draw(st.integers(0, 5)) > 0)


# --- answers -------------------------------------------------------------------------------------

STATUSES = {200, 400, 403, 413, 415}
"""The statuses that a single client with one request at a time can get."""


def assert_envelope(answer: Any) -> None:
    """Assert that an error is one of the client's, as OpenAI's clients read it."""
    assert {"error"} == answer.keys()
    error = answer["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert "invalid_request_error" == error["type"]
    assert error["message"]
    assert error["code"]


def assert_stream(lines: list[str]) -> None:
    """Assert that the events are complete, and that the stream has an end."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert "[DONE]" == events[-1]
    chunks = [json.loads(event) for event in events[:-1]]
    assert {"chat.completion.chunk"} == {chunk["object"] for chunk in chunks}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reasons[-1]] == [reason for reason in reasons if reason]


def answered(client: httpx.Client, asked: Asked) -> int:
    """Send a request, and check the form of the answer; returns the status."""
    sent = {name: value.encode("latin-1") for name, value in asked.headers.items()}
    named = [(name.encode(), value) for name, value in sent.items()]
    with client.stream("POST", CHAT, content=asked.body, headers=named) as response:
        is_stream = response.headers["content-type"].startswith("text/event-stream")
        assert response.status_code in STATUSES, response.read()
        if not asked.stays:
            return response.status_code
        if response.status_code != 200:
            response.read()
            assert_envelope(response.json())
        elif is_stream:
            assert_stream(list(response.iter_lines()))
        else:
            response.read()
            assert "chat.completion" == response.json()["object"]
    return response.status_code


def open_files() -> int:
    """How many descriptors this process has open."""
    return sum(1 for _ in Path("/dev/fd").iterdir())


CONNECTION = "trio._highlevel_serve_listeners._run_handler"
"""The task of a connection; its other tasks are children of this one."""

GOOD = Asked(body=b'{"messages":[{"role":"user","content":"Hello"}],"max_tokens":4}', headers={})


@pytest.mark.slow
@pytest.mark.timeout(0 if EXAMPLES else 300)
@pytest.mark.parametrize("examples", [EXAMPLES or 60, pytest.param(250, marks=pytest.mark.long)])
def test_requests_that_are_almost_right(model_directory: Path, tmp_path: Path, examples: int):
    """There is no server error, no endless wait, and no leaked task, slab or file."""
    profile = settings(
        max_examples=examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    counted: collections.Counter[int] = collections.Counter()
    with fuzzed(model_directory, tmp_path) as it:
        with httpx.Client(base_url=it.url, timeout=60) as client:
            answered(client, GOOD)
            it.wait_idle()
        tasks, files = settled(it)

        with httpx.Client(base_url=it.url, timeout=60) as client:

            @profile
            @given(requests())
            @example(GOOD)
            def one(asked: Asked) -> None:
                counted[answered(client, asked)] += 1
                it.wait_idle()

            one()
            assert 200 == answered(client, GOOD)
            it.wait_idle()

        now = it.server.statistics()
        assert (0, None) == (now.bugs, now.admission_bug)
        assert (now.slabs, now.slab_bytes) == it.measured()
        assert now.slabs <= now.sessions["idle"] <= 8
        assert (tasks, files) == settled(it)
    fold, store = Replay(), SqlStore.open(journal_url(tmp_path), read_only=True)
    for row in store.read():
        fold.feed(row)
    store.close()
    assert () == tuple(fold.report().findings)
    assert not fold.state.requests
    # There were enough of each kind.
    print(dict(counted))
    share = sum(counted.values()) / 10
    assert share < counted[200]
    assert share < counted[400]


def settled(it: Fuzzed) -> tuple[collections.Counter[str], int]:
    """The tasks other than those of sessions, and the files, once the connections are closed."""

    async def closed() -> None:
        with trio.move_on_after(60):
            while left():  # noqa: ASYNC110 - polled from outside
                await trio.sleep(0.001)
        if left():  # in full: pytest shortens what it compares
            raise AssertionError("connections that stay:\n\n" + "\n\n".join(map(where, left())))

    def left() -> list[trio.lowlevel.Task]:
        return [task for task in every_task() if task.name == CONNECTION]

    it.inside(closed)
    tasks = it.tasks()
    del tasks["cairn.actors.sessions.registry.Sessions._run"]
    return tasks, open_files()
