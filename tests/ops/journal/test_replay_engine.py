"""
``ops replay --engine``: a healthy session comes out the same, a forged one is named, and another
fingerprint is recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio

from cairn.actors.agents.messages import NewAgent
from cairn.actors.clock import clock
from cairn.engine.answer.grammar import Constraint
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.pruning import PruneOptions, prepare_prune
from cairn.journal.replay import replay
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, OTHER_FINGERPRINT, SAME, rerun
from tests.actors.agents.test_agents import go_on
from tests.gate.conversation import TOOLS
from tests.support.in_process_server import ask, generate, local, serving, wait_idle

NAMED = "the session"
_OFTEN = ((50, 9.0),)
PENALISED = {
    "repetition_penalty": Sampling(temperature=0.0, repetition_penalty=4.0, logit_bias=_OFTEN),
    "presence_penalty": Sampling(temperature=0.0, presence_penalty=2.0, logit_bias=_OFTEN),
    "frequency_penalty": Sampling(temperature=0.0, frequency_penalty=2.0, logit_bias=_OFTEN),
    "logit_bias": Sampling(temperature=0.7, logit_bias=_OFTEN),
}
"""A session for each penalty, of its name."""
_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"]}
CONSTRAINED = {
    "schema": Constraint(schema=_SCHEMA),
    "calls": Constraint(calls=("weigh_stone",)),
}
"""A session for each constraint, of its name."""


@pytest.fixture(scope="module")
def rows(model_directory: Path) -> list[Row]:
    """The journal of a conversation of three turns, sampled, beside another one."""
    store = MemoryStore()

    async def main() -> None:
        messages: list[Message] = []
        async with serving(model_directory, store) as server:
            for turn in range(3):
                messages.append(Message(role="user", content=f"{turn} " + "a stone, a path " * 15))
                conversation = Conversation(messages=tuple(messages))
                sampling = Sampling(temperature=0.7, top_p=0.9)
                command = generate(
                    conversation, sampling=sampling, session_name=NAMED, top_logprobs=None
                )
                said = await ask(server, command)
                messages.append(Message(role="assistant", content=said.text))
            conversation = Conversation(messages=(messages[0],))
            for name, sampling in PENALISED.items():
                await ask(server, generate(conversation, sampling=sampling, session_name=name))
            for name, constraint in CONSTRAINED.items():
                command = generate(
                    Conversation(
                        messages=(messages[0],), tools=TOOLS, template={"enable_thinking": False}
                    ),
                    sampling=Sampling(temperature=1.3, repetition_penalty=1.1),
                    constraint=constraint,
                    session_name=name,
                    max_tokens=64,
                )
                await ask(server, command)
            # Another session builds on the blocks of the first one.
            await ask(server, generate(Conversation(messages=tuple(messages[:3]))))

    trio.run(main)
    return store.rows


def forged(rows: list[Row], change: Callable[[ev.Event], ev.Event]) -> list[Row]:
    """The journal with changed events and a chain that holds."""
    head, again = GENESIS, []
    for row in rows:
        recorded = decode(row)
        row = encode(attrs.evolve(recorded, event=change(recorded.event)), head)
        head = row.hash
        again.append(row)
    return again


def test_a_healthy_session_is_the_same(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    """Every pass is run again: tokens, log-probabilities, digests and coverage are equal."""
    assert SAME == rerun(rows, NAMED, None)
    assert "same: " in capsys.readouterr().out


@pytest.mark.long_but("repetition_penalty")
@pytest.mark.parametrize("name", PENALISED)
def test_an_answer_under_penalties_is_the_same(rows: list[Row], name: str) -> None:
    """The journal has what a penalty or a bias needs; without it the answer is another one."""
    assert SAME == rerun(rows, name, None)
    off = attrs.asdict(Sampling())[name]
    assert DIFFERS == rerun(forged(rows, with_sampling(name, name, off)), name, None)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_a_constrained_answer_is_the_same(rows: list[Row], name: str) -> None:
    """The journal has the grammar; without it, and under another one, the answer is another one."""
    assert SAME == rerun(rows, name, None)
    (grammar,) = (
        event.grammar
        for event in (decode(row).event for row in rows)
        if isinstance(event, ev.RequestReceived) and event.session == name
    )
    assert grammar is not None
    assert DIFFERS == rerun(forged(rows, with_grammar(name, None)), name, None)
    other = grammar.replace('"a"', '"b"').replace("arguments", "parameters")
    assert DIFFERS == rerun(forged(rows, with_grammar(name, other)), name, None)
    assert DIFFERS == rerun(forged(rows, with_grammar(name, "start: (")), name, None)


def with_grammar(session: str, grammar: str | None) -> Callable[[ev.Event], ev.Event]:
    """Puts another grammar, or none, to a session's requests."""

    def change(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.RequestReceived) and event.session == session:
            return attrs.evolve(event, grammar=grammar)
        return event

    return change


