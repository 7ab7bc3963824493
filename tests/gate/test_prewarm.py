"""
The gate over prewarming: an answer that reuses prewarmed blocks has the bits of a server that does
not prewarm, and those of a cold server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from cairn.actors.requests.messages import Generate
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import SAME, rerun
from tests.gate.conversation import words
from tests.gate.test_gate import (
    GREEDY,
    PENALISED,
    SAMPLED,
    rows_of_an_empty_server,
    same_bits,
)
from tests.support.held_engine import hold_prewarm
from tests.support.in_process_server import Said, ask, serving, wait_idle
from tests.support.prewarm_conversation import C, new_tokens, prefilled, thinking

pytestmark = pytest.mark.gate


def turns(sampling: Any) -> list[Generate]:
    """A user's requests in three turns, each of which continues from the answer before."""
    first = attrs.evolve(thinking(max_tokens=70), sampling=sampling)
    return [attrs.evolve(first, seed=seed) for seed in range(3)]


def going_on(command: Generate, talk: list[Message]) -> Generate:
    """The command with the conversation so far."""
    return attrs.evolve(command, conversation=Conversation(messages=tuple(talk)))


def of(store: MemoryStore, kind: type[ev.Event]) -> list[Any]:
    """The journal's events of a kind."""
    found = (decode(row).event for row in store.rows)
    return [event for event in found if isinstance(event, kind)]


@pytest.mark.long_but("sampled")
@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"]
)
def test_prewarmed_tokens_give_the_bits_of_a_miss(
    model_directory: Path, sampling: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Three turns with thinking that the template drops: with prewarming, without it, and each on a
    cold server. All bits are equal. With prewarming a turn computes its new words and at most a
    chunk; without it, more. A replay on the model gives the same passes.
    """
    prewarm_store, plain_store = MemoryStore(), MemoryStore()
    ran: list[tuple[int, int]] = []

    async def main() -> None:
        empty = await rows_of_an_empty_server(model_directory)
        prewarm_store.append(empty)
        plain_store.append(empty)
        first = thinking().conversation
        assert first is not None
        talk = list(first.messages)
        async with (
            serving(model_directory, prewarm_store) as prewarming,
            serving(model_directory, plain_store, prewarm=False) as does_not,
        ):
            for place, command in enumerate(turns(sampling)):
                asked = going_on(command, talk)
                hit, other = await ask(prewarming, asked), await ask(does_not, asked)
                async with serving(model_directory, MemoryStore(empty)) as cold:
                    missed = await ask(cold, asked)
                assert 0 == missed.accepted.cached_tokens
                same_bits(hit, missed)
                same_bits(other, missed)
                ran.append((prefilled(hit), prefilled(other)))
                await wait_idle(prewarming)
                await wait_idle(does_not)
                talk.append(Message(role="assistant", content=hit.text))
                talk.append(Message(role="user", content=words(60 + place, 2)))
            ran.append((new_tokens(prewarming), 0))

    trio.run(main)

    _, second, _, (new, _) = ran
    assert second[0] < new + C + 20  # two words of numbers are some tokens more
    assert second[1] > second[0] + 2 * C
    assert [True, True] == [e.prewarmed_tokens > 0 for e in of(prewarm_store, ev.PathSelected)[1:]]
    assert () == replay(prewarm_store.read()).findings
    (session,) = {event.session for event in of(prewarm_store, ev.PathSelected)}
    assert SAME == rerun(prewarm_store.rows, session, None), capsys.readouterr().out


def test_an_abandoned_prewarm_gives_the_bits_of_a_miss(model_directory: Path) -> None:
    """
    The next request comes while the second block of many is computed: what exists is reused, and
    the bits of the answer are the same.
    """
    store = MemoryStore()
    answers: list[Said] = []

    async def main() -> None:
        empty = await rows_of_an_empty_server(model_directory)
        store.append(empty)
        command = thinking()
        assert command.conversation is not None
        async with serving(model_directory, store) as server:
            gate = hold_prewarm(server)
            first = await ask(server, command)
            await gate.wait()
            more = (
                *command.conversation.messages,
                Message(role="assistant", content=first.text),
                Message(role="user", content="Stop and listen."),
            )
            asked = going_on(command, list(more))

            async def next_turn() -> None:
                answers.append(await ask(server, asked))

            actor = server.loaded.sessions.actors[first.accepted.session]
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(next_turn)
                    with trio.fail_after(120):
                        while not actor.inbox.requests_waiting:
                            await trio.testing.wait_all_tasks_blocked()
                    gate.go.set()
            finally:
                gate.go.set()
        async with serving(model_directory, MemoryStore(empty)) as cold:
            same_bits(answers[0], await ask(cold, asked))

    trio.run(main)

    (abandoned, *_) = of(store, ev.PrewarmAbandoned)
    assert "request" == abandoned.reason
    assert of(store, ev.PathSelected)[1].prewarmed_tokens == abandoned.computed_tokens > 0
    assert () == replay(store.read()).findings
