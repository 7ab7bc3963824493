"""Every chat is an agent of the server: it is continued, listed, forked, and deleted."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from cairn.actors.errors import AgentBusy, CannotRecord
from cairn.actors.requests.messages import Delta
from cairn.engine.answer.parts import Said
from cairn.engine.prompt.template import Message
from tests.http.agents.fake_agents import TURN
from tests.http.fake_service import ACCEPTED, FACTS, FINISHED, FakeService
from tests.ops.chat.conftest import faked, piped, script


def names(service: FakeService) -> list[str]:
    """The agents of the fake."""
    return [name for _, name in service.agents.held]


def turn(asked: str, answer: str):
    """A stored turn."""
    said = (Message(role="user", content=asked),)
    return attrs.evolve(TURN, asked=said, parts=(Said(answer),))


def test_a_chat_is_an_agent():
    """One for the whole conversation, with its system message; its session is the agent's."""
    with faked(script("A"), script("B")) as server:
        piped("one\ntwo\n", "--url", server.url, "--system", "Be kind.")
    (name,) = names(server.service)
    assert name.startswith("chat-")
    held = server.service.agents.held["local", name]
    assert ("Be kind.", True, 2) == (held.agent.system, held.agent.persist, len(held.turns))
    assert {f"agent/{name}"} == {command.session_name for command in server.service.commands}


def test_nothing_is_stored_for_a_chat_without_an_answer():
    """Neither without a message, nor if all of them failed."""
    with faked(refusal=CannotRecord(retry_after_s=5)) as server:
        piped("", "--url", server.url)
        piped("one\n", "--url", server.url)
    assert [] == names(server.service)


def test_a_chat_that_is_not_to_be_stored():
    """It is deleted at its end, and would end with the server."""
    with faked(script("A")) as server:
        piped("one\n/edit two\n", "--url", server.url, "--no-store")
    assert [] == names(server.service)
    assert 2 == len(server.service.commands)


def test_an_edit_leaves_the_chat_before_it():
    """The edited conversation is a fork, and the next turn goes on from it."""
    with faked(script("A"), script("B"), script("C"), script("D")) as server:
        piped("one\ntwo\n/edit zwei\nthree\n", "--url", server.url)
    before, after = names(server.service)
    said = [
        [one.asked[0].content for one in server.service.agents.held["local", name].turns]
        for name in (before, after)
    ]
    assert [["one", "two"], ["one", "zwei", "three"]] == said


def test_the_last_chat_is_continued():
    """Only chats are: an agent of another program is not."""
    with faked(script("A"), script("B")) as server:
        server.service.agents.have("review", turn("code", "fine"))
        server.service.agents.have("chat-1", turn("one", "A"), system="Be kind.")
        result = piped("two\n", "--url", server.url, "--continue")
    assert "Continuing chat-1, 2 messages so far. The last:\n> one\n" in result.stderr
    said = [("system", "Be kind."), ("user", "one"), ("assistant", "A"), ("user", "two")]
    assert [said] == server.asked()
    assert ["review", "chat-1"] == names(server.service)


@pytest.mark.parametrize("named", ["chat-12", "12", "chat-123"])
def test_a_chat_is_resumed_by_its_id(named: str):
    """Or by how it begins."""
    with faked(script("B")) as server:
        for name in ("chat-123", "chat-345"):
            server.service.agents.have(name, turn(name, "A"))
        result = piped("two\n", "--url", server.url, "--resume", named)
    assert 0 == result.exit_code, result.stderr
    assert ("user", "chat-123") == server.asked()[0][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--continue",), "There is no earlier chat on this server."),
        (("--resume", "x"), "There is no chat x; /sessions lists them."),
        (("--resume", "chat-"), "chat- may be any of chat-1"),
        (("--resume", "tools"), "tools calls tools, which a chat on a terminal cannot answer."),
    ],
)
def test_a_chat_that_cannot_be_resumed(options: tuple[str, ...], said: str):
    """The sentence says why, and nothing is sent."""
    with faked() as server:
        agents = server.service.agents
        if options != ("--continue",):
            agents.have("chat-1", TURN)
            agents.have("chat-2", TURN)
        agents.have("tools", TURN, tools=({"type": "function"},))
        result = piped("Hello\n", "--url", server.url, *options)
    assert (2, "", []) == (result.exit_code, result.stdout, server.asked())
    assert said in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--continue", "--resume", "x"),
        ("--continue", "--system", "x"),
        ("--resume",),
    ],
)
def test_options_that_exclude_each_other(options: tuple[str, ...]):
    """A usage error, before anything is asked."""
    assert 2 == piped("", "--url", "127.0.0.1:1", *options).exit_code