def with_sampling(session: str, name: str, value: object) -> Callable[[ev.Event], ev.Event]:
    """Changes one parameter of a session's requests."""

    def change(event: ev.Event) -> ev.Event:
        if isinstance(event, ev.RequestReceived) and event.session == session:
            return attrs.evolve(event, sampling={**event.sampling, name: value})
        return event

    return change


def test_an_older_journal_has_no_penalties(rows: list[Row]) -> None:
    """A request that was journaled before there were penalties is run without them."""

    def older(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.RequestReceived):
            return event
        kept = {name: event.sampling[name] for name in event.sampling if name not in PENALISED}
        return attrs.evolve(event, sampling=kept)

    assert SAME == rerun(forged(rows, older), NAMED, None)


def test_a_session_on_shared_blocks_is_the_same(rows: list[Row]) -> None:
    """
    Blocks that another session sealed are computed from their tokens, with the digests on record.
    """
    other = next(
        row.stream.removeprefix("session/") for row in rows if row.kind == ev.BlocksRestored.kind
    )

    assert other != NAMED
    assert SAME == rerun(rows, other, None)


@pytest.mark.parametrize("what", ["token", "log-probability", "digest"])
def test_the_first_event_that_differs_is_named(
    rows: list[Row], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """
    A journal that differs from what the engine gives is detected, though its chain is unbroken.
    """
    position = [0]

    def change(event: ev.Event) -> ev.Event:
        position[0] += 1
        mine = getattr(event, "session", None) == NAMED
        if what == "digest" and mine and isinstance(event, ev.BlockSealed):
            return attrs.evolve(event, digest="0" * 64)
        if mine and isinstance(event, ev.CacheExtended) and event.step == "decode":
            if what == "token":
                return attrs.evolve(event, sampled=tuple(token ^ 1 for token in event.sampled))
            if what == "log-probability":
                return attrs.evolve(event, logprobs=tuple(one + 1e-7 for one in event.logprobs))
        return event

    assert DIFFERS == rerun(forged(rows, change), NAMED, None)
    assert "differs at event" in capsys.readouterr().out


def test_another_fingerprint_is_told(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    """A journal that was written elsewhere is not compared, and what is different is said."""

    def change(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.ModelLoaded):
            return event
        fields = {**event.fields, "mlx": "0.1.0"}
        return attrs.evolve(event, fields=fields, fingerprint="elsewhere")

    assert OTHER_FINGERPRINT == rerun(forged(rows, change), NAMED, None)
    assert "mlx: 0.1.0 on record" in capsys.readouterr().out


@pytest.mark.long
def test_an_agent_whose_first_rows_were_pruned(model_directory: Path) -> None:
    """What is left of its open session is run again, over blocks that only pruned rows computed."""
    store = MemoryStore()
    texts = ["a stone, a path " * 15, "and the hill " * 8, "what more?"]

    async def main() -> None:
        async with serving(model_directory, store) as server:
            await local(server).agents.create(NewAgent(name="notes", system="Be brief."))
            for text in texts[:2]:
                await go_on(server, "notes", text)
            await wait_idle(server)
        before_us = store.rows[-1].time_us + 1
        async with serving(model_directory, store) as server:
            await go_on(server, "notes", texts[2])
            await wait_idle(server)
        prune = prepare_prune(store, PruneOptions(before_us=before_us), clock())
        assert prune.base is not None
        prune.commit(store)

    trio.run(main)
    rows, base = list(store.read()), store.base()
    assert () == replay(rows, base=base).findings
    assert SAME == rerun(rows, "agent/notes", None, None, base)
