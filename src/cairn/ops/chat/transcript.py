"""What ``ops chat`` keeps and shows of a conversation. Pure: no terminal, no socket, no clock."""

from __future__ import annotations

import re
from typing import Literal

import attrs
import msgspec

from cairn.ops.common.output import printable

COMMANDS = {
    "help": ("", "this list"),
    "new": ("", "begin a new conversation"),
    "again": ("", "ask for the last answer once more"),
    "edit": ("TEXT", "put TEXT in the place of my last message, and ask again"),
    "system": ("[TEXT]", "set the system message; without TEXT, take it away"),
    "think": ("", "let the model think before it answers, or no longer"),
    "quit": ("", "leave, as Ctrl-D does"),
}
"""Name of a command of the chat: what it takes, and what it does."""

_OPEN, _CLOSE = "<think>\n", "\n</think>\n\n"
_BROKEN = "kv_cache_inv_violation"
_UNFORESEEN = "internal_error"
_TOO_LONG = "context_length_exceeded"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PREFILL = re.compile(r"prefill (\d+)(?:/(\d+))?")

# What steers a terminal, C0 and C1, but for the line's end and the tab; and what turns the
# direction of a line round. After a carriage return the next words would cover the last ones.
_STEERS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_STEERS |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_HARMLESS = _STEERS | {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def harmless(text: str) -> str:
    """A text of several lines in which nothing steers a terminal."""
    return text.translate(_HARMLESS)


# --- off the wire ------------------------------------------------------------------------------


class Delta(msgspec.Struct):
    """What is new of an answer."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    """The one choice of a chunk."""

    delta: Delta
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    """How many tokens there were."""

    prompt_tokens: int
    completion_tokens: int


class Cairn(msgspec.Struct):
    """What the server says of the path."""

    path: str
    reused_tokens: int
    reason: str | None = None


class Error(msgspec.Struct):
    """What the server says of an error."""

    message: str
    code: str | None = None


class Chunk(msgspec.Struct):
    """An event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    cairn: Cairn | None = None
    error: Error | None = None


class Health(msgspec.Struct):
    """What a server says of itself. No other server has just these."""

    model: str
    fingerprint: str
    journal_position: int


class KeyRequired(msgspec.Struct):
    """What a server with API keys says of itself to who has none."""

    status: str
    api_key: Literal["required"]


# --- a conversation ----------------------------------------------------------------------------


@attrs.frozen
class Conversation:
    """
    What was said so far.

    Attributes:
        said: (role, text, thoughts) of each message, the user's and the assistant's in turn.
    """

    system: str | None = None
    said: tuple[tuple[str, str, str], ...] = ()

    def asking(self, text: str) -> Conversation:
        """With a message of the user's."""
        return attrs.evolve(self, said=(*self.said, ("user", text, "")))

    def answered(self, text: str, thoughts: str) -> Conversation:
        """With an answer."""
        return attrs.evolve(self, said=(*self.said, ("assistant", text, thoughts)))

    def unanswered(self) -> Conversation:
        """Without the last answer."""
        return attrs.evolve(self, said=self.said[:-1])

    def edited(self, text: str) -> Conversation:
        """With another text in the place of the user's last message, without its answer."""
        return attrs.evolve(self, said=self.said[:-2]).asking(text)

    def messages(self) -> list[dict[str, str]]:
        """
        As a request has them. Thoughts go back too: whether they stay is the template's to say.
        """
        system = [("system", self.system, "")] if self.system else []
        return [
            {"role": role, "content": text} | ({"reasoning_content": thoughts} if thoughts else {})
            for role, text, thoughts in (*system, *self.said)
        ]


@attrs.define
class Answer:
    """
    An answer as it comes.

    Attributes:
        text: without the thoughts.
        first_s: when its first word or thought came, in seconds since it was asked for.
    """

    text: str = ""
    cairn: Cairn | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    thoughts: str = ""

    def take(self, chunk: Chunk, after_s: float) -> list[tuple[str, bool]]:
        """
        Add an event; gives the texts that are new, and whether each is a thought.

        Args:
            after_s: when it came, in seconds since it was asked for.
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
    """Puts between the thoughts and the words of an answer what shows where the ones end."""

    def __init__(self, *, styled: bool) -> None:
        """
        Args:
            styled: whether thoughts look different; otherwise tags stand around them.
        """
        self._before, self._behind = ("", "\n\n") if styled else (_OPEN, _CLOSE)
        self._thinks = False

    def take(self, text: str, is_thought: bool) -> str:
        """A piece of the answer, as it is shown."""
        begins, ends = is_thought and not self._thinks, self._thinks and not is_thought
        self._thinks = is_thought
        return (self._before if begins else self._behind if ends else "") + text


# --- lines for people --------------------------------------------------------------------------


def read_line(line: str) -> tuple[str, str]:
    """
    The command that a line is and what stands behind it; no command where it is a message. One that
    shall begin with a slash begins with two.
    """
    text = line.strip()
    if text.startswith("//"):
        return "", text[1:]
    if not text.startswith("/"):
        return "", text
    # Any space will do: a tab, or the line's end where several lines were pasted.
    name, *rest = re.split(r"\s+", text[1:], maxsplit=1)
    return name or "help", " ".join(rest)


def help_text() -> str:
    """What can be typed."""
    lines = [(f"/{name} {takes}".rstrip(), does) for name, (takes, does) in COMMANDS.items()]
    width = max(len(command) for command, _ in lines)
    return "\n".join(
        (
            *(f"{command:<{width}}  {does}" for command, does in lines),
            "Ctrl-C stops an answer. What it said by then stays in the conversation.",
            "At the prompt it clears the line; a second one right behind it leaves.",
            "A message that begins with a slash is typed with two.",
        )
    )


def waiting_words(comment: str) -> str:
    """What the server does while there is no answer yet, by its keep-alive."""
    if comment == "writing":
        return "the model writes"
    found = _PREFILL.search(comment)
    if found is None:
        return "waiting in the server's queue"
    done, total = found[1], found[2]
    return f"reading the prompt: {done} of {total} tokens" if total else "reading the prompt"


def summary(answer: Answer) -> str:
    """
    What became of a turn, in a line: the path, what was reused, how long the first token took.
    """
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
    What the server said of an error, and what to do, in a sentence or two.

    Args:
        status: of HTTP; None in the middle of a stream.
        retry_after: the seconds that the server wants to be left alone.
        options: what a command of `ops` needs to look at this server, with a space before it.
    """
    message = printable(error.message).rstrip(".")
    named = _UUID.search(message)
    told = " ".join(str(part) for part in (status, error.code) if part is not None)
    if error.code == _BROKEN and named is not None:
        return (
            f"The server broke an invariant of its cache: bug id {named[0]}. "
            f"`ops replay {named[0]}{options}` tells what happened."
        )
    hint = ""
    if error.code == _UNFORESEEN and named is not None:
        hint = f" `ops tail --grep {named[0]}{options}` shows it."
    elif error.code == _TOO_LONG:
        hint = " /new begins a new conversation."
    elif retry_after is not None:
        hint = f" Try again in {printable(retry_after)} s."
    return f"The server did not answer ({printable(told)}): {message}.{hint}"
