"""The conversation of ``ops chat``, and its lines on the terminal. Pure: no terminal, no clock."""

from __future__ import annotations

import re
from typing import Literal

import attrs
import msgspec

from cairn.ops.common.output import printable

COMMANDS = {
    "help": ("", "this list"),
    "new": ("", "start a new conversation"),
    "again": ("", "ask for another answer; at temperature 0 or with --seed, the same one"),
    "edit": ("TEXT", "replace my last message by TEXT, and ask again"),
    "system": ("[TEXT]", "set the system message; without TEXT, remove it"),
    "think": ("", "let the model think before it answers; again, do not"),
    "why": ("", "explain what was reused for the last answer, and why not more"),
    "quit": ("", "leave, like Ctrl-D"),
}
"""Name of a chat command: its argument, and what it does."""

_OPEN, _CLOSE = "<think>\n", "\n</think>\n\n"
_BROKEN = "kv_cache_inv_violation"
_UNFORESEEN = "internal_error"
_TOO_LONG = "context_length_exceeded"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PREFILL = re.compile(r"prefill (\d+)(?:/(\d+))?")

# Control characters (C0 and C1) except the line feed and the tab, and those that change the writing
# direction. After a carriage return, new text would overwrite the line.
_STEERS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_STEERS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_HARMLESS = _STEERS | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def harmless(text: str) -> str:
    """Escape control characters, except line feeds and tabs."""
    return text.translate(_HARMLESS)


# --- responses ---------------------------------------------------------------------------------


class Delta(msgspec.Struct):
    """New parts of an answer."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """The numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int


class Cairn(msgspec.Struct):
    """What the server reports about the path."""

    path: str
    reused_tokens: int
    reason: str | None = None
    explanation: str | None = None


class Error(msgspec.Struct):
    """What the server reports about an error."""

    message: str
    code: str | None = None


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    cairn: Cairn | None = None
    error: Error | None = None


class Health(msgspec.Struct):
    """A server's health. Only Cairn has these fields."""

    model: str
    fingerprint: str
    journal_position: int


class StartingUp(msgspec.Struct):
    """The health of a server that starts."""

    status: Literal["starting"]
    step: str


class KeyRequired(msgspec.Struct):
    """The health of a server with API keys, for a request without one."""

    status: str
    api_key: Literal["required"]


# --- a conversation ----------------------------------------------------------------------------


@attrs.frozen
class Conversation:
    """
    The messages so far.

    Attributes:
        said: (role, text, thoughts) of each message; the user's and the assistant's alternate.
    """

    system: str | None = None
    said: tuple[tuple[str, str, str], ...] = ()

    def asking(self, text: str) -> Conversation:
        """The conversation with a message of the user."""
        return attrs.evolve(self, said=(*self.said, ("user", text, "")))

    def answered(self, text: str, thoughts: str) -> Conversation:
        """The conversation with an answer."""
        return attrs.evolve(self, said=(*self.said, ("assistant", text, thoughts)))

    def unanswered(self) -> Conversation:
        """The conversation without the last answer."""
        return attrs.evolve(self, said=self.said[:-1])

    def edited(self, text: str) -> Conversation:
        """The conversation with a different last message of the user, and without its answer."""
        return attrs.evolve(self, said=self.said[:-2]).asking(text)

    def messages(self) -> list[dict[str, str]]:
        """The messages of a request, with thoughts: the template decides whether to use them."""
        system = [("system", self.system, "")] if self.system else []
        return [
            {"role": role, "content": text} | ({"reasoning_content": thoughts} if thoughts else {})
            for role, text, thoughts in (*system, *self.said)
        ]


@attrs.define
class Answer:
    """
    An answer as it arrives.

    Attributes:
        text: without the thoughts.
        first_s: when the first text or thought arrived, in seconds since the request.
    """

    text: str = ""
    cairn: Cairn | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    thoughts: str = ""

    def take(self, chunk: Chunk, after_s: float) -> list[tuple[str, bool]]:
        """
        Add an event. Returns the new texts, and whether each is a thought.

        Args:
            after_s: when it arrived, in seconds since the request.
        """
        self.cairn = chunk.cairn or self.cairn
        self.usage = chunk.usage or self.usage
        new = []
        for choice in chunk.choices:
            new += [(choice.delta.reasoning_content, True), (choice.delta.content, False)]
            self.finish_reason = choice.finish_reason or self.finish_reason
        pieces = [(text, is_thought) for text, is_thought in new if text]
        if pieces and self.first_s is None:
            self.first_s = after_s
        for text, is_thought in pieces:
            if is_thought:
                self.thoughts += text
            else:
                self.text += text
        return pieces


