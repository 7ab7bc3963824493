"""
An answer rendered as Markdown while it arrives, block by block.

A block that later text cannot change is printed for good. The last one is drawn again until it is
complete; of one that is higher than the terminal, the end is shown meanwhile.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar

from markdown_it import MarkdownIt
from rich import markdown as rich_markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.syntax import Syntax

from cairn.ops.chat.terminal.rendering import Wrapped
from cairn.ops.chat.transcript import harmless

REFRESH_HZ = 12
"""How often a block that is not complete is drawn again."""

# The terminal's own colours, without a background.
_CODE_THEME = "ansi_dark"
# HTML is text: a terminal cannot show it, and rich would drop it.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


class Markdown:
    """An answer as Markdown, after dim thoughts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._thoughts: Wrapped | None = None
        self._text = ""  # of the blocks that are not printed for good
        self._printed = False
        self._live: Live | None = None
        # Rich's own thread could draw between the two halves of a change.
        self._lock = threading.Lock()
        self._over = threading.Event()

    def feed(self, text: str, *, is_thought: bool) -> None:
        """Show more of the answer, or of the thoughts before it."""
        with self._lock:
            self._feed(text, is_thought=is_thought)

    def finish(self) -> None:
        """Show all of it for good. May be called again."""
        with self._lock:
            self._end_thoughts()
            self._end_text()

    def _feed(self, text: str, *, is_thought: bool) -> None:
        if is_thought:
            if self._thoughts is None:
                self._end_text()
                self._thoughts = Wrapped(self._console.width)
            self._dim(self._thoughts.feed(text))
            return
        if self._thoughts is not None:
            self._end_thoughts()
            self._console.out("", highlight=False)
        self._text += text
        if "\n" in text:
            self._print_complete()
        if self._live is None:
            self._live = self._begin()

    def _begin(self) -> Live:
        live = Live(
            # Renders the text that there is when it is drawn.
            _Tail(lambda: self._blocks(self._text)),
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        live.start(refresh=True)
        self._over = over = threading.Event()
        threading.Thread(target=self._refresh, args=(live, over), daemon=True).start()
        return live

    def _refresh(self, live: Live, over: threading.Event) -> None:
        """Draw what has arrived, a few times each second."""
        while not over.wait(1 / REFRESH_HZ):
            with self._lock:
                if not over.is_set():
                    live.refresh()

    def _print_complete(self) -> None:
        """Print the blocks that later text cannot change."""
        complete = self._text[: self._text.rfind("\n") + 1]
        begin = last_block(complete)
        if begin:
            # First, because the rest is drawn again below what is printed.
            self._text = self._text[begin:]
            self._print(complete[:begin])

    def _print(self, text: str) -> None:
        blocks = self._blocks(text)
        self._printed = True
        self._console.print(blocks, end="")

    def _blocks(self, text: str) -> _Blocks:
        return _Blocks(text, after_others=self._printed)

    def _end_text(self) -> None:
        text, self._text = self._text, ""
        if self._live is not None:
            self._over.set()
            self._live.stop()
            self._live = None
        if text:
            self._print(text)

    def _end_thoughts(self) -> None:
        if self._thoughts is not None:
            self._dim(self._thoughts.flush())
            self._console.out("", highlight=False)
            self._thoughts, self._printed = None, False

    def _dim(self, text: str) -> None:
        if text:
            self._console.out(text, style="dim", highlight=False, end="")
            self._console.file.flush()


def last_block(text: str) -> int:
    """Where the last block of a Markdown text begins; 0 if there is only one."""
    return len(text) - len(_blocks_of(text)[-1]) if text else 0


def _blocks_of(text: str) -> list[str]:
    """The blocks of a Markdown text. What comes before the first one belongs to it."""
    outer = (token for token in _PARSER.parse(text) if not token.level)
    begins = sorted({token.map[0] for token in outer if token.map})
    lines = text.splitlines(keepends=True)
    bounds = [0, *begins[1:], len(lines)]
    return ["".join(lines[begin:end]) for begin, end in itertools.pairwise(bounds)]


class _Blocks:
    """Blocks of Markdown with an empty line between them, and no blanks at the ends of lines."""

    def __init__(self, text: str, *, after_others: bool) -> None:
        self._text = text
        self._after_others = after_others

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        after_others = self._after_others
        for block in _blocks_of(self._text):
            lines = console.render_lines(_Rendered(block), options, pad=False)
            shown = _without_empty_ends([_trimmed(line) for line in lines])
            if shown and after_others:
                yield Segment.line()
            for line in shown:
                yield from line
                yield Segment.line()
            after_others = after_others or bool(shown)


class _Tail:
    """The end of a block, as much as fits on the terminal."""

    def __init__(self, blocks: Callable[[], _Blocks]) -> None:
        self._blocks = blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._blocks(), options, pad=False)
        shown = lines[-max(1, console.height - 2) :]
        for place, line in enumerate(shown):
            yield from line
            if place < len(shown) - 1:
                yield Segment.line()


class _Heading(rich_markdown.Heading):
    """A heading at the left, where the text is."""

    LEVEL_ALIGN: ClassVar = dict.fromkeys(rich_markdown.Heading.LEVEL_ALIGN, "left")


class _CodeBlock(rich_markdown.CodeBlock):
    """Code without margins, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=_CODE_THEME, word_wrap=True)


class _Rendered(rich_markdown.Markdown):
    """Markdown whose line breaks stay, as in a poem, and whose HTML is shown as text."""

    elements: ClassVar = {
        **rich_markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }

    def __init__(self, text: str) -> None:
        # Without links of the terminal, because those do not show where they lead.
        super().__init__(
            "", code_theme=_CODE_THEME, inline_code_theme=_CODE_THEME, hyperlinks=False
        )
        self.parsed = _PARSER.parse(text)
        for token in self.parsed:
            for part in token.children or ():
                part.content = harmless(part.content)  # an entity may be a control character
                if part.type == "softbreak":
                    part.type = "hardbreak"


def _without_empty_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    """The lines without empty ones at the beginning and the end."""
    full = [place for place, line in enumerate(lines) if line]
    return lines[full[0] : full[-1] + 1] if full else []


def _trimmed(line: Iterable[Segment]) -> list[Segment]:
    """A line without blanks at its end."""
    left = list(line)
    while left and not left[-1].control:
        last = left.pop()
        if text := last.text.rstrip():
            left.append(Segment(text, last.style))
            break
    return left
