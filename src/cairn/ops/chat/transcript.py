"""The lines of ``cairn chat`` on the terminal. Pure: no terminal, no clock."""

from __future__ import annotations

import re

import attrs

from cairn.ops.chat.replies import Cairn, Chunk, Error, Usage
from cairn.ops.common.output import printable
from cairn.ops.common.program import program

COMMANDS = {
    "help": ("", "this list"),
    "tour": ("", "see Cairn at work in two minutes: reuse, an edit, a restart, a flipped bit"),
    "new": ("", "start a new conversation"),
    "again": ("", "ask for another answer; at temperature 0 or with a seed, the same one"),
    "edit": ("[TEXT]", "replace my last message, and ask again; without TEXT, edit it here"),
    "system": ("[TEXT]", "set the system message; without TEXT, remove it"),
    "think": ("", "let the model think before it answers; again, do not"),
    "set": ("[NAME [VALUE]]", "show or set sampling parameters; without VALUE, the default again"),
    "model": ("[NAME]", "list the models, or answer with another one from now on"),
    "why": ("", "explain what was reused for the last answer, and why not more"),
    "sessions": ("", "list the chats that the server stores"),
    "resume": ("[ID]", "continue a stored chat; without ID, the last one"),
    "delete": ("ID", "delete a stored chat"),
    "save": ("[FILE]", "write this chat to a file: Markdown, or messages if it ends in .json"),
    "quit": ("", "leave, like Ctrl-D"),
}
"""Name of a chat command: its argument, and what it does."""

ALIASES = {"?": "help", "clear": "new", "bye": "quit", "exit": "quit"}
"""Other names of commands, which other chats use."""

_OPEN, _CLOSE = "<think>\n", "\n</think>\n\n"
_CONTINUES = "continuation"
_BROKEN = "kv_cache_inv_violation"
_UNFORESEEN = "internal_error"
_TOO_LONG = "context_length_exceeded"
_RELEASED = "agent_released"
_TOO_MANY = "too_many_agents"
_NOW_IS = re.compile(r"it is '([^']+)'")
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


# --- an answer ----------------------------------------------------------------------------------


@attrs.define
class Answer:
    """
    An answer as it arrives.

    Attributes:
        text: without the thoughts.
        first_s: when the first text or thought arrived, in seconds since the request.
        rate: tokens per second after the first one, as the server measured it; 0 if unknown.
    """

    text: str = ""
    cairn: Cairn | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    first_s: float | None = None
    thoughts: str = ""
    rate: float = 0.0

    def take(self, chunk: Chunk, after_s: float) -> list[tuple[str, bool]]:
        """
        Add an event. Returns the new texts, and whether each is a thought.

        Args:
            after_s: when it arrived, in seconds since the request.
        """
        self.cairn = chunk.cairn or self.cairn
        self.usage = chunk.usage or self.usage
        if chunk.timings is not None:
            self.rate = chunk.timings.predicted_per_second
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

QUOTES = '"""'
"""Begin and end a message of several lines."""

_LEADING = re.compile(rf"\s*(?:/\S+\s+)?{QUOTES}")


def is_open(text: str) -> bool:
    """Whether a message began with three quotes that are not closed yet."""
    found = _LEADING.match(text)
    return found is not None and QUOTES not in text[found.end() :]


def unquoted(text: str) -> str:
    """A message without the three quotes around it, which may follow a command."""
    found = _LEADING.match(text)
    if found is None:
        return text
    before = text[: found.end() - len(QUOTES)]
    inner, closed, rest = text[found.end() :].partition(QUOTES)
    return f"{before}{inner.strip()}{rest}" if closed else text


def read_line(line: str) -> tuple[str, str]:
    """
    The command of a line and its argument. For a message, the command is empty; a message that
    begins with a slash is typed with two.
    """
    text = unquoted(line).strip()
    if _LEADING.match(line) and not line.lstrip().startswith("/"):
        return "", text  # within quotes, a slash begins no command
    if text.startswith("//"):
        return "", text[1:]
    if not text.startswith("/"):
        return "", text
    # A tab or a line feed is possible if several lines were pasted.
    name, *rest = re.split(r"\s+", text[1:], maxsplit=1)
    return ALIASES.get(name, name) or "help", " ".join(rest)


def help_text() -> str:
    """The list of commands and keys."""
    lines = [(f"/{name} {takes}".rstrip(), does) for name, (takes, does) in COMMANDS.items()]
    width = max(len(command) for command, _ in lines)
    return "\n".join(
        (
            *(f"{command:<{width}}  {does}" for command, does in lines),
            f"Alt-Enter begins a new line, and so does Enter between {QUOTES} and {QUOTES}.",
            "Ctrl-C stops an answer; the text so far stays in the conversation.",
            "At the prompt it clears the line; pressed twice, it leaves.",
            "Tab completes commands. Up and down find earlier messages, also of earlier chats.",
            "Also: /? for /help, /clear for /new, /bye and /exit for /quit.",
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


_BAR = 20


def bar(part: int, whole: int, *, blocks: str = "█░") -> str:
    """
    A bar of what was reused.

    Args:
        blocks: the characters for a reused and for a computed part.
    """
    # A bar is full only if nothing was computed, and empty only if nothing was reused.
    cells = 0 if whole <= 0 else round(_BAR * part / whole)
    if 0 < part < whole:
        cells = min(max(cells, 1), _BAR - 1)
    return blocks[0] * cells + blocks[1] * (_BAR - cells)


def summary(answer: Answer, blocks: str = "") -> str:
    """
    A turn in one line: the path, the reused tokens, the time to the first token and the speed.

    Args:
        blocks: the characters of a bar; empty for none.
    """
    parts = []
    if answer.cairn is not None:
        reason = f" ({answer.cairn.reason})" if answer.cairn.reason else ""
        parts.append(printable(answer.cairn.path + reason))
        reused, drawn, total = answer.cairn.reused_tokens, "", ""
        if answer.usage is not None:
            total = f" of {answer.usage.prompt_tokens}"
            if blocks:
                drawn = f"{bar(reused, answer.usage.prompt_tokens, blocks=blocks)} "
        # Without this, a continuation that reuses nothing looks like a fault.
        early = answer.cairn.path == _CONTINUES and not reused
        why = " (nothing to reuse yet; see /why)" if early else ""
        parts.append(f"{drawn}{reused}{total} tokens reused{why}")
    if answer.first_s is not None:
        parts.append(f"first token after {answer.first_s * 1000:.0f} ms")
    if answer.rate:
        parts.append(f"{answer.rate:.{0 if answer.rate >= 10 else 1}f} tokens/s")
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
            f"`{program('ops')} replay {named[0]}{options}` shows what happened."
        )
    hint = ""
    if error.code == _UNFORESEEN and named is not None:
        hint = f" `{program('ops')} tail --grep {named[0]}{options}` shows it."
    elif error.code == _TOO_LONG:
        hint = " /new starts a new conversation."
    elif error.code == _RELEASED and (moved := _NOW_IS.search(message)) is not None:
        hint = f" /resume {moved[1]} continues it there."
    elif error.code == _TOO_MANY:
        hint = " /sessions lists the stored chats, /delete ID deletes one; --no-store stores none."
    elif retry_after is not None:
        hint = f" Try again in {printable(retry_after)} s."
    return f"The server did not answer ({printable(kind)}): {message}.{hint}"
