"""
The conversation of a chat, and which part of it the server stores. Pure.

A chat is an agent of the server. What the agent does not have yet (an answer that was stopped, or
everything after the system message changed) is sent with the next message. An edit leaves the
agent as it is: the next turn forks it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cairn.ops.chat.replies import StoredMessage, StoredTurn


@attrs.frozen
class Message:
    """A message: its role, its text, and for an answer its thoughts."""

    role: str
    text: str
    thoughts: str = ""

    def sent(self) -> dict[str, str]:
        """As it is sent, with thoughts: the template decides whether to use them."""
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        return {"role": self.role, "content": self.text} | thoughts


@attrs.frozen
class Conversation:
    """
    The messages so far.

    Attributes:
        system: the system message.
        said: the others.
        agent: that stores the conversation; None before the first answer.
        agent_turns: how many turns the agent has.
        ends: for each of its turns that this conversation begins with, how many messages of
            ``said`` come before the turn's end.
    """

    system: str | None = None
    said: tuple[Message, ...] = ()
    agent: str | None = None
    agent_turns: int = 0
    ends: tuple[int, ...] = ()

    @classmethod
    def stored(cls, agent: str, system: str | None, turns: Sequence[StoredTurn]) -> Conversation:
        """The conversation of an agent."""
        said: list[Message] = []
        ends: list[int] = []
        for turn in turns:
            said += [_message(one) for one in (*turn.messages, turn.answer)]
            ends.append(len(said))
        return cls(system, tuple(said), agent, len(ends), tuple(ends))

    @property
    def question(self) -> str | None:
        """The user's last message; None if there is none."""
        place = self._question()
        return None if place is None else self.said[place].text

    @property
    def must_fork(self) -> bool:
        """Whether the agent has turns that this conversation has not."""
        return self.agent is not None and len(self.ends) < self.agent_turns

    def unsent(self) -> list[dict[str, str]]:
        """The messages that the agent does not have yet, as they are sent."""
        return [one.sent() for one in self.said[self.ends[-1] if self.ends else 0 :]]

    def asking(self, text: str) -> Conversation:
        """With a message of the user."""
        return attrs.evolve(self, said=(*self.said, Message("user", text)))

    def edited(self, text: str) -> Conversation:
        """With a different last message of the user, and without its answer."""
        place = self._question()
        assert place is not None
        ends = tuple(end for end in self.ends if end <= place)
        return attrs.evolve(self, said=self.said[:place], ends=ends).asking(text)

    def answered(self, text: str, thoughts: str, *, stored: bool) -> Conversation:
        """
        With an answer.

        Args:
            stored: whether the agent has it, and all messages before it.
        """
        longer = attrs.evolve(self, said=(*self.said, Message("assistant", text, thoughts)))
        if not stored:
            return longer
        ends = (*self.ends, len(longer.said))
        return attrs.evolve(longer, ends=ends, agent_turns=len(ends))

    def with_turns(self, agent_turns: int) -> Conversation:
        """With the number of turns that its agent has by now."""
        return attrs.evolve(self, agent_turns=agent_turns, ends=self.ends[:agent_turns])

    def in_agent(self, agent: str) -> Conversation:
        """Stored by an agent that has exactly the turns that this conversation begins with."""
        return attrs.evolve(self, agent=agent, agent_turns=len(self.ends))

    def in_no_agent(self) -> Conversation:
        """Not stored: the next message sends everything."""
        return attrs.evolve(self, agent=None, agent_turns=0, ends=())

    def with_system(self, text: str | None) -> Conversation:
        """With another system message. An agent cannot change its own, so the chat gets another."""
        return attrs.evolve(self.in_no_agent(), system=text)

    def _question(self) -> int | None:
        places = [place for place, one in enumerate(self.said) if one.role == "user"]
        return places[-1] if places else None


def as_markdown(conversation: Conversation) -> str:
    """The conversation as a Markdown document."""
    parts = [("System", conversation.system)] if conversation.system else []
    names = {"user": "You", "assistant": "Model"}
    parts += [(names.get(one.role, one.role), one.text) for one in conversation.said]
    return "\n\n".join(f"## {name}\n\n{text}" for name, text in parts) + "\n"


def as_messages(conversation: Conversation) -> list[dict[str, str]]:
    """The conversation as the messages of a chat completion."""
    system = [Message("system", conversation.system)] if conversation.system else []
    return [one.sent() for one in (*system, *conversation.said)]


def _message(stored: StoredMessage) -> Message:
    return Message(stored.role, stored.content, stored.reasoning_content)
