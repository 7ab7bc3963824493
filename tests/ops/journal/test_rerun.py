"""
``ops replay --engine`` compares everything: a journal in which one measured value alone is another
one is detected, though its chain is unbroken and, if possible, no invariant is broken.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.keys import ids_hash
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, SAME, rerun
from tests.ops.journal.test_replay_engine import forged
from tests.support.in_process_server import ask, generate, serving

BRIEF = "one token"
SETTLED = "a chunk of answer"
SHARING = "on shared blocks"


@pytest.fixture(scope="module")
def short_rows(model_directory: Path) -> list[Row]:
    """
    The journal of three sessions: one draws a single token, so that it never decodes, one answers
    for so long that a chunk is settled, and one builds on the blocks of the second.
    """
    store = MemoryStore()

    async def main() -> None:
        async with serving(model_directory, store) as server:
            for name, text, most in (
                (BRIEF, BRIEF, 1),
                (SETTLED, SETTLED, 128),
                (SHARING, SETTLED, 4),
            ):
                message = Message(role="user", content=f"{text} " + "a stone, a path " * 40)
                conversation = Conversation(messages=(message,))
                await ask(server, generate(conversation, session_name=name, max_tokens=most))
                while server.loaded.sequencer.session(name).state is not SessionState.IDLE:
                    await trio.testing.wait_all_tasks_blocked()

    trio.run(main)
    return store.rows


def last(rows: list[Row], session: str, step: ev.Step) -> ev.CacheExtended:
    """The last pass of a kind that a session ran."""
    found = None
    for row in rows:
        event = decode(row).event
        if isinstance(event, ev.CacheExtended) and (event.session, event.step) == (session, step):
            found = event
    assert found is not None, f"{session} ran no {step}"
    return found


def differs_at(rows: list[Row], session: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is reported of a journal that differs from what the engine gives."""
    assert DIFFERS == rerun(rows, session, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("session", [BRIEF, SETTLED, SHARING])
def test_as_it_was_written_all_is_the_same(short_rows: list[Row], session: str) -> None:
    """What is found below is the forger's doing."""
    assert replay(short_rows).findings == ()
    assert SAME == rerun(short_rows, session, None)


@pytest.mark.parametrize(("session", "step"), [(BRIEF, "prefill"), (SETTLED, "decode")])
def test_another_token_alone_is_found(
    short_rows: list[Row], capsys: pytest.CaptureFixture[str], session: str, step: ev.Step
) -> None:
    """
    The last token of an answer is in no cache, so that nothing but itself can tell that it is not
    the one that was drawn. The journal with another one breaks no invariant.
    """
    pass_ = last(short_rows, session, step)
    wrong = pass_.sampled[-1] ^ 1

    def change(event: ev.Event) -> ev.Event:
        if event == pass_:
            return attrs.evolve(pass_, sampled=(*pass_.sampled[:-1], wrong))
        # Tokens of decode steps are released with them.
        if isinstance(event, ev.TokensEmitted) and event.session == session and step == "prefill":
            return attrs.evolve(event, ids=(*event.ids[:-1], wrong))
        return event

    rows = forged(short_rows, change)
    out = differs_at(rows, session, capsys)

    assert replay(rows).findings == ()
    assert f"the journal has {wrong}, the engine gives {wrong ^ 1}" in out


@pytest.mark.parametrize(("session", "step"), [(BRIEF, "prefill"), (SETTLED, "decode")])
def test_another_log_probability_alone_is_found(
    short_rows: list[Row], capsys: pytest.CaptureFixture[str], session: str, step: ev.Step
) -> None:
    """The log-probability of the last token, in prefill and in decode. No invariant knows of it."""
    pass_ = last(short_rows, session, step)
    wrong = (*pass_.logprobs[:-1], pass_.logprobs[-1] - 2.0**-40)
    assert wrong != pass_.logprobs

    rows = forged(
        short_rows,
        lambda event: attrs.evolve(pass_, logprobs=wrong) if event == pass_ else event,
    )
    out = differs_at(rows, session, capsys)

    assert replay(rows).findings == ()
    assert "its log-probability" in out


@pytest.mark.parametrize("field", ["input_hash", "coverage"])
@pytest.mark.parametrize(
    ("session", "step"), [(BRIEF, "prefill"), (SETTLED, "decode"), (SETTLED, "settle")]
)
def test_what_a_pass_measured_is_compared(
    short_rows: list[Row],
    capsys: pytest.CaptureFixture[str],
    session: str,
    step: ev.Step,
    field: str,
) -> None:
    """The tokens that ran and what the layers held after them, for each kind of pass."""
    pass_ = last(short_rows, session, step)
    layers, start, end = pass_.coverage[0]
    wrong = {"input_hash": ids_hash([1, 2, 3]), "coverage": ((layers, start, end - 1),)}
    other = attrs.evolve(pass_, **{field: wrong[field]})  # type: ignore[arg-type]  # one of both

    rows = forged(short_rows, lambda event: other if event == pass_ else event)
    out = differs_at(rows, session, capsys)

    assert {"input_hash": "tokens that ran", "coverage": "coverage"}[field] in out
    assert "(cache_extended)" in out


def test_the_coverage_after_a_trim_is_compared(
    short_rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the layers held after a session was cut back."""

    def change(event: ev.Event) -> ev.Event:
        if not isinstance(event, ev.CacheTrimmed) or event.session != SETTLED:
            return event
        return attrs.evolve(event, coverage=((1, 0, event.end),))

    out = differs_at(forged(short_rows, change), SETTLED, capsys)

    assert "(cache_trimmed)" in out
    assert "coverage" in out


@pytest.mark.parametrize("place", [0, -1])
def test_the_digest_of_a_shared_block_alone_is_found(
    short_rows: list[Row], capsys: pytest.CaptureFixture[str], place: int
) -> None:
    """
    A shared block whose digest is another one wherever it stands, so that no invariant breaks: the
    session that shares it computes it from its tokens and finds out.
    """
    shared = next(
        event
        for row in short_rows
        for event in [decode(row).event]
        if isinstance(event, ev.BlocksRestored)
    )
    key, wrong = shared.keys[place], "0" * 64
    digests = list(shared.digests)
    digests[place] = wrong

    def change(event: ev.Event) -> ev.Event:
        if event == shared:
            return attrs.evolve(shared, digests=tuple(digests))
        if isinstance(event, ev.BlockSealed) and event.key == key:
            return attrs.evolve(event, digest=wrong)
        return event

    others = forged(short_rows, change)
    out = differs_at(others, shared.session, capsys)

    assert replay(others).findings == ()
    assert "(blocks_restored)" in out
    assert f"digest: the journal has {wrong}" in out
