"""A conversation continues even if its client drops the thinking, or switches it on and off."""

from __future__ import annotations

import attrs
import pytest

from cairn.actors.requests.messages import Generate
from cairn.engine.answer import parts as answer
from cairn.engine.answer.parts import Called
from cairn.engine.prompt.template import Conversation, Message
from cairn.journal import events as ev
from tests.gate.conversation import words
from tests.support.in_process_server import Said, ask, generate, wait_idle
from tests.support.prewarm_conversation import Journaled

pytestmark = pytest.mark.trio

C = 64


def onward(before: Generate, said: Said, thought: str | None, *, thinks: bool = True) -> Generate:
    """The turn after an answer, with the thinking that the client sends back for it."""
    conversation = before.conversation
    assert conversation is not None
    more = (
        Message(role="assistant", content=said.text, reasoning=thought),
        Message(role="user", content=words(len(conversation.messages), 30)),
    )
    return attrs.evolve(
        before,
        conversation=attrs.evolve(
            conversation,
            messages=(*conversation.messages, *more),
            template={"enable_thinking": thinks},
        ),
    )


def without_thoughts(command: Generate) -> Generate:
    """The same conversation without any thinking."""
    assert command.conversation is not None
    messages = tuple(attrs.evolve(one, reasoning=None) for one in command.conversation.messages)
    return attrs.evolve(command, conversation=attrs.evolve(command.conversation, messages=messages))


async def test_turns_with_and_without_thoughts_are_one_session(setup: Journaled) -> None:
    """
    Turns with and without earlier thinking are one session, which reuses all but the last chunk and
    the new tokens, because the template renders both alike.
    """
    first = generate(
        Conversation(messages=(Message(role="user", content=words(1, 60)),)), max_tokens=4
    )
    async with setup.serving() as server:
        said = await ask(server, first)
        session = said.accepted.session
        second = onward(first, said, "It seems so.")
        said = await ask(server, second)
        before = said.accepted.prompt_tokens
        await wait_idle(server)
        said = await ask(server, onward(without_thoughts(second), said, None))
        assert ("continuation", session) == (said.accepted.path, said.accepted.session)
        assert said.finished.cached_tokens >= before // C * C
    assert setup.is_valid()


async def test_an_answer_that_its_client_began(setup: Journaled) -> None:
    """
    A client sends the beginning of an answer, of a new one and of one that was cut off, and then
    the whole with its next message: all of it is one session, and little is computed again.
    """
    asked = generate(
        Conversation(messages=(Message(role="user", content=words(1, 60)),)), max_tokens=4
    )
    talk = asked.conversation
    assert talk is not None

    def begun(text: str) -> Generate:
        said = Message(role="assistant", content=text)
        messages = (*talk.messages, said)
        return attrs.evolve(
            asked, conversation=attrs.evolve(talk, messages=messages, continued=True)
        )

    async with setup.serving() as server:
        session, text = "", "It seems that "
        for _ in range(2):
            said = await ask(server, begun(text))
            session = session or said.accepted.session
            assert session == said.accepted.session
            assert said.text
            before, text = said.accepted.prompt_tokens, text + said.text
            await wait_idle(server)
        assert ("continuation", None) == (said.accepted.path, said.accepted.reason)
        whole = attrs.evolve(said, parts=(answer.Said(text),))
        said = await ask(server, onward(asked, whole, None))
        assert ("continuation", session) == (said.accepted.path, said.accepted.session)
        assert said.finished.cached_tokens >= before // C * C
    assert setup.is_valid()


async def test_a_turn_that_may_call_nothing(setup: Journaled) -> None:
    """
    It has the same prompt as the others, continues from them and is continued. A call in its answer
    is text, and the token that begins one is all but forbidden.
    """
    tool = {"type": "function", "function": {"name": "weigh_stone"}}
    asked = generate(
        Conversation(messages=(Message(role="user", content=words(1, 60)),), tools=(tool,)),
        max_tokens=26,
    )
    async with setup.serving() as server:
        said = await ask(server, asked)
        session = said.accepted.session
        assert any(isinstance(part, Called) for part in said.parts)
        for calls in (False, True):
            await wait_idle(server)
            before = said.accepted.prompt_tokens
            asked = onward(asked, said, None)
            assert asked.conversation is not None
            asked = attrs.evolve(asked, conversation=attrs.evolve(asked.conversation, calls=calls))
            said = await ask(server, asked)
            assert calls == any(isinstance(part, Called) for part in said.parts)
            assert ("continuation", session) == (said.accepted.path, said.accepted.session)
            assert said.finished.cached_tokens >= before // C * C
    biases = [event.sampling["logit_bias"] for event in setup.events(ev.RequestReceived)]
    assert [[], [[ord("x"), -100.0]], []] == [[list(one) for one in bias] for bias in biases]
    assert setup.is_valid()


async def test_thinking_that_is_switched(setup: Journaled) -> None:
    """On, off and on again is one session, although the prompts end differently."""
    asked = generate(
        Conversation(
            messages=(Message(role="user", content=words(1, 60)),),
            template={"enable_thinking": True},
        ),
        max_tokens=4,
    )
    async with setup.serving() as server:
        said = await ask(server, asked)
        session = said.accepted.session
        for thinks in (False, True, False):
            before = said.accepted.prompt_tokens
            await wait_idle(server)
            asked = onward(asked, said, None, thinks=thinks)
            said = await ask(server, asked)
            assert ("continuation", session) == (said.accepted.path, said.accepted.session)
            assert said.finished.cached_tokens >= before // C * C - C
    assert setup.is_valid()
