"""
The gate for ``cache_mode``: an answer of a session that reuses shared blocks alone, from memory or
from files, has the bits of a cold one, and so do the turns that continue from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.engine.prompt.template import Message
from cairn.journal import events as ev
from tests.gate.test_blocks_on_disk import Setup, run, says
from tests.support.in_process_server import Said

pytestmark = pytest.mark.gate

PREFIX = ("new_session", "cache_mode_prefix")


def path(said: Said) -> tuple[str, str | None]:
    """Path and reason of an answer."""
    return said.accepted.path, said.accepted.reason


def test_shared_blocks_alone(model_directory: Path, tmp_path: Path) -> None:
    """
    Turns that reuse shared blocks alone, named and unnamed, from memory and after a restart from
    files, mixed with continuations. Each has the bits of a cold one.
    """
    cached: list[int] = []

    async def main(setup: Setup) -> None:
        talk: list[Message] = [says(1)]
        async with setup.serving() as server:
            await setup.asked(server, talk)
            talk.append(says(2))
            apart = await setup.asked(server, talk, cache_mode="prefix", seed=2)
            talk.append(says(3))
            onward = await setup.asked(server, talk, seed=3)
            for seed in (4, 5):
                talk.append(says(seed))
                named = await setup.asked(
                    server, talk, session_name="mine", cache_mode="prefix", seed=seed
                )
                assert PREFIX == path(named)
                cached.append(named.accepted.cached_tokens)
        assert PREFIX == path(apart)
        assert ("continuation", None) == path(onward)
        assert apart.accepted.session == onward.accepted.session
        cached.append(apart.accepted.cached_tokens)
        assert [] == setup.events(ev.BlockLoaded)
        async with setup.serving() as server:
            talk.append(says(6))
            again = await setup.asked(
                server, talk, session_name="mine", cache_mode="prefix", seed=6
            )
            assert PREFIX == path(again)
            cached.append(again.accepted.cached_tokens)
            loaded = len(setup.events(ev.BlockLoaded))
            assert again.accepted.cached_tokens == loaded * 64
            # By now the slab holds all of it, and still it is copied from the first chunk on.
            talk.append(says(7))
            last = await setup.asked(server, talk, session_name="mine", cache_mode="prefix", seed=7)
            assert PREFIX == path(last)
            assert loaded == len(setup.events(ev.BlockLoaded))

    setup = run(model_directory, tmp_path, main)
    assert all(tokens >= 64 for tokens in cached)
    decided = [one for one in setup.events(ev.PathSelected) if PREFIX == (one.path, one.reason)]
    assert {0} == {one.blocks_from_slab for one in decided}
    assert 5 == len(decided)
