"""
``ops replay --engine`` on what a client was shown and on measured bytes: text that the tokens do
not make is named, and so are slabs and blocks of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio

from cairn.actors.requests.messages import Delta
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from cairn.journal.rows.codec import GENESIS, Row, decode, encode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import DIFFERS, NOTHING, SAME, rerun
from tests.support.in_process_server import ask, generate, local, serving
from tests.support.journals import FINGERPRINT, TENANT, Builder, broken

_EMITS = ev.TokensEmitted | ev.CacheExtended
WHOLE, STOPPED, LEFT = "whole", "cut by a stop text", "left by its client"
BEGUN = "begun by its client"


@pytest.fixture(scope="module")
def rows(model_directory: Path) -> list[Row]:
    """
    The journal of one question asked four times: to the end, with a stop text out of the middle of
    the answer, with the beginning of an answer, and by a client that goes away.
    """
    store = MemoryStore()

    async def main() -> None:
        message = Message(role="user", content="Where does it go? " * 20)
        asked = Conversation(messages=(message,))
        async with serving(model_directory, store) as server:
            said = await ask(server, generate(asked, session_name=WHOLE))
            stop = said.text[len(said.text) // 2 :][:3]
            await ask(server, generate(asked, session_name=STOPPED, stop=(stop,)))
            begun = (message, Message(role="assistant", content="It goes"))
            await ask(
                server, generate(Conversation(messages=begun, continued=True), session_name=BEGUN)
            )
            async with local(server).generate(
                generate(asked, session_name=LEFT, max_tokens=400)
            ) as replies:
                async for reply in replies:
                    if isinstance(reply, Delta) and reply.parts:
                        break  # the client goes away

    trio.run(main)
    return store.rows


def changed(rows: list[Row], position: int, change: Callable[[ev.Event], ev.Event]) -> list[Row]:
    """The journal with another event at a position and a chain that holds."""
    head, again = GENESIS, []
    for row in rows:
        recorded = decode(row)
        if row.position == position:
            recorded = attrs.evolve(recorded, event=change(recorded.event))
        again.append(encode(recorded, head))
        head = again[-1].hash
    return again


def with_one_more(rows: list[Row], position: int, event: ev.Event) -> list[Row]:
    """
    The journal with another event of the same stream behind a position, and a chain that holds.
    """
    head, again = GENESIS, []
    recorded = [decode(row) for row in rows]
    before = recorded[position - 1]
    added = attrs.evolve(
        before, position=position + 1, seq=before.seq + 1, event_id="added", event=event
    )
    behind = [
        attrs.evolve(one, position=one.position + 1, seq=one.seq + (one.stream == before.stream))
        for one in recorded[position:]
    ]
    for one in (*recorded[:position], added, *behind):
        again.append(encode(one, head))
        head = again[-1].hash
    return again


def last_text(rows: list[Row], session: str) -> int:
    """Where the last event of a session is that has text which was sent."""
    return max(
        row.position
        for row in rows
        if row.stream == f"session/{session}"
        and isinstance(event := decode(row).event, _EMITS)
        and event.text
    )


@pytest.mark.parametrize(
    ("session", "reasons"),
    [(WHOLE, ["length"]), (STOPPED, ["stop"]), (BEGUN, ["length"]), (LEFT, [])],
)
def test_the_text_is_that_of_the_tokens(rows: list[Row], session: str, reasons: list[str]) -> None:
    """
    Of an answer that a stop text or its client ended, the text is a beginning of its tokens' text.
    """
    events = [decode(row).event for row in rows if row.stream == f"session/{session}"]
    ended = [event for event in events if isinstance(event, ev.RequestFinished)]

    assert reasons == [event.finish_reason for event in ended]
    assert "" != "".join(event.text for event in events if isinstance(event, _EMITS))
    assert SAME == rerun(rows, session, None)


@pytest.mark.parametrize(
    ("session", "text"),
    [
        (WHOLE, "\0"),
        (WHOLE, "{}\0"),
        (WHOLE, ""),
        (STOPPED, "\0"),
        (STOPPED, "{}\0"),
        (LEFT, "\0"),
        (LEFT, "{}\0"),
    ],
)
def test_text_that_the_tokens_do_not_make_is_named(
    rows: list[Row], capsys: pytest.CaptureFixture[str], session: str, text: str
) -> None:
    """
    Other text and more of it; less of it too, where nothing cut the answer. The text is not shown.
    """
    position = last_text(rows, session)

    def change(event: ev.Event) -> ev.Event:
        assert isinstance(event, _EMITS)
        return attrs.evolve(event, text=text.format(event.text))

    assert DIFFERS == rerun(changed(rows, position, change), session, None)
    out = capsys.readouterr().out
    kind = rows[position - 1].kind if text else "request_finished"
    assert f"({kind})\n  the text, the same for " in out
    assert "\0" not in out


@pytest.mark.parametrize(("beginning", "code"), [("", SAME), ("\0", DIFFERS)])
def test_the_text_of_a_rejected_call_is_of_the_answer(
    rows: list[Row], capsys: pytest.CaptureFixture[str], beginning: str, code: int
) -> None:
    """The text of a rejected call is part of the answer. The text is not shown."""
    position = last_text(rows, WHOLE)
    emitted = decode(rows[position - 1]).event
    assert isinstance(emitted, _EMITS)
    assert emitted.request is not None
    rejected = ev.CallRejected(
        session=WHOLE,
        request=emitted.request,
        reason="truncated",
        text=beginning + emitted.text,
        detail="cut off",
    )

    assert code == rerun(with_one_more(rows, position, rejected), WHOLE, None)
    out = capsys.readouterr().out
    assert (code == DIFFERS) == ("(call_rejected)\n  the text of a rejected call" in out)
    assert "\0" not in out


@pytest.mark.parametrize(
    ("kind", "what"),
    [(ev.BlockSealed, "bytes of the block"), (ev.SlabAcquired, "bytes of the slab")],
)
def test_other_bytes_are_named(
    rows: list[Row], capsys: pytest.CaptureFixture[str], kind: type[ev.Event], what: str
) -> None:
    """The sizes on record are what the engine measures, whatever the totals say."""

    def change(event: ev.Event) -> ev.Event:
        assert isinstance(event, ev.BlockSealed | ev.SlabAcquired)
        return attrs.evolve(event, bytes=event.bytes + 1)

    last = max(row.position for row in rows if row.kind == kind.kind and WHOLE in row.stream)
    forged = changed(rows, last, change)

    assert DIFFERS == rerun(forged, WHOLE, None)
    assert f"\n  {what}: the journal has " in capsys.readouterr().out


def crashed() -> list[Row]:
    """A session whose code failed before its first request."""
    made = Builder()
    made.start()
    made.propose(
        ev.SessionOpened(
            session="s1", tenant=TENANT, fingerprint=FINGERPRINT, group=None, named=False
        )
    )
    made.crash("s1")
    return made.rows


@pytest.mark.parametrize("journal", [broken("INV-5")[0], crashed()], ids=["INV-5", "CRASH"])
def test_nothing_to_run(capsys: pytest.CaptureFixture[str], journal: list[Row]) -> None:
    """
    A bug before the first pass: that nothing differs proves nothing, and no model is loaded for it.
    """
    assert NOTHING == rerun(journal, "s1", None)
    assert "nothing to run again: the journal has no pass of session s1" in capsys.readouterr().out