def test_stored_chats_are_listed():
    """The last used one first, with its first words; empty ones are left out."""
    with faked() as server:
        server.service.agents.have("chat-1", turn("What is\na cairn? " * 9, "A"))
        server.service.agents.have("chat-2")
        result = piped("/sessions\n", "--url", server.url)
    line = result.stderr.splitlines()[-1]
    assert "chat-1" in line
    assert "1 turn  What is a cairn? What is" in line
    assert line.endswith("…")
    assert "chat-2" not in result.stderr


def test_a_chat_is_resumed_and_deleted_by_commands():
    """By the number in the list, too."""
    lines = "/sessions\n/resume 1\ntwo\n/delete chat-1\n/delete 1\n"
    with faked(script("B")) as server:
        server.service.agents.have("chat-1", turn("one", "A"))
        result = piped(lines, "--url", server.url)
    assert "chat-1 was deleted. New conversation." in result.stderr
    assert [("user", "one"), ("assistant", "A"), ("user", "two")] == server.asked()[0]
    assert [] == names(server.service)
    assert 1 == result.exit_code  # it was deleted before


def test_a_chat_that_was_continued_elsewhere():
    """This one forks: an answer follows the messages that the user sees."""
    with faked(script("A"), script("B")) as server:
        service = server.service
        with_more: list[str] = []

        def go_on(name: str) -> None:
            held = service.agents.held["local", name]
            turns = (*held.turns, turn("elsewhere", "X"))
            service.agents.held["local", name] = attrs.evolve(held, turns=turns)
            with_more.append(name)

        # The first turn is stored before its last reply is sent.
        service.agents.on_store = go_on
        piped("one\ntwo\n", "--url", server.url)
    assert [("user", "one"), ("assistant", "A"), ("user", "two")] == server.asked()[1]
    assert 2 == len(names(service))


def test_a_chat_that_was_deleted_elsewhere():
    """It is stored again, which is said."""
    with faked(script("A"), script("B")) as server:
        service = server.service
        service.agents.on_store = lambda name: service.agents.held.pop(("local", name))
        result = piped("one\ntwo\n", "--url", server.url)
    assert "was deleted on the server. This chat gets another name." in result.stderr
    assert [("user", "one"), ("assistant", "A"), ("user", "two")] == server.asked()[1]


def test_a_chat_that_was_handed_over():
    """The chat says with which command it goes on, on the other node."""
    with faked(script("A"), script("B")) as server:
        agents = server.service.agents

        def hand_over(name: str) -> None:
            agents.held.pop(("local", name))
            agents.released["local", name] = "n2.chat"

        agents.on_store = hand_over
        result = piped("one\ntwo\n", "--url", server.url)
        # Another node's chat is not in the list; the server, or its router, is asked.
        other = piped("three\n", "--resume", "n2.chat", "--url", server.url)
    assert "/resume n2.chat continues it there." in result.stderr
    assert "'n2.chat' not found" in other.stderr
    assert 1 == len(server.asked())


def test_an_agent_that_is_busy(monkeypatch: pytest.MonkeyPatch):
    """The last answer was stopped a moment ago: the chat waits until the server has noticed."""
    with faked(script("A")) as server:
        service = server.service
        service.refusal = AgentBusy("chat-1", "is answering another request")

        def sleep(_: float) -> None:
            service.refusal = None

        monkeypatch.setattr("cairn.ops.chat.turns.time.sleep", sleep)
        result = piped("one\n", "--url", server.url)
    assert (0, "A\n") == (result.exit_code, result.stdout)
    assert 2 == len(service.commands)


# --- one question --------------------------------------------------------------------------------


def test_one_question():
    """Its answer alone goes to stdout; the chat is stored, and can be continued."""
    with faked(script("A"), script("B")) as server:
        result = piped("", "--url", server.url, "what", "is it?")
        again = piped("", "--url", server.url, "--continue", "And then?")
    assert (0, "A\n") == (result.exit_code, result.stdout)
    assert result.stderr.startswith("new_session (cold_start) · 128 of 2048 tokens reused")
    assert (0, "B\n") == (again.exit_code, again.stdout)
    said = [("user", "what is it?"), ("assistant", "A"), ("user", "And then?")]
    assert said == server.asked()[1]


