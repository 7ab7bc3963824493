"""
A server in a separate process, and clients for it.

``started`` runs `ops serve` on a free loopback port and yields a ``Serving``. The server is killed
by its process id when the context ends, and on Linux also when this process dies.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import attrs
import httpx
import openai
from click.testing import CliRunner

from cairn.actors.journal_keys import read_keys
from cairn.journal import events as ev
from cairn.journal.rows.codec import decode
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store_sql import SqlStore
from cairn.ops.cli import ops
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import log_path
from tests.support.journals import released
from tests.support.processes.child_process import die_with_parent, server_environment
from tests.support.processes.forked_server import ForkedProcess, forking

T = TypeVar("T")
E = TypeVar("E", bound=ev.Event)

DEADLINE_S = 120.0
"""How long to wait for something that must happen. No test asserts how long it took."""

_COMMAND = (sys.executable, "-P", "-m", "cairn.ops")
Process: TypeAlias = subprocess.Popen[str] | ForkedProcess
_URL = re.compile(r"http://127\.0\.0\.1:\d+")


# --- servers -----------------------------------------------------------------------------------


class Serving:
    """A server at ``url`` with the data directory ``data_dir``."""

    def __init__(self, process: Process, data_dir: Path, url: str, log: Path) -> None:
        self.process = process
        self._log = log
        # Kept, because creating a client takes longer than a request.
        self._http = httpx.Client(base_url=url, verify=False, timeout=DEADLINE_S)
        self._client: openai.OpenAI | None = None
        self._key = "none"
        self.data_dir = data_dir
        self.url = url

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        """The address on which it listens."""
        address = urlsplit(self.url)
        assert address.hostname is not None
        assert address.port is not None
        return address.hostname, address.port

    @property
    def running(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None

    def use_key(self, key: str) -> None:
        """Send an API key with all further requests."""
        self._key = key
        self._http.headers["authorization"] = f"Bearer {key}"
        self._client = None

    def client(self, **options: Any) -> openai.OpenAI:
        """The OpenAI client, by default without retries."""
        settings: dict[str, Any] = {"api_key": self._key, "max_retries": 0, "timeout": DEADLINE_S}
        return openai.OpenAI(base_url=f"{self.url}/v1", **settings | options)

    def ask(self, **body: Any) -> Answer:
        """Send a request with the OpenAI client that is kept."""
        self._client = self._client or self.client()
        return answer_of(self._client.chat.completions.create(**split(body)))

    def post(self, **body: Any) -> httpx.Response:
        """Request a chat completion with a plain HTTP client, and return the response."""
        return self._http.post("/v1/chat/completions", json=body)

    def send(self, body: bytes, **headers: str) -> httpx.Response:
        """Request a chat completion with a raw body. Header names have underscores."""
        named = {
            name.replace("_", "-").encode(): value.encode("latin-1")
            for name, value in headers.items()
        }
        return self._http.post("/v1/chat/completions", content=body, headers=named)

    def metrics(self) -> str:
        """The server's metrics, as Prometheus reads them."""
        return self._http.get("/metrics").text

    def health(self) -> dict[str, Any]:
        """The server's health report."""
        found: dict[str, Any] = self._http.get("/health").json()
        return found

    def wait_idle(self) -> dict[str, Any]:
        """Wait until no request is open and no session is working; return the health then."""
        busy = ("restoring", "prefilling", "decoding", "settling")

        def found() -> dict[str, Any] | None:
            health = self.health()
            is_open = any(health["queue"].values())
            return None if is_open or any(health["sessions"].get(b) for b in busy) else health

        return eventually(found)

    def settled(self) -> dict[str, Any]:
        """
        Wait until all sessions are idle and their events are in the journal; return the health.
        """
        self.wait_idle()
        # The last row is not enough: other idle sessions may release their slabs at any time.
        eventually(lambda: not self._unsettled())
        return self.health()

    def _unsettled(self) -> set[str]:
        """The sessions that have an open request according to the journal."""
        busy = set()
        for place in self.recorded():
            match place.event:
                case ev.RequestReceived(session=session):
                    busy.add(session)
                case ev.SessionSettled(session=session) | ev.SessionQuarantined(session=session):
                    busy.discard(session)
                case _:
                    pass
        return busy

    def queued(self, count: int) -> None:
        """Wait until ``count`` requests are queued."""
        eventually(lambda: self.health()["queue"]["queued"] == count)

    def open_files(self) -> int:
        """The number of open file descriptors; 0 if the system does not report it."""
        held = Path(f"/proc/{self.pid}/fd")
        return sum(1 for _ in held.iterdir()) if held.exists() else 0

    def greeting(self) -> str:
        """The startup banner without the address, with all settings. Can be read once."""
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("  journal "):
            lines.append(self.process.stdout.readline())
        return "".join(lines)

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process to end. Returns the exit code, 128 + N after signal N."""
        code = self.process.wait(DEADLINE_S)
        if code == -signal.SIGABRT:
            print(self.stderr())  # an unexpected end: print what is known
        return 128 - code if code < 0 else code

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Send SIGKILL: the process gets no chance to clean up."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def stderr(self) -> str:
        """The stderr output so far."""
        return self._log.read_text(encoding="utf-8")

    def log(self) -> list[dict[str, Any]]:
        """The lines of its log file so far."""
        text = log_path(self.data_dir).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def recorded(self) -> list[ev.Recorded]:
        """The journal's events with their positions."""
        return recorded(self.data_dir)

    def position(self) -> int:
        """The journal's last position."""
        found: int = self.health()["journal_position"]
        return found

    def requests(self, *, after: int) -> list[ev.Event]:
        """
        The events of requests after a position. Other events are left out, such as those of
        earlier sessions that give up their slabs in the meantime.
        """
        found = (place.event for place in self.recorded() if place.position > after)
        return [event for event in found if getattr(event, "request", None) is not None]

    def events(self, kind: type[E], *, after: int = 0, **fields: Any) -> list[E]:
        """The journal's events of one kind after a position, with these field values."""
        found = (place.event for place in self.recorded() if place.position > after)
        return [
            event
            for event in found
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def released(self, request: str) -> tuple[str, int]:
        """The text that was released for a request, and the number of its tokens."""
        return released((place.event for place in self.recorded()), request)


@contextlib.contextmanager
def reading(data_dir: Path, journal: str | None = None) -> Iterator[SqlStore]:
    """The journal of a data directory, which a server may be writing, with its keys."""
    url = journal or journal_url(data_dir)
    keys = read_keys(HeadFiles.of(data_dir, journal).keys, url)
    try:
        store = SqlStore.open(url, read_only=True, keys=keys)
        with contextlib.closing(store):
            yield store
    finally:
        if keys is not None:
            keys.close()


def recorded(data_dir: Path, journal: str | None = None) -> list[ev.Recorded]:
    """The events of a data directory's journal, which a server may be writing."""
    with reading(data_dir, journal) as store:
        return [decode(row) for row in store.read()]


def run_ops(*arguments: object, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run an `ops` command to its end; returns exit code, stdout and stderr."""
    done = subprocess.run(
        [*_COMMAND, *map(str, arguments)],
        env=server_environment(env),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        preexec_fn=die_with_parent,
    )
    return done.returncode, done.stdout, done.stderr


def assert_valid(data_dir: Path) -> None:
    """
    Assert that `ops verify` finds no violation, recorded or not, and that it checked all that was
    not forgotten. Runs in this process, because it does not need a server's environment and
    starting a process would take most of the time.
    """
    found = CliRunner().invoke(ops, ["verify", "--data-dir", str(data_dir)])
    forgotten = re.search(r"^not checked: [1-9]\d* rows \(forgotten\), 0 rows", found.output, re.M)
    assert (4 if forgotten else 0) == found.exit_code, found.output
    assert "broken: 0" in found.output.splitlines()


@contextlib.contextmanager
def started(
    data_dir: Path,
    *options: object,
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[Serving]:
    """
    A server with ``data_dir``. It is killed if it is still running when the context ends.

    Args:
        env: variables in addition to this process's environment.
        within: a command that executes the server's, to change its environment.
    """
    with _spawned(data_dir, options, env, within) as (process, log):
        yield Serving(process, data_dir, _url_of(process, log), log)


def killed_at(word: str, data_dir: Path, *options: object) -> None:
    """Start a server with ``data_dir``, and kill it once it has printed ``word`` during startup."""
    with _spawned(data_dir, options) as (process, log):
        _say(word, process, log)


def stopped_at(word: str, data_dir: Path, *options: object) -> tuple[int, str]:
    """
    Start a server with ``data_dir``, and interrupt it once it has printed ``word`` during startup.

    Returns:
        Its exit code and its output.
    """
    with _spawned(data_dir, options) as (process, log):
        _say(word, process, log)
        process.send_signal(signal.SIGINT)
        return process.wait(DEADLINE_S), log.read_text(encoding="utf-8")


def _say(word: str, process: Process, log: Path) -> None:
    def said() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return word in log.read_text(encoding="utf-8")

    eventually(said)


@contextlib.contextmanager
def _spawned(
    data_dir: Path,
    options: Sequence[object],
    env: Mapping[str, str] | None = None,
    within: Sequence[str] = (),
) -> Iterator[tuple[Process, Path]]:
    """A server's process, and the file with its stderr."""
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    log = data_dir.with_name(f"{data_dir.name}.{time.monotonic_ns()}.stderr")
    # Which answers are checked by default depends on their ids, which are random.
    always = ("--port", 0, "--data-dir", data_dir, "--shadow-check", 0, "--verbose")
    arguments = [str(one) for one in ("serve", *always, *options)]
    with log.open("w", encoding="utf-8") as stderr:
        process = _begun(arguments, env, stderr, within)
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def _begun(
    arguments: Sequence[str],
    env: Mapping[str, str] | None,
    stderr: IO[str],
    within: Sequence[str],
) -> Process:
    if env is None and not within and forking.can_fork(arguments):
        return forking.start(arguments, stderr)
    return subprocess.Popen(
        [*within, *_COMMAND, *arguments],
        env=server_environment(env),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=die_with_parent,
    )


def _url_of(process: Process, log: Path) -> str:
    """The address on the server's first line."""
    assert process.stdout is not None
    if select.select([process.stdout], [], [], DEADLINE_S)[0]:
        found = _URL.search(process.stdout.readline())
        if found is not None:
            return found[0]
    raise AssertionError(f"the server did not start:\n{log.read_text(encoding='utf-8')}")


def eventually(look: Callable[[], T | None]) -> T:
    """Poll until ``look`` returns something true; fail after the deadline."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


# --- clients -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Answer:
    """
    An answer as the client sees it.

    Attributes:
        text: without thoughts and calls.
        tokens: (bytes, log-probability) of each token.
        message: the message in the form in which it can be sent back.
    """

    text: str
    message: dict[str, Any] = attrs.field(repr=False)
    tokens: tuple[tuple[bytes, float], ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    session: str
    path: str
    reason: str | None
    seed: int

    @property
    def bits(self) -> tuple[Any, ...]:
        """What must be identical regardless of how the answer was computed."""
        said = self.text, self.thoughts, tuple(self.calls)
        return *said, self.tokens, self.finish_reason, self.completion_tokens

    @property
    def thoughts(self) -> str:
        """The thoughts; empty if there are none."""
        found: str = self.message.get("reasoning_content", "")
        return found

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each tool call."""
        functions = [call["function"] for call in self.message.get("tool_calls", ())]
        return [(function["name"], function["arguments"]) for function in functions]


def user(text: str) -> dict[str, str]:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """An assistant message."""
    return {"role": "assistant", "content": text}


_OURS = frozenset(
    {"cache_prompt", "enable_thinking", "min_p", "repetition_penalty", "session_id", "top_k"}
)


def split(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body as arguments of the OpenAI client, which takes unknown fields separately."""
    extra = {name: value for name, value in body.items() if name in _OURS}
    plain = {name: value for name, value in body.items() if name not in _OURS}
    return {"model": "any", **plain, "extra_body": extra}


PLAIN: Mapping[str, Any] = {"temperature": 0, "max_tokens": 24, "logprobs": True}
"""The defaults of a request: greedy, with log-probabilities."""


def ask(server: Serving, *messages: Mapping[str, str], **body: Any) -> Answer:
    """
    Send a request with the OpenAI client.

    Args:
        messages: alternatively, pass ``messages`` in the body.
    """
    return server.ask(**{"messages": list(messages), **PLAIN, **body})


def ask_with(client: openai.OpenAI, *messages: Mapping[str, str], **body: Any) -> Answer:
    """Like ``ask``, but with a given client."""
    asked = split({"messages": list(messages), **PLAIN, **body})
    return answer_of(client.chat.completions.create(**asked))


def answer_of(completion: Any) -> Answer:
    """A completion of the OpenAI client, as an answer."""
    (choice,) = completion.choices
    usage, cairn = completion.usage, completion.model_extra["cairn"]
    content = choice.logprobs.content if choice.logprobs else []
    return Answer(
        text=choice.message.content or "",
        message=choice.message.model_dump(exclude_none=True),
        tokens=tuple((bytes(token.bytes), token.logprob) for token in content),
        finish_reason=choice.finish_reason,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        session=cairn["session"],
        path=cairn["path"],
        reason=cairn["reason"],
        seed=cairn["seed"],
    )


class Listener:
    """
    A streaming client on a plain connection, in its own thread. Tests can watch it, and make it
    disconnect at any time.

    Attributes:
        status: the status of the response; None if there is none yet.
        comments: the lines that only keep the connection alive.
        chunks: the events so far.
        done: whether the stream ended regularly.
        ended: set when nothing more arrives.
    """

    def __init__(self, server: Serving, *messages: Mapping[str, str], **body: Any) -> None:
        self._body = json.dumps({"messages": list(messages), **PLAIN, "stream": True, **body})
        self._connection = http.client.HTTPConnection(*server.address)
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.comments: list[str] = []
        self.chunks: list[dict[str, Any]] = []
        self.refusal: dict[str, Any] | None = None
        self.done = False
        self.ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def request(self) -> str:
        """The id of the request, once a session has claimed it."""
        request: str = self.chunks[0]["id"].removeprefix("chatcmpl-")
        return request

    @property
    def text(self) -> str:
        """The answer so far."""
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(delta.get("content") or "" for delta in deltas)

    @property
    def tokens(self) -> tuple[tuple[bytes, float], ...]:
        """(bytes, log-probability) of each token so far."""
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        found = [token for c in choices if c["logprobs"] for token in c["logprobs"]["content"]]
        return tuple((bytes(token["bytes"]), token["logprob"]) for token in found)

    @property
    def finish_reason(self) -> str | None:
        """The finish reason; None if the client received none."""
        reasons = [c["finish_reason"] for k in self.chunks for c in k.get("choices", ())]
        return next((reason for reason in reasons if reason), None)

    @property
    def error(self) -> dict[str, Any] | None:
        """The error in the middle of the stream, if there was one."""
        return next((chunk["error"] for chunk in self.chunks if "error" in chunk), None)

    def until(self, fact: Callable[[Listener], object]) -> Listener:
        """
        Wait until ``fact`` is true. Fails if the stream ends before that.
        """

        def look() -> bool:
            over = self.ended.is_set()
            found = bool(fact(self))
            assert found or not over, (
                f"the stream ended before that: {self.status} {self.refusal} {self.chunks[-1:]}"
            )
            return found

        eventually(look)
        return self

    def accepted(self) -> Listener:
        """Wait until a session has claimed the request."""
        return self.until(lambda it: it.chunks)

    def decoding(self, tokens: int = 3) -> Listener:
        """Wait until this many tokens of the answer have arrived."""
        return self.until(lambda it: len(it.tokens) >= tokens)

    def end(self) -> Listener:
        """Wait until the stream has ended."""
        assert self.ended.wait(DEADLINE_S), "the stream did not end"
        return self

    def leave(self) -> None:
        """Disconnect."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.end()

    def _listen(self) -> None:
        try:
            headers = {"content-type": "application/json"}
            self._connection.request(
                "POST", "/v1/chat/completions", body=self._body, headers=headers
            )
            with self._connection.getresponse() as response:
                self.headers = {name.lower(): value for name, value in response.getheaders()}
                self.status = response.status
                if response.status == 200:
                    self._follow(response)
                else:
                    self.refusal = json.loads(response.read())
        except (OSError, http.client.HTTPException):
            pass  # the server or the client disconnected; what has arrived is kept
        finally:
            self._connection.close()
            self._socket.close()
            self.ended.set()

    def _follow(self, response: http.client.HTTPResponse) -> None:
        while (line := response.readline()).endswith(b"\n"):
            if line.startswith(b":"):
                self.comments.append(line.decode().strip())
            elif line == b"data: [DONE]\n":
                self.done = True
            elif line.startswith(b"data: "):
                self.chunks.append(json.loads(line.removeprefix(b"data: ")))


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls at the same time, each in its own thread; returns their results in order."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def make(place: int, call: Callable[[], T]) -> None:
        try:
            results[place] = call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make, args=item, daemon=True) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if failures:
        raise failures[0]
    return [results[place] for place in range(len(calls))]
