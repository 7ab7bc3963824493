"""`ops agents`: which there are, and what was said with one."""

import fcntl
from pathlib import Path
from typing import Any

from cairn.engine.answer.parts import Called, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.engine.prompt.turns import messages_text, parts_text
from cairn.journal import events as ev
from cairn.journal.rows.export import read_base
from tests.support.journals import NOTES, TENANT, Builder, agent_created, speaking

LOOK = '[{"type":"function","function":{"name":"look"}}]'


def created(name: str, tenant: str = "local", **fields: Any) -> ev.AgentCreated:
    """An agent that comes to be."""
    usual = {"tenant": tenant, "created_s": 1_767_225_600, "system": None}
    return agent_created(name, **{**usual, **fields})


class Agents(Builder):
    """A journal in which agents speak."""

    agent: tuple[str, str | None] | None = None

    def propose(self, *events: ev.Event) -> None:
        """Keep the turn of an agent ahead of the end of its request."""
        for event in events:
            if isinstance(event, ev.RequestFinished) and self.agent is not None:
                name, previous = self.agent
                super().propose(kept(event, name, previous))
            super().propose(event)


def kept(end: ev.RequestFinished, agent: str, previous: str | None) -> ev.TurnStored:
    """A turn with all that there can be in one."""
    call = Called(index=0, id="c1", name="look", arguments='{"far":true}')
    return ev.TurnStored(
        session=end.session,
        request=end.request,
        tenant="local",
        agent=agent,
        previous=previous,
        created_s=1_767_225_600,
        question=messages_text([Message(role="user", content="What is there?\n\x1b[31mred")]),
        answer=parts_text([Thought("Hm."), Said("A stone."), call]),
        note="",
        texts={},
        texts_at={},
    )


def journal() -> Builder:
    """An agent with a turn; a fork of it that does not persist; and another tenant's."""
    built = Agents()
    built.start()
    built.propose(created("review", system="Be brief.", tools=LOOK, max_context=900, model="m"))
    built.agent = ("review", None)
    built.turn("s1", "r1", ["What is there?"], range(1, 9), (20, 21))
    built.propose(created("aside", forked_from="review", head="r1", persist=False))
    built.propose(created("review", "alice"))
    return built


def sound() -> Builder:
    """An agent with a turn, a fork of it that does not persist, and another tenant's: all hold."""
    built = Builder()
    built.start()
    built.propose(created("notes", TENANT, max_context=900, model="m"))
    keeps = built.keeping(agent="notes", texts={}, texts_at={})
    built.turn(NOTES, "r1", ["What is there?"], range(1, 9), (20, 21), wrong=keeps)
    built.propose(created("aside", TENANT, forked_from="notes", head="r1", persist=False))
    built.propose(created("notes", "alice"))
    assert built.bug is None, built.bug
    return built


def lines(run: Any, *arguments: object) -> list[list[str]]:
    """The cells of a list of agents."""
    return [line.split("\t")[:9] for line in run("agents", *arguments).stdout.splitlines()]


def test_list(run, stored, tmp_path: Path):
    """
    All that are there, the last used one first, as they are on the running server; of one that
    died, as they will be at its next start.
    """
    folder = stored(sound().rows)
    head = ["agent", "tenant", "status", "turns", "context", "limit", "model", "persists"]
    alices = ["notes", "alice", "cold", "0", "0", "", "", "yes", ""]
    aside = ["aside", TENANT, "hot", "1", "10", "", "", "no", "notes"]
    notes = ["notes", TENANT, "hot", "1", "10", "900", "m", "yes", ""]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [[*head, "forked from"], alices, aside, notes] == lines(run)
    assert [alices, [*notes[:2], "cold", *notes[3:]]] == lines(run)[1:]
    exported = tmp_path / "journal.jsonl"
    exported.write_text(run("export").stdout)
    assert 4 == len(lines(run, exported))
    assert lines(run, exported) == lines(run, "list", exported)


def test_show(run, stored):
    """What it was created with and what was said; nothing of it steers a terminal."""
    stored(journal().rows)
    shown = run("agents", "show", "review", "--tenant", "local").stdout
    head, said = shown.split("\n\n")
    for words in ("agent:", "review", "10 tokens of 900", "agent/review", "look", "Be brief."):
        assert words in head
    assert (
        "turn 1: 2026-01-01 00:00:00.000Z, 10 tokens, ended by stop, request r1\n"
        "user:\n"
        "  What is there?\n"
        "  \\x1b[31mred\n"
        "assistant (thought):\n"
        "  Hm.\n"
        "assistant:\n"
        "  A stone.\n"
        "assistant (call):\n"
        '  look({"far":true})\n'
    ) == said


def test_an_agent_that_cannot_be_shown(run, stored):
    """One of several, or none: a sentence that says what to do."""
    stored(journal().rows)
    for arguments, words in (
        (("review",), "alice, local. Choose one with --tenant."),
        (("missing",), "There is no agent missing in"),
        (("review", "--tenant", "bob"), "There is no agent review of bob in"),
    ):
        result = run("agents", "show", *arguments)
        assert 2 == result.exit_code
        assert words in " ".join(result.stderr.split())


def test_an_agent_whose_first_rows_were_pruned(run, stored, tmp_path: Path):
    """It is listed and shown as before, from the journal and from an export, which is valid."""
    folder = stored(speaking().rows)
    before = [run("agents").stdout, run("agents", "show", "notes").stdout]
    assert 0 == run("journal", "prune", "--before", "2026-03-01").exit_code
    exported = tmp_path / "journal.jsonl"
    assert 0 == run("export", "-o", exported).exit_code
    for where in ((), (exported,)):
        assert before == [
            run("agents", *where).stdout,
            run("agents", "show", "notes", *where).stdout,
        ]
        assert 0 == run("verify", *where).exit_code
    session = run("replay", NOTES)
    assert 0 == session.exit_code
    assert ("r5" in session.stdout, "r4" in session.stdout) == (True, False)
    public = tmp_path / "public.jsonl"
    run("export", "--no-private", "-o", public)
    base = read_base(public)
    assert base is not None
    assert base.state is None
    assert 3 == run("verify", public).exit_code
    assert folder.exists()
