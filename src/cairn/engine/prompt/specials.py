"""
Special tokens that stand in a message's content are text, and not what the template means by them.

A template gives one text, in which its own ``<|im_end|>`` and one that a user, a web page or a tool
wrote are the same. So a mark is put into each of the latter before rendering, after its first
character. No special token is found across the mark. The rendered text is cut at the marks, which
thereby disappear, and its parts are tokenised one by one. A text without special tokens gets no
mark, and has the same ids as ever.

In an assistant's message the markers of thoughts and calls keep their meaning: the model wrote
them, and the client sends them back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import attrs

from cairn.engine.prompt.cuts import NotShown, library_object, longest_of
from cairn.engine.prompt.template import Conversation, Message

SpecialTokens = Literal["text", "control"]
"""What special tokens in a message are."""

MARK: Final = "\ufdd0"
"""A code point that Unicode keeps for uses like this one, and that no text may have."""

_INSTEAD: Final = "\ufffd"
_ESCAPED: Final = re.compile(r"\\ufdd0", re.IGNORECASE)
_TAG: Final = re.compile(r"<\S+>|\[\S+\]")
_PIPES: Final = re.compile(r"<\|\S+\|>")


class Specials:
    """Marks the special tokens in conversations."""

    def __init__(self, special: Collection[str], markers: Collection[str] = ()) -> None:
        """
        Args:
            special: the texts of the special tokens.
            markers: those that keep their meaning in an assistant's message.
        """
        # A token of one character cannot be cut.
        cut = [token for token in special if len(token) > 1]
        self._everywhere = _pattern(cut)
        self._in_answers = _pattern([token for token in cut if token not in markers])

    def marked(self, conversation: Conversation) -> Conversation:
        """The conversation with marks; itself if it has no special token."""
        messages = tuple(map(self._message, conversation.messages))
        tools = self._value(conversation.tools, self._everywhere)
        if messages == conversation.messages and tools == conversation.tools:
            return conversation
        return attrs.evolve(conversation, messages=messages, tools=tools)

    def _message(self, message: Message) -> Message:
        found = self._in_answers if message.role == "assistant" else self._everywhere
        return attrs.evolve(
            message,
            content=_marked(message.content, found),
            reasoning=self._value(message.reasoning, found),
            tool_calls=self._value(message.tool_calls, found),
            name=self._value(message.name, self._everywhere),
        )

    def _value(self, value: Any, found: re.Pattern[str] | None) -> Any:
        """A value of JSON with marks in its texts and names."""
        if isinstance(value, str):
            return _marked(value, found)
        if isinstance(value, Mapping):
            return {_marked(name, found): self._value(one, found) for name, one in value.items()}
        if isinstance(value, Sequence):
            return type(value)(self._value(one, found) for one in value)  # type: ignore[call-arg]
        return value


def specials_of(tokenizer: Any, markers: Collection[str]) -> Specials:
    """
    The special tokens of a tokenizer: those that it calls special, those in ``<|...|>``, the
    markers of answers, and what looks like a tag and is in its template. Others, such as HTML's
    tags and runs of white space, which some vocabularies have as tokens, are words.

    Args:
        tokenizer: mlx-lm's wrapper.
        markers: of thoughts and calls.
    """
    backend = library_object(tokenizer)
    if backend is None:
        return Specials(markers, markers)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    special = {*markers}
    for token in backend.get_added_tokens_decoder().values():
        text = token.content
        in_template = _TAG.fullmatch(text) is not None and text in template
        if not text.isspace() and (token.special or _PIPES.fullmatch(text) or in_template):
            special.add(text)
    return Specials(special, markers)


def unescaped(rendered: str) -> str:
    """A rendered text with the marks that a template wrote as JSON's escapes."""
    return _ESCAPED.sub(MARK, rendered)


def _pattern(tokens: list[str]) -> re.Pattern[str] | None:
    try:
        return re.compile(longest_of(tokens)) if tokens else None
    except NotShown:  # nested too deep for a tree
        longest_first = sorted(tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)))


def _marked(text: str, found: re.Pattern[str] | None) -> str:
    text = text.replace(MARK, _INSTEAD)
    # A token may come out of what a cut leaves of overlapping ones.
    while found is not None and found.search(text):
        text = found.sub(lambda token: token.group()[0] + MARK + token.group()[1:], text)
    return text
