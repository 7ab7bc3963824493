"""
A picture of path decisions, drawn from a journal: a row a request, a bar of its prompt's tokens.

``python -P tools/path_picture.py -o docs/pictures/paths.svg`` starts a server with the built-in
model in a directory of its own, holds a conversation with it that takes the branches, stops it, and
draws its journal. ``--journal FILE`` draws another one instead: a server's ``journal.db`` or what
`ops export` wrote, with its first requests, into ``paths.svg`` of the current directory.

Everything in the picture is read from the journal by ``cairn.journal``; only the words about what
the client did come from the conversation below.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import attrs

from cairn.actors.journal_keys import KeyFile
from cairn.journal import events as ev
from cairn.journal.paths import common_length
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row
from cairn.journal.rows.database.urls import sqlite_url
from cairn.journal.rows.export import read_export
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.state import State

THE_PICTURE = Path("docs/pictures/paths.svg")
"""The documentation's, which is drawn from the conversation below and from no other journal."""

# --- the conversation ----------------------------------------------------------------------------

GUIDE = (
    "You are a guide in the hills. Describe the way from cairn to cairn, name what can be seen "
    "from each of them, and say how long the next leg takes on foot. Answer in short sentences, "
    "and never invent a path that is not on the map. When the weather turns, say so first, then "
    "say which shelter is the nearest and which stream must be crossed to get there."
)
MAP = {
    "type": "function",
    "function": {
        "name": "look_at_map",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
SETTLED_S = 1.5


def converse(url: str) -> list[str]:
    """Hold the conversation that the picture shows; returns what the client did in each request."""
    said: list[str] = []

    def ask(did: str, messages: list[dict[str, str]], **more: Any) -> list[dict[str, str]]:
        body = {"messages": messages, "tools": [MAP], "max_tokens": 64, "seed": 1, **more}
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=120) as answered:
            message = json.load(answered)["choices"][0]["message"]
        said.append(did)
        time.sleep(SETTLED_S)  # as long as a person takes to read, which is enough to settle
        return [*messages, {"role": "assistant", "content": message["content"]}]

    def user(messages: list[dict[str, str]], words: str) -> list[dict[str, str]]:
        return [*messages, {"role": "user", "content": words}]

    first = [
        {"role": "system", "content": GUIDE},
        {"role": "user", "content": "Where do we start?"},
    ]
    one = ask("begins a conversation", first)
    two = ask("continues it", user(one, "And from the first cairn? " * 4))
    asked = user(two, "What if the stream is too high to cross? " * 6)
    three = ask("continues it", asked)
    ask(
        "edits its second message",
        [*user(one, "And after the ford, to the left? " * 4), *three[4:6]],
    )
    other = {"role": "system", "content": GUIDE.replace("hills", "Alps")}
    ask("changes the system prompt", [other, *asked[1:]])
    ask("sends the third request again", asked)
    ask("the same, with cache_prompt: false", asked, cache_prompt=False)
    ask("continues with a long message", user(three, "Read this and tell me what to pack. " * 24))
    return said


def journal_of_a_conversation(directory: Path) -> tuple[list[Row], list[str]]:
    """Serve the built-in model, hold the conversation, stop, and read what was recorded."""
    command = [sys.executable, "-P", "-m", "cairn.ops", "serve", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--data-dir", str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        greeting = server.stdout.readline()
        if "http://" not in greeting:
            raise SystemExit("The server did not start; see its output above.")
        said = converse(greeting.split()[-1])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return list(read_rows(directory / "journal.db")), said


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a journal: an SQLite file or an export."""
    with path.open("rb") as file:
        is_database = file.read(16) == b"SQLite format 3\0"
    if not is_database:
        yield from read_export(path)
        return
    keys = KeyFile.read(path.with_name("keys.db"))
    store = SqlStore.open(sqlite_url(path), read_only=True, keys=keys)
    try:
        yield from store.read()
    finally:
        store.close()
        if keys is not None:
            keys.close()


# --- what the journal says -----------------------------------------------------------------------


@attrs.define(kw_only=True)
class RequestBar:
    """
    One request, in tokens.

    Attributes:
        same: how many tokens from the front are those of the conversation that it was compared
            with; None where there was none.
        exchanged: whether its session's slab was too small and was exchanged for a larger one.
    """

    session: str
    path: str
    reason: str | None
    part: str | None
    prompt: int
    from_slab: int
    from_blocks: int
    same: int | None
    prefilled: int = 0
    generated: int = 0
    exchanged: bool = False

    @property
    def why(self) -> str:
        """The decision, in the words of the journal."""
        if self.reason is None:
            return f"{self.path}, in a larger slab" if self.exchanged else self.path
        return f"{self.path}: {self.reason}" + (f", {self.part}" if self.part else "")


def request_bars(rows: Iterable[Row]) -> tuple[list[RequestBar], int]:
    """The requests of a journal in their order, and the tokens per block."""
    found: dict[str, RequestBar] = {}
    chunk = 0

    def watch(recorded: ev.Recorded, state: State) -> None:
        nonlocal chunk
        event = recorded.event
        match event:
            case ev.ModelLoaded():
                chunk = event.block_tokens
            case ev.PathSelected():
                request = state.session(event.session).request
                assert request is not None
                last = state.session(event.nearest).last if event.nearest else None
                found[event.request] = RequestBar(
                    session=event.session,
                    path=event.path,
                    reason=event.reason,
                    part=event.diverged_part,
                    prompt=len(request.prompt_ids),
                    from_slab=event.tokens_from_slab,
                    from_blocks=event.blocks_from_pool * chunk + event.tokens_from_partial,
                    same=common_length(last.sequence, request.prompt_ids) if last else None,
                )
            case ev.CacheExtended(step="prefill") if event.request:
                found[event.request].prefilled += event.end - event.start
            case ev.SlabReleased():
                request = state.session(event.session).request
                if request is not None:
                    found[request.ask.request].exchanged = True
            case ev.RequestFinished():
                found[event.request].generated = event.answer_tokens
            case _:
                pass  # no part of the picture

    report = replay(rows, watch=watch)
    if report.findings:
        raise SystemExit(
            "This journal violates an invariant, so it is not drawn; see `ops verify`."
        )
    return list(found.values()), chunk


# --- the picture ---------------------------------------------------------------------------------

WIDTH, TOP, ROW = 1060, 108, 58
BAR_LEFT, BAR_RIGHT, BAR = 330, 940, 22

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .small { font-size: 12px; fill: #59636e }
  .title { font-size: 16px; font-weight: 600 }
  .in { font-size: 12px; fill: #fff; text-anchor: middle }
  .dark-in { font-size: 12px; fill: #1f2328; text-anchor: middle }
  .page { fill: #fff; stroke: #d1d9e0 }
  .from_slab { fill: #0f766e } .from_blocks { fill: #2563eb } .prefilled { fill: #f59e0b }
  .generated { fill: #e5e7eb; stroke: #9ca3af; stroke-dasharray: 3 2 }
  .cut { stroke: #1f2328; stroke-opacity: .28 } .same { fill: #cf222e }
  .line { stroke: #d1d9e0 }
"""
DARK = """
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .in { fill: #fff } .dark-in { fill: #1f2328 }
  .page { fill: #0d1117; stroke: #3d444d }
  .from_slab { fill: #0d9488 } .from_blocks { fill: #3b82f6 } .prefilled { fill: #d97706 }
  .generated { fill: #8b949e; stroke: #c9d1d9 }
  .cut { stroke: #0d1117; stroke-opacity: .45 } .same { fill: #ff7b72 }
  .line { stroke: #3d444d }
"""

LEGEND = (
    ("from_slab", "reused: already in the session's slab"),
    ("from_blocks", "reused: copied from sealed blocks"),
    ("prefilled", "computed"),
    ("generated", "generated"),
)


def picture(requests: Sequence[RequestBar], chunk: int, said: Sequence[str]) -> str:
    """The picture as SVG, for light pages and dark ones."""
    scale = (BAR_RIGHT - BAR_LEFT) / max(one.prompt + one.generated for one in requests)
    sessions = dict.fromkeys(one.session for one in requests)
    names = {session: chr(ord("A") + place % 26) for place, session in enumerate(sessions)}
    parts = [*_head(chunk)]
    for place, one in enumerate(requests):
        y = TOP + place * ROW
        parts.append(f'<line class="line" x1="16" x2="{WIDTH - 16}" y1="{y - 8}" y2="{y - 8}"/>')
        words = said[place] if place < len(said) else "a request"
        parts.append(_text(20, y + 17, f"{place + 1}. {words}"))
        parts.append(_text(20, y + 35, one.why, "small"))
        parts += _bar(one, y + 4, scale, chunk)
        parts.append(_text(WIDTH - 96, y + 17, f"session {names[one.session]}"))
        parts.append(_text(WIDTH - 96, y + 35, f"{_reused(one)} reused", "small"))
    height = TOP + len(requests) * ROW + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="What each request of a conversation reused">\n'
        f"<style>{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}\n</style>\n"
        f'<rect class="page" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _reused(one: RequestBar) -> str:
    return f"{100 * (one.from_slab + one.from_blocks) // one.prompt} %"


def _head(chunk: int) -> Iterator[str]:
    yield _text(20, 32, "What each request reused, and why not more", "title")
    x = 20
    for name, words in LEGEND:
        yield f'<rect class="{name}" x="{x}" y="46" width="14" height="14" rx="2"/>'
        yield _text(x + 20, 58, words, "small")
        x += 40 + round(6.6 * len(words))
    yield _triangle(27, 73)
    yield _text(
        40,
        82,
        "from here on, the prompt differs from what the session last read and wrote. Reuse comes "
        f"in whole blocks of {chunk} tokens, beyond this point only if they were prewarmed.",
        "small",
    )


def _bar(one: RequestBar, y: float, scale: float, chunk: int) -> Iterator[str]:
    spans = (
        ("from_slab", 0, one.from_slab),
        ("from_blocks", one.from_slab, one.from_slab + one.from_blocks),
        (
            "prefilled",
            one.from_slab + one.from_blocks,
            one.from_slab + one.from_blocks + one.prefilled,
        ),
        ("generated", one.prompt, one.prompt + one.generated),
    )
    for name, start, end in spans:
        if end == start:
            continue
        x, width = BAR_LEFT + start * scale, (end - start) * scale
        yield f'<rect class="{name}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
    for cut in range(chunk, one.prompt, chunk):
        x = BAR_LEFT + cut * scale
        yield f'<line class="cut" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + BAR}"/>'
    for name, start, end in spans:
        x, width = BAR_LEFT + start * scale, (end - start) * scale
        if width > 26:
            ink = "in" if name in ("from_slab", "from_blocks") else "dark-in"
            yield _text(x + width / 2, y + 15, str(end - start), ink)
    if one.same is not None:
        x = BAR_LEFT + one.same * scale
        yield _triangle(x, y + BAR + 2)
        what = (
            "all tokens are the same"
            if one.same == one.prompt
            else f"{one.same} tokens are the same"
        )
        if one.same > one.prompt / 2:
            yield _text(x - 9, y + BAR + 13, what, "small", anchor="end")
        else:
            yield _text(x + 9, y + BAR + 13, what, "small")


def _triangle(x: float, y: float) -> str:
    return f'<path class="same" d="M{x:.1f} {y}l5 9h-10z"/>'


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "") -> str:
    attributes = f' class="{style}"' if style else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y}"{attributes}>{escape(words)}</text>'


def main() -> None:
    """Draw a journal, or make one first."""
    parser = argparse.ArgumentParser(description="Draw the path decisions of a journal as SVG.")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help=f"default: {THE_PICTURE}; with --journal {THE_PICTURE.name}, here",
    )
    parser.add_argument("--journal", type=Path, help="an export, or a journal.db; else make one")
    parser.add_argument("-n", type=int, default=12, help="at most so many requests")
    asked = parser.parse_args()
    output = asked.output or (THE_PICTURE if asked.journal is None else Path(THE_PICTURE.name))
    said: list[str] = []
    if asked.journal is not None:
        rows = list(read_rows(asked.journal))
    else:
        with tempfile.TemporaryDirectory() as directory:
            rows, said = journal_of_a_conversation(Path(directory))
    requests, chunk = request_bars(rows)
    if not requests:
        raise SystemExit("There is no request in this journal.")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(picture(requests[: asked.n], chunk, said), encoding="utf-8")
    print(f"{len(requests[: asked.n])} requests in {output}")


if __name__ == "__main__":
    main()