class Shown:
    """Separates the thoughts and the text of an answer."""

    def __init__(self, *, styled: bool) -> None:
        """
        Args:
            styled: whether thoughts look different; otherwise they get tags.
        """
        self._before, self._behind = ("", "\n\n") if styled else (_OPEN, _CLOSE)
        self._thinks = False

    def take(self, text: str, is_thought: bool) -> str:
        """A piece of the answer as it is shown."""
        begins, ends = is_thought and not self._thinks, self._thinks and not is_thought
        self._thinks = is_thought
        return (self._before if begins else self._behind if ends else "") + text


# --- lines -------------------------------------------------------------------------------------


def read_line(line: str) -> tuple[str, str]:
    """
    The command of a line and its argument. For a message, the command is empty; a message that
    begins with a slash is typed with two.
    """
    text = line.strip()
    if text.startswith("//"):
        return "", text[1:]
    if not text.startswith("/"):
        return "", text
    # A tab or a line feed is possible if several lines were pasted.
    name, *rest = re.split(r"\s+", text[1:], maxsplit=1)
    return name or "help", " ".join(rest)


def help_text() -> str:
    """The list of commands and keys."""
    lines = [(f"/{name} {takes}".rstrip(), does) for name, (takes, does) in COMMANDS.items()]
    width = max(len(command) for command, _ in lines)
    return "\n".join(
        (
            *(f"{command:<{width}}  {does}" for command, does in lines),
            "Ctrl-C stops an answer; the text so far stays in the conversation.",
            "At the prompt it clears the line; pressed twice, it leaves.",
            "To begin a message with a slash, type two.",
        )
    )


def waiting_words(comment: str) -> str:
    """What the server is doing, by its keep-alive comment."""
    if comment == "writing":
        return "the model is writing"
    found = _PREFILL.search(comment)
    if found is None:
        return "waiting in the server's queue"
    done, total = found[1], found[2]
    return f"reading the prompt: {done} of {total} tokens" if total else "reading the prompt"


def summary(answer: Answer) -> str:
    """A turn in one line: the path, the reused tokens, and the time to first token."""
    parts = []
    if answer.cairn is not None:
        reason = f" ({answer.cairn.reason})" if answer.cairn.reason else ""
        parts.append(printable(answer.cairn.path + reason))
        total = f" of {answer.usage.prompt_tokens}" if answer.usage is not None else ""
        parts.append(f"{answer.cairn.reused_tokens}{total} tokens reused")
    if answer.first_s is not None:
        parts.append(f"first token after {answer.first_s * 1000:.0f} ms")
    if answer.finish_reason == "length" and answer.usage is not None:
        parts.append(f"cut off after {answer.usage.completion_tokens} tokens")
    return " · ".join(parts)


def refusal(error: Error, status: int | None, retry_after: str | None, options: str) -> str:
    """
    An error of the server, and what to do, in a sentence or two.

    Args:
        status: the HTTP status; None in mid-stream.
        retry_after: the value of the header.
        options: the options with which a command of `ops` finds this server, beginning with a
            space.
    """
    message = printable(error.message).rstrip(".")
    named = _UUID.search(message)
    kind = " ".join(str(part) for part in (status, error.code) if part is not None)
    if error.code == _BROKEN and named is not None:
        return (
            f"A cache invariant was violated in the server: bug id {named[0]}. "
            f"`ops replay {named[0]}{options}` shows what happened."
        )
    hint = ""
    if error.code == _UNFORESEEN and named is not None:
        hint = f" `ops tail --grep {named[0]}{options}` shows it."
    elif error.code == _TOO_LONG:
        hint = " /new starts a new conversation."
    elif retry_after is not None:
        hint = f" Try again in {printable(retry_after)} s."
    return f"The server did not answer ({printable(kind)}): {message}.{hint}"