def test_one_question_about_what_comes_through_a_pipe():
    """Which is put before it; - is all of it."""
    with faked(script("A")) as server:
        piped("a\nb\n", "--url", server.url, "Summarise.")
        piped("a\n\nb\n", "--url", server.url, "-")
    assert [[("user", "a\nb\n\nSummarise.")], [("user", "a\n\nb")]] == server.asked()


def test_an_empty_question():
    """Is refused before anything is asked."""
    with faked() as server:
        result = piped("\n", "--url", server.url, "-")
    assert (2, []) == (result.exit_code, server.asked())
    assert "The question is empty." in result.stderr


def test_one_question_that_fails():
    """Exit code 1, and the sentence on stderr."""
    with faked(refusal=CannotRecord(retry_after_s=5)) as server:
        result = piped("", "--url", server.url, "Hello")
    assert (1, "") == (result.exit_code, result.stdout)
    assert "503 journal_stalled" in result.stderr


# --- through a pipe ------------------------------------------------------------------------------


def test_a_message_of_several_lines_through_a_pipe():
    """Between three quotes."""
    with faked(script("A")) as server:
        piped('"""one\n/two\n"""\nthree\n', "--url", server.url)
    assert [("user", "one\n/two"), ("user", "three")] == [asked[-1] for asked in server.asked()]


def test_quotes_without_an_end():
    """Are an error: nothing is sent."""
    with faked() as server:
        result = piped('"""one\ntwo\n', "--url", server.url)
    assert (1, []) == (result.exit_code, server.asked())
    assert 'The message that begins with """ has no end' in result.stderr


def test_sampling_parameters_can_be_set():
    """From the next message on, and taken back; a wrong value changes nothing."""
    with faked(script("A")) as server:
        piped("/set temperature 0.5\n/set top_k 7\none\n", "--url", server.url, "--seed", 3)
        piped("/set seed\ntwo\n", "--url", server.url, "--seed", 3)
        result = piped("/set temperature 999\nthree\n", "--url", server.url)
    first, second = server.service.commands
    assert (0.5, 7, 3) == (first.sampling.temperature, first.sampling.top_k, first.seed)
    assert None is second.seed
    assert 1 == result.exit_code
    assert "Nothing was changed." in result.stderr


def test_models_are_listed_and_chosen():
    """By name; one that is not served is named with what to do."""
    with faked(script("A")) as server:
        server.service.others["qwen"] = attrs.evolve(FACTS, model="qwen")
        result = piped("/model\n/model qwen\none\n", "--url", server.url)
        unknown = piped("/model nope\n", "--url", server.url)
    assert "* cairn/small-1  loaded\n  qwen  not loaded\n" in result.stderr
    assert "qwen answers from the next message on, which is loaded first." in result.stderr
    assert "qwen" == server.service.commands[0].requested_model
    assert (1, True) == (unknown.exit_code, "nope is not served at" in unknown.stderr)


@pytest.mark.parametrize("name", ["chat.md", "chat.json"])
def test_a_chat_is_written_to_a_file(tmp_path: Path, name: str):
    """As Markdown or as messages; a file that exists is left alone."""
    path = tmp_path / name
    with faked(script("A")) as server:
        lines = f"one\n/save {path}\n/save {path}\n"
        result = piped(lines, "--url", server.url, "--system", "Be kind.")
        nothing = piped("/save\n", "--url", server.url)
    assert (1, 1) == (result.exit_code, nothing.exit_code)
    assert f"{path} exists. Nothing was written; choose another name." in result.stderr
    assert 0o600 == path.stat().st_mode & 0o777
    if path.suffix == ".md":
        assert "## System\n\nBe kind.\n\n## You\n\none\n\n## Model\n\nA\n" == path.read_text()
    else:
        assert ["system", "user", "assistant"] == [
            one["role"] for one in json.loads(path.read_text())
        ]


def test_a_chat_cannot_be_written_for_a_user_that_there_is_not():
    """The message says why."""
    with faked(script("A")) as server:
        result = piped("one\n/save ~no-such-user-here/x\n", "--url", server.url)
    assert 1 == result.exit_code
    words = "~no-such-user-here/x names a user that there is not. Nothing was written."
    assert words in result.stderr


def test_the_speed_is_shown_if_it_was_measured():
    """The server's own figure."""
    deltas = (ACCEPTED, Delta(parts=(Said("A"),)), FINISHED)
    with faked(deltas) as server:
        assert "tokens/s" not in piped("one\n", "--url", server.url).stderr
