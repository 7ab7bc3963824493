"""
Each invariant can fail: the real data is damaged in a running server, the checks catch it before
anything of it is sent, replay finds the same violation at the same row, and no other request is
affected.

The damages are those of `ops drill`; the other tests here are of what no drill shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken
from cairn.actors.sessions.settle import Settle
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from cairn.ops.drills.outcome import Scene
from cairn.ops.drills.server.baseline import Baseline
from cairn.ops.drills.table import DRILLS
from tests.support.in_process_server import ask, generate, serving

VICTIM = "the victim"


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_passes(
    model_directory: Path, baseline: Baseline, tmp_path: Path, name: str
) -> None:
    """
    The damage is caught, journaled, counted, logged, answered as documented, confined and replayed.
    """
    scene = Scene(directory=tmp_path, model=model_directory, baseline=baseline)
    outcome = trio.run(DRILLS[name].play, scene)
    assert [] == [check for check in outcome.checks if check.passed is False]
    assert outcome.passed


def test_a_request_that_ends_twice(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    INV-6: a failure after the answer breaks the session and not the answer, which was complete. The
    next request that names the session gets the bug.
    """
    store = MemoryStore()
    conversation = Conversation(messages=(Message(role="user", content="Victim speaking."),))
    command = generate(conversation, session_name=VICTIM, max_tokens=4)

    async def cancel(settle: Settle) -> None:
        last = settle.cache.session.last
        assert last is not None
        settle.cache.append(
            ev.RequestCancelled(session=VICTIM, request=last.request, stage="decode")
        )

    async def main() -> None:
        async with serving(model_directory, store, block_tokens=16, decode_rows=2) as server:
            with monkeypatch.context() as patch:
                patch.setattr(Settle, "cut_back", cancel)
                assert 4 == (await ask(server, command)).finished.completion_tokens
                with trio.fail_after(60):
                    while not server.loaded.sequencer.state.faults:
                        await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Broken) as caught:
                await ask(server, command)
            assert {caught.value.bug_id} == set(server.loaded.sequencer.state.faults)

    trio.run(main)

    found = replay(store.read()).findings
    assert [("INV-6", True, True)] == [(f.invariant, f.recorded, f.reproduced) for f in found]
