"""
A small server of chat completions that can be broken on purpose.

It has no model: the tokens of an answer follow from a hash of the prompt. It counts words as
tokens, and keeps what it has seen as a cache would. Without a fault it passes every row of
``ops conform``; each fault breaks one thing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_BLOCK = 8
_CROWD = 4
_NEIGHBOUR_S = 1.5
_GATHERED_S = 60.0
_LONG = 100
_AHEAD, _AHEAD_USED = "cairn_prewarmed_tokens_total", "cairn_prewarmed_tokens_used_total"
_MIB = 1 << 20
_FEW = 5
_ROLES = ("system", "user", "assistant")


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Gone(Exception):
    """The client disconnected, or gets no answer."""


class Fake:
    """
    The state and the settings of the server.

    Args:
        fault: what is broken.
        hides: what it does not report: logprobs, usage, cached_tokens, stream_usage; or misses, if
            it reports cached_tokens for hits only.
        refuses: fields of a request that it answers with 400.
        ignores: fields that it accepts with any value, and ignores.
        lists_stops: whether it accepts stop texts in a list only.
        reuses: the most tokens of a prompt that it reuses.
        keeps: whether the cache survives a restart.
        sure: whether all tokens are almost certain.
        models: the names that it lists.
        key: the key that it requires.
        rests: how many requests get 503 after one with special tokens.
        ends_after: each answer ends after this many tokens, by a token that is only counted.
        prefill_s: the time of a prefill that is not cached, unless its client disconnects.
        settles: for this many requests for its health after an answer, a session is busy.
        holds: for this many requests for its health after an answer, a slab is held.
        meets: this many answers with log-probabilities wait for each other after their first token.
        queues: whether it answers one request after the other.
        tells_prefill: the number of steps in which a stream reports its prefill.
        counts: further counters of its metrics.
    """

    def __init__(
        self,
        fault: str = "",
        *,
        hides: Sequence[str] = (),
        refuses: Sequence[str] = (),
        ignores: Sequence[str] = (),
        lists_stops: bool = False,
        reuses: int = 1 << 20,
        keeps: bool = False,
        sure: bool = False,
        rests: int = 0,
        models: Sequence[str] = ("fake",),
        key: str | None = None,
        ends_after: int | None = None,
        prefill_s: float = 0.05,
        settles: int = 0,
        holds: int = 0,
        tells_prefill: int = 0,
        meets: int = 0,
        queues: bool = False,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self.fault = fault
        self.hides = frozenset(hides)
        self.refuses = frozenset(refuses)
        self.ignores = frozenset(ignores)
        self.lists_stops = lists_stops
        self.reuses = reuses
        self.keeps = keeps
        self.sure = sure
        self.rests = rests
        self.busy = 0
        self.models = models
        self.key = key
        self.ends_after = ends_after
        self.prefill_s = prefill_s
        self.settles = settles
        self.tells_prefill = tells_prefill
        self.meets = meets
        self.met = 0
        self.turn: Any = threading.Lock() if queues else contextlib.nullcontext()
        self.queues = queues
        self.counts = dict(counts or {})
        self.settling = 0
        self.holds = holds
        self.holding = 0
        self.seen: list[list[str]] = []
        self.halves: list[list[str]] = []
        self.last: list[str] = []
        self.restarts = 0
        self.served = 0
        self.asked = 0
        self.left = False
        self.dead = False
        self.active = 0
        self.crowds = 0
        self.at_once = 0
        self.gathered = 0
        self.changed = threading.Condition()
        self.over = threading.Event()

    def restart(self) -> None:
        """Forget all that was cached."""
        if not self.keeps:
            self.seen, self.halves, self.last = [], [], []
        self.dead = self.left = False
        self.restarts += 1

    @contextlib.contextmanager
    def gathering(self, requests: int) -> Iterator[None]:
        """This many requests are concurrent: none is answered before all have arrived."""
        self.at_once, self.gathered = requests, 0
        try:
            yield
        finally:
            self.at_once = 0

    def paused(self) -> None:
        """Called before each piece of a stream, to wait."""

    # --- what it tells of itself -----------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Its health: whether it is idle, and its budgets."""
        at_work, self.settling = self.settling, max(0, self.settling - 1)
        held, self.holding = self.holding, max(0, self.holding - 1)
        return {
            "block_tokens": _BLOCK,
            "queue": {"queued": 0, "running": 0},
            "sessions": {"settling": 1} if at_work else {"idle": 1},
            "pool": {"bytes_total": 8 * _MIB, "slabs": min(1, held)},
            "blocks": {"bytes_total": 8 * _MIB, "disk_bytes_total": 8 * _MIB},
        }

    def metrics(self) -> str:
        """Its metrics."""
        ahead = 8 * self.served
        held = self.served if self.fault == "KV has no bound" else 4
        broken = int(self.fault == "an invariant breaks" and self.served > _FEW)
        counts = {_AHEAD: ahead, _AHEAD_USED: ahead // 2, **self.counts}
        counted = "".join(f"{name} {float(value)}\n" for name, value in counts.items())
        return (
            f"# nothing\n{counted}"
            'cairn_cache_invariant_violations_total{kind="inv1"} 0.0\n'
            f'cairn_cache_invariant_violations_total{{kind="inv3"}} {broken}.0\n'
            f'cairn_scheduler_pool_bytes{{state="in_use"}} {4 * _MIB}.0\n'
            'cairn_scheduler_pool_bytes{state="free"} 1e+12\n'
            f"cairn_block_bytes {held * _MIB}.0\ncairn_disk_block_bytes {_MIB}.0\n"
        )

    def path(self, body: Mapping[str, Any], cached: int) -> str:
        """The path that it reports for a prompt."""
        lost = self.fault == "continuations are lost" and self.served % _FEW == 0
        goes_on = cached > 0 and len(body["messages"]) > 2 and not lost
        return "continuation" if goes_on else "new_session"

    def takes_s(self) -> float:
        """How long an answer takes, for clients without a clock."""
        aged = self.served if self.fault == "it grows slower" else 0
        return 0.1 + aged * 0.001

    # --- what an answer follows from -------------------------------------------------------------

    def check(self, body: Any) -> None:
        """Refuse invalid requests."""
        if not isinstance(body, dict):
            raise Refusal(400, "the body is no object")
        for name in self.refuses & body.keys():
            raise Refusal(400, f"{name} is not known here")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(400, "messages is no list of messages")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise Refusal(400, "a message has no text")
            if message.get("role") not in _ROLES and self.fault != "takes unknown roles":
                raise Refusal(400, f"there is no role {message.get('role')}")
        limits = {"temperature": 100, "top_p": 1, "max_tokens": 1 << 20}
        for name, most in limits.items():
            value = body.get(name, 1)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise Refusal(400, f"{name} is no number")
            if not 0 <= value <= most:
                raise Refusal(400, f"{name} is out of its limits")
        stops = list if self.lists_stops else str | list
        for name, kind in (("stream", bool), ("logprobs", bool), ("stop", stops)):
            if name in body.keys() - self.ignores and not isinstance(body[name], kind):
                raise Refusal(400, f"{name} is of another type")
        if len(words(body)) > 3000:
            raise Refusal(400, "the prompt is too long")

    def cached(self, prompt: list[str], body: Mapping[str, Any]) -> int:
        """How much of a prompt is reused."""
        if body.get("cache_prompt") is False:
            return 0
        longest = max((common(prompt, other) for other in self.seen), default=0)
        most = _BLOCK if self.fault == "little is reused" else self.reuses
        return min(longest, most, len(prompt) - 1) // _BLOCK * _BLOCK

    def tokens(self, body: Mapping[str, Any], cached: int, alone: bool) -> Iterator[Any]:
        """The tokens of an answer, each a text and its log-probability."""
        prompt = words(body)
        basis = "\n".join(prompt)
        if body.get("temperature", 1) and self.fault != "seeds are not looked at":
            basis += f"\nseed {body.get('seed')}"
        if body.get("temperature", 1) and self.fault == "no seed holds":
            basis += f"\n{self.served}"
        messages = body["messages"]
        astray = {
            "a hit has other words": cached > 0,
            "a hit of a part has other words": 0 < cached < len(prompt) - _BLOCK,
            "conversations go astray": cached > 0 and len(messages) > 2,
            "nothing is left to compute": cached > 0 and messages[-1]["role"] == "assistant",
            "a restart changes words": self.restarts > 0,
            "who leaves changes words": self.left,
            "half a prefill is reused": cached > 0
            and any(prompt[: len(half)] == half for half in self.halves),
        }
        if astray.get(self.fault):
            basis += "\nastray"
        if self.fault == "the last conversation leaks":
            basis += f"\n{self.last}"
        nudge = 0.0
        if (self.fault == "a hit has other bits" and cached > 0) or (
            self.fault == "neighbours change bits" and not alone
        ):
            nudge = 1e-12
        for place in range(1 << 20):
            digest = hashlib.sha256(f"{basis}\n{place}".encode(errors="replace")).digest()
            number = -1e-6 if self.sure else -digest[3] / 256 - 0.5
            yield f" {digest[:3].hex()}", number + nudge


def words(body: Mapping[str, Any]) -> list[str]:
    """The prompt as tokens, with the beginning of the answer."""
    found = []
    for message in body["messages"]:
        found += [f"<{message['role']}>", *message["content"].split(), "</>"]
    return [*found, "<assistant>"]


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many tokens two prompts have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    fake: Fake
    begun = False

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """The models, the health, the metrics, and a restart."""
        if self.path == "/restart":
            self.fake.restart()
            self._send(200, {})
        elif self.path == "/health":
            self._send(200, self.fake.health())
        elif self.path == "/metrics":
            self._plain(200, self.fake.metrics())
        elif self.path == "/v1/models":
            entries = [{"id": name, "max_model_len": 3000} for name in self.fake.models]
            self._send(200, {"object": "list", "data": entries})
        else:
            self._send(404, {"error": {"message": "nothing is here"}})

    def do_POST(self) -> None:
        """A chat completion."""
        fake = self.fake
        data = self.rfile.read(int(self.headers["content-length"]))
        with fake.changed:
            self.crowds_before = fake.crowds
            fake.active += 1
            fake.crowds += fake.active == _CROWD
            fake.changed.notify_all()
        try:
            self._serve(data)
        except Refusal as refusal:
            error: Any = {"message": str(refusal), "type": "invalid_request_error"}
            if fake.fault == "refuses without an envelope":
                error = str(refusal)
            self._send(refusal.status, {"error": error})
        except (Gone, OSError):
            fake.left = True
        finally:
            with fake.changed:
                fake.active -= 1

    def _serve(self, data: bytes) -> None:
        fake = self.fake
        if fake.key and self.headers["authorization"] != f"Bearer {fake.key}":
            raise Refusal(401, "there is no key")
        if fake.dead or (fake.left and fake.fault == "who leaves ends service"):
            raise Refusal(500, "out of service")
        if fake.left and fake.fault == "who leaves turns others away":
            raise Refusal(404, "out of service")
        if fake.busy:
            fake.busy -= 1
            raise Refusal(503, "no room")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            status = 500 if fake.fault == "fails at broken JSON" else 400
            raise Refusal(status, "no JSON") from error
        try:
            fake.check(body)
            fake.asked += 1
            if fake.fault == "some are turned away" and fake.asked % _FEW == 0:
                raise Refusal(503, "no room now")
        except Refusal:
            if fake.fault == "bad bodies end service":
                fake.dead = True
            raise
        self._odd(body["messages"][-1]["content"])
        with fake.turn:
            if fake.queues:
                self._left(0.05)  # so that the client of the one before has read its end
            self._answer({name: body[name] for name in body if name not in fake.ignores})

    def _odd(self, content: str) -> None:
        """The faults at odd prompts."""
        fault = self.fake.fault
        if not content.strip() and fault == "fails at white space":
            raise Refusal(500, "list index out of range")
        if max(map(len, content.split()), default=0) > 1000 and fault == "hangs at a long word":
            self.fake.over.wait()
        if "\ud800" in content and fault == "closes at a surrogate":
            raise Gone
        if "<|im_end|>" in content:
            self.fake.dead = fault == "special tokens end service"
            self.fake.busy = self.fake.rests
        if "\x00" in content and fault == "refuses in plain text":
            self._plain(400, "no")
            raise Gone

    def _answer(self, body: Mapping[str, Any]) -> None:
        fake = self.fake
        prompt = words(body)
        cached = fake.cached(prompt, body)
        stream = bool(body.get("stream"))
        beside = self._gather()
        alone = fake.fault != "neighbours change bits" or not (beside or self._accompanied())
        if stream and fake.tells_prefill and cached < len(prompt) - _BLOCK:
            self._tell_prefill(prompt)
        elif cached < len(prompt) - _BLOCK and self._left(fake.prefill_s):
            half = prompt[: len(prompt) // 2]
            fake.seen.append(half)
            fake.halves.append(half)
            raise Gone
        made = self._decoded(body, cached, alone)
        fake.seen += [prompt, [*prompt, *made["text"].split()]]
        fake.last = prompt
        fake.served += 1
        fake.settling = fake.settles
        fake.holding = fake.holds
        usage = self._usage(prompt, cached, made, stream=stream)
        logprobs = [
            {"token": text, "logprob": number, "bytes": list(text.encode())}
            for text, number in made["tokens"]
        ]
        if stream and fake.fault == "no stream is given":
            stream = False
        if not stream:
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": made["text"]},
                "finish_reason": made["finish_reason"],
            }
            if body.get("logprobs") and "logprobs" not in fake.hides:
                choice["logprobs"] = {"content": logprobs}
            self._send(200, {"choices": [choice], **({"usage": usage} if usage else {})})
            return
        self._stream(body, made, logprobs, usage, fake.path(body, cached))

    def _decoded(self, body: Mapping[str, Any], cached: int, alone: bool) -> dict[str, Any]:
        fake = self.fake
        limit = body.get("max_tokens", 16)
        if fake.fault == "one token too many":
            limit += 1
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if fake.fault == "stop is not looked at":
            stops = []
        text, tokens, reason = "", [], "length"
        for token in fake.tokens(body, cached, alone):
            tokens.append(token)
            text += token[0]
            found = [(text.index(stop), stop) for stop in stops if stop in text]
            if found:
                at, stop = min(found)
                text = text[: at + len(stop)] if fake.fault == "stop is sent" else text[:at]
                reason = "stop"
                break
            if len(tokens) >= limit:
                break
            if len(tokens) == fake.ends_after:
                reason = "stop"
                break
        if fake.fault == "the reason is always stop":
            reason = "stop"
        return {"text": text, "tokens": tokens, "finish_reason": reason}

    def _usage(
        self, prompt: list[str], cached: int, made: Mapping[str, Any], *, stream: bool
    ) -> dict[str, Any]:
        fake = self.fake
        if "usage" in fake.hides or (stream and "stream_usage" in fake.hides):
            return {}
        asked, given = len(prompt), len(made["tokens"])
        if given == fake.ends_after:
            given += 1
        if fake.fault == "streams count otherwise" and stream:
            asked += 1
        if fake.fault == "completions are miscounted":
            given += 1
        total = asked + given + (fake.fault == "the total is off")
        usage: dict[str, Any] = {
            "prompt_tokens": asked,
            "completion_tokens": given,
            "total_tokens": total,
        }
        if "cached_tokens" not in fake.hides and (cached or "misses" not in fake.hides):
            more = cached > 0 and fake.fault == "more is cached than asked"
            usage["prompt_tokens_details"] = {"cached_tokens": asked + 8 if more else cached}
        return usage

    def _tell_prefill(self, prompt: list[str]) -> None:
        """
        Begin a stream and report the progress of the prefill until its client disconnects. The part
        that was computed by then is cached.
        """
        fake = self.fake
        self._begin_stream()
        for step in range(1, fake.tells_prefill + 1):
            done = len(prompt) * step // fake.tells_prefill
            self.wfile.write(b": prefill %d/%d\n\n" % (done, len(prompt)))
            if self._left(fake.prefill_s):
                if fake.fault != "a cut keeps nothing":
                    kept = done // 2 if fake.fault == "a cut keeps half" else done
                    fake.seen.append(prompt[:kept])
                raise Gone

    def _begin_stream(self) -> None:
        if not self.begun:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
        self.begun = True

    def _stream(
        self,
        body: Mapping[str, Any],
        made: Mapping[str, Any],
        logprobs: list[Any],
        usage: Mapping[str, Any],
        path: str,
    ) -> None:
        fake = self.fake
        self._begin_stream()
        self._event({"choices": [], "cairn": {"path": path}})
        told = body.get("logprobs") and "logprobs" not in fake.hides
        nudge = 1e-9 if fake.fault == "streams have other bits" else 0.0
        rest = made["text"]
        for place, (text, number) in enumerate(made["tokens"], start=1):
            if body["max_tokens"] > _LONG and self._left(0.002):
                raise Gone
            fake.paused()
            piece, rest = rest[: len(text)], rest[len(text) :]
            if place == len(made["tokens"]) and fake.fault == "the last piece is lost":
                piece = ""
            choice: dict[str, Any] = {"index": 0, "delta": {"content": piece}}
            if told:
                entry = {**logprobs[place - 1], "logprob": number + nudge}
                choice["logprobs"] = {"content": [entry]}
            self._event({"choices": [choice]})
            if place == 1 and fake.meets and "cache_prompt" not in body and "logprobs" in body:
                self._meet()
        end = {"index": 0, "delta": {}, "finish_reason": made["finish_reason"]}
        self._event({"choices": [end]})
        if usage and body.get("stream_options"):
            self._event({"choices": [], "usage": usage})
        if fake.fault != "streams have no end":
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: %s\n\n" % json.dumps(value).encode())

    def _accompanied(self) -> bool:
        """Whether all expected requests are in progress, now or soon."""
        fake = self.fake
        with fake.changed:
            return fake.changed.wait_for(lambda: fake.crowds > self.crowds_before, _NEIGHBOUR_S)

    def _gather(self) -> bool:
        """Wait for the concurrent requests. Returns whether there are any, and they arrived."""
        fake = self.fake
        with fake.changed:
            if not fake.at_once:
                return False
            fake.gathered += 1
            fake.changed.notify_all()
            return fake.changed.wait_for(lambda: fake.gathered >= fake.at_once, _GATHERED_S)

    def _meet(self) -> None:
        """Wait until all concurrent answers have sent their first token."""
        fake = self.fake
        with fake.changed:
            fake.met += 1
            due = -(-fake.met // fake.meets) * fake.meets
            fake.changed.notify_all()
            fake.changed.wait_for(lambda: fake.met >= due, _NEIGHBOUR_S)
        self._left(0.05)

    def _left(self, within_s: float) -> bool:
        """Whether the client disconnects within a time."""
        if not select.select([self.connection], [], [], within_s)[0]:
            return False
        return not self.connection.recv(1, socket.MSG_PEEK)

    def _send(self, status: int, value: Any) -> None:
        self._plain(status, json.dumps(value), "application/json")

    def _plain(self, status: int, text: str, kind: str = "text/plain") -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serving(fake: Fake, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Run the fake while the context lasts. Yields its address. Port 0 picks a free one."""

    class Handler(_Handler):
        pass

    Handler.fake = fake
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        fake.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
