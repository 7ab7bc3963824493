"""A server in the test's own process, on a store in memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import attrs
import trio

from cairn.actors.boot import Settings, booted
from cairn.actors.clock import wall_clock_us
from cairn.actors.requests.messages import Accepted, Delta, Finished, Generate, TokenInfo
from cairn.actors.server import Server, TenantServer
from cairn.engine.answer.parts import AnswerPart, Called
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.journal.tenants import LOCAL
from tests.support.fake_engine import NO_MODEL, started

SECRET = b"a secret of the tests, 32 bytes!"
MIB = 1024 * 1024
# Looking without a pause would take the interpreter's lock from the engine's thread all the time.
_LOOK_S = 0.001


def settings(model_directory: Path, **changes: Any) -> Settings:
    """Settings for a small machine, with the blocks of a CPU on every device."""
    small = {"pool_bytes": 512 * MIB, "blocks_bytes": 256 * MIB, "block_tokens": 64}
    return Settings(model=str(model_directory), **{**small, **changes})


@contextlib.asynccontextmanager
async def serving(
    model_directory: Path, store: MemoryStore | None = None, **changes: Any
) -> AsyncIterator[Server]:
    """A server that runs while the context is open."""
    store = MemoryStore() if store is None else store
    async with booted(settings(model_directory, **changes), store, SECRET) as server:
        yield server


@contextlib.asynccontextmanager
async def serving_fake(store: MemoryStore | None = None, **changes: Any) -> AsyncIterator[Server]:
    """As ``serving``, over the fake engine."""
    store = MemoryStore() if store is None else store
    of_it = settings(NO_MODEL, **changes)
    async with booted(of_it, store, SECRET, start_engine=started) as server:
        yield server


def turn_clock(server: Server, seconds: float) -> None:
    """Move the clock forward with which TTLs are compared."""

    def later_us() -> int:
        return wall_clock_us() + round(1_000_000 * seconds)

    server.loaded.sequencer.now_us = later_us  # type: ignore[method-assign]


@attrs.frozen(kw_only=True)
class Said:
    """
    An answer, and how it was computed.

    Attributes:
        parts: the parts that the client received, in order.
        text: all of them as one text.
        tokens: id, log-probability and likeliest alternatives of each token, which P1 is about.
    """

    accepted: Accepted
    parts: tuple[AnswerPart, ...]
    text: str
    tokens: tuple[TokenInfo, ...]
    finished: Finished


async def _pause() -> None:
    """A short pause in real time, also under a clock of the test's own."""
    await trio.to_thread.run_sync(time.sleep, _LOOK_S)


async def wait_idle(server: Server) -> None:
    """Wait until no session is working and all events are committed."""
    with trio.fail_after(120):
        while not set(server.statistics().sessions) <= {str(SessionState.IDLE)}:
            await _pause()
        await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)


async def without_slabs(server: Server) -> None:
    """Wait until no session is working or holds a slab, and all events are committed."""
    with trio.fail_after(120):
        while server.statistics().slabs or server.loaded.activity.at_work:
            await _pause()
        await server.loaded.writer.wait_committed(server.loaded.sequencer.state.position)


def local(server: Server) -> TenantServer:
    """The server as clients without an API key use it."""
    return server.for_tenant(LOCAL)


async def ask(server: Server, command: Generate, tenant: str = LOCAL) -> Said:
    """Send a request and read the answer to its end."""
    accepted, finished = None, None
    parts: list[AnswerPart] = []
    tokens: list[TokenInfo] = []
    async with server.for_tenant(tenant).generate(command) as replies:
        async for reply in replies:
            match reply:
                case Accepted():
                    accepted = reply
                case Delta():
                    parts.extend(reply.parts)
                    tokens.extend(reply.tokens)
                case Finished():
                    finished = reply
                case _:
                    pass
    assert accepted is not None
    assert finished is not None
    return Said(
        accepted=accepted,
        parts=tuple(parts),
        text=text_of(parts),
        tokens=tuple(tokens),
        finished=finished,
    )


def text_of(parts: Iterable[AnswerPart]) -> str:
    """The parts that a client received, as one text."""
    return "".join(map(_words, parts))


def _words(part: AnswerPart) -> str:
    return f"{part.name}({part.arguments})" if isinstance(part, Called) else part.text


def generate(conversation: Conversation, **changes: Any) -> Generate:
    """A greedy request for a short answer with log-probabilities."""
    usual: dict[str, Any] = {
        "protocol": "test",
        "conversation": conversation,
        "prompt": None,
        "sampling": Sampling(temperature=0.0),
        "seed": 1,
        "max_tokens": 24,
        "top_logprobs": 5,
    }
    return Generate(**{**usual, **changes})


def chat(*said: str) -> Conversation:
    """A conversation of these messages, which its user begins."""
    roles = ("user", "assistant")
    return Conversation(
        messages=tuple(
            Message(role=roles[place % 2], content=text) for place, text in enumerate(said)
        )
    )


def events_of(store: MemoryStore, kind: type[ev.Event]) -> list[Any]:
    """The events of one kind in a journal, in order."""
    found = (decode(row).event for row in store.rows)
    return [event for event in found if isinstance(event, kind)]
