"""
Serves a conversation under a row class that may be a little wrong, and checks its answers.

``python -P -m tests.gate.cuts.other_cuts MODEL quantum|least|""`` prints JSON: the results of the
shadow checks, the invariants that broke, and the exit code of ``ops replay --engine``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.errors import Broken
from cairn.engine.mlx.passes.search import Found, measured_row_class
from cairn.engine.row_class import RowClass
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import rerun
from tests.support.in_process_server import ask, chat, events_of, generate, serving

WRONG = {
    "": {},
    "quantum": {"quantum": 8, "least": 8, "most": 256},
    "least": {"least": 1},
}
TURNS = 2


def searched_wrong(wrong: str) -> Any:
    """A search whose result asks for a little less than it should."""

    def search(engine: Any, **settings: Any) -> Found:
        found = measured_row_class(engine, **settings)
        assert found.row_class is not None
        return attrs.evolve(found, row_class=attrs.evolve(found.row_class, **WRONG[wrong]))

    return search


async def conversed(model: Path, store: MemoryStore) -> None:
    """Serve a few turns, and wait until each answer is checked."""
    async with serving(model, store, shadow_share=1.0) as server:
        said = ["The stone lies on the path, and the path goes over the hill. " * 12]
        for turn in range(TURNS):
            command = generate(chat(*said), max_tokens=12, session_name="s")
            try:
                answer = await ask(server, command)
            except Broken:
                return  # the session is quarantined, because the check differed
            with trio.fail_after(300):
                while len(events_of(store, ev.ShadowEnded)) <= turn:
                    await trio.testing.wait_all_tasks_blocked(0.01)
            said += [answer.text, "And then?"]


def main(model: Path, wrong: str) -> dict[str, Any]:
    """What checks and a replay find under a class."""
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cairn.engine.mlx.selftest.measured_row_class", searched_wrong(wrong))
        trio.run(conversed, model, store)
    recorded = {
        (one.request, one.start, one.end)
        for one in events_of(store, ev.CacheExtended)
        if one.step == "prefill" and one.end > one.start + 1
    }
    checks = events_of(store, ev.ShadowChecked)
    classes = [RowClass.of(one.row_class) for one in events_of(store, ev.SelfTestFinished)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = rerun(list(store.read()), "s", None)
    return {
        "class": [attrs.astuple(one) for one in classes if one is not None],
        "checks": [one.result for one in events_of(store, ev.ShadowEnded)],
        "cuts as recorded": [
            (one.request, start, end)
            for one in checks
            for start, end in pairwise((0, *one.cuts))
            if (one.request, start, end) in recorded
        ],
        "findings": [one.invariant for one in replay(store.read()).findings],
        "replay": code,
        "told": out.getvalue(),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
