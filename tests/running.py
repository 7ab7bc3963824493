"""
A running server inside the test's own process, over a store in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs

from cairn.actors.boot import Settings, booted
from cairn.actors.messages import Accepted, Delta, Finished, Generate, TokenInfo
from cairn.actors.server import Server
from cairn.engine.prompt import Conversation
from cairn.engine.sampling import Sampling
from cairn.journal.store import MemoryStore

SECRET = b"a secret of the tests, 32 bytes!"
MIB = 1024 * 1024


def settings(model_directory: Path, **changes: Any) -> Settings:
    """
    Settings for a small machine.
    """
    small = {"pool_bytes": 512 * MIB, "blocks_bytes": 256 * MIB}
    return Settings(model=str(model_directory), **{**small, **changes})


@contextlib.asynccontextmanager
async def serving(
    model_directory: Path, store: MemoryStore | None = None, **changes: Any
) -> AsyncIterator[Server]:
    """
    A server that serves while the context lasts.
    """
    store = MemoryStore() if store is None else store
    async with booted(settings(model_directory, **changes), store, SECRET) as server:
        yield server


@attrs.frozen(kw_only=True)
class Said:
    """
    An answer, and how it came about.

    Attributes:
        tokens: id, log-probability and the likeliest alternatives of each token: what P1 is about.
    """

    accepted: Accepted
    text: str
    tokens: tuple[TokenInfo, ...]
    finished: Finished


async def ask(server: Server, command: Generate) -> Said:
    """
    Ask, and read the answer to its end.
    """
    accepted, finished = None, None
    text = ""
    tokens: list[TokenInfo] = []
    async with server.generate(command) as replies:
        async for reply in replies:
            match reply:
                case Accepted():
                    accepted = reply
                case Delta():
                    text += reply.text
                    tokens.extend(reply.tokens)
                case Finished():
                    finished = reply
                case _:
                    pass
    assert accepted is not None
    assert finished is not None
    return Said(accepted=accepted, text=text, tokens=tuple(tokens), finished=finished)


def generate(conversation: Conversation, **changes: Any) -> Generate:
    """
    A greedy request for a short answer with log-probabilities.
    """
    usual: dict[str, Any] = {
        "protocol": "test",
        "tenant": "local",
        "conversation": conversation,
        "prompt": None,
        "sampling": Sampling(temperature=0.0),
        "seed": 1,
        "max_tokens": 24,
        "top_logprobs": 5,
    }
    return Generate(**{**usual, **changes})
