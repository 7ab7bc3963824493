"""A server is killed while it forgets a session: wherever that is, the next one finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.journal import events as ev
from tests.support.forgetting_killed import MINE, ON_RECORD, OTHERS, PLACES, killed
from tests.support.in_process_server import ask, chat, generate, wait_idle
from tests.support.sealed_place import LONG, Place, forget

pytestmark = [pytest.mark.trio, pytest.mark.slow]


@pytest.mark.long_but(
    "before it is on record",
    "after it was recorded",
    "while the keys go",
    "before a block goes",
    "after a file went",
    "after a snapshot, before the keys go",
    "after the keys went",
)
@pytest.mark.parametrize("where", PLACES)
async def test_the_server_is_killed(tmp_path: Path, where: str):
    """
    The journal holds. Before it is on record nothing is forgotten, and the same request forgets it;
    after that the next start removes what is left. It is on record once, and the other
    conversation goes on.
    """
    place = Place(tmp_path)
    killed(where, "server", tmp_path)
    place.report()
    on_record = bool(place.events(ev.SessionForgotten))
    # That a file went may be committed together with what comes next.
    assert on_record == (where in ON_RECORD) or "after a file went" == where
    assert {where != "after the keys went"} == place.readable(MINE)
    async with place.serving() as server:
        assert on_record == (not place.has_key(MINE))
        await forget(server, MINE)
        assert not place.has_key(MINE)
        assert {False} == place.readable(MINE)
        assert MINE not in server.loaded.sequencer.state.sessions
        again = await ask(server, generate(chat(LONG), session_name=MINE))
        assert 0 == again.finished.cached_tokens
        assert {True} == place.readable(OTHERS)
        await wait_idle(server)
    assert 1 == len(place.events(ev.SessionForgotten))
    place.report()
