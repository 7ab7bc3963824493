"""An answer that repeats itself ends, if its request asks for that."""

from __future__ import annotations

import attrs
import pytest

from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.repetition import TIMES, repeats_at
from cairn.journal.replay import replay
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import ask, chat, events_of, generate, serving_fake

pytestmark = pytest.mark.trio

ALPHABET = 26
"""The fake engine draws one letter after another, again and again."""


async def test_an_answer_ends_where_it_repeats_itself() -> None:
    """All of its tokens are sent, and the end is on record; without a guard it goes on."""
    store = MemoryStore()
    command = generate(chat("Say the alphabet"), max_tokens=200)
    guarded = attrs.evolve(command, sampling=attrs.evolve(command.sampling, repetition_guard=True))
    async with serving_fake(store) as server:
        whole = await ask(server, command)
        cut = await ask(server, guarded)
    assert ("length", 200) == (whole.finished.finish_reason, whole.finished.completion_tokens)
    ids = [token for event in events_of(store, ev.CacheExtended) for token in event.sampled][:200]
    at = repeats_at(ids)
    assert at is not None
    assert TIMES * ALPHABET >= at > TIMES * (ALPHABET - 4)
    assert ("repetition", at) == (cut.finished.finish_reason, cut.finished.completion_tokens)
    assert cut.finished.is_cut
    assert cut.text == whole.text[:at]
    assert not Sampling().repetition_guard
    assert () == replay(store.rows).findings
