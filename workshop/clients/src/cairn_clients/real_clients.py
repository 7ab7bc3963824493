"""
Hold conversations with real clients, and check in the journal that each turn continues the last.

The clients are Claude Code, opencode and Codex, the OpenAI and Anthropic SDKs, LangChain, and
Ollama's library. Each is installed into a folder and run as its users run it, off the network, with
its own home, against a server that is started for it. Pebble, Cairn's built-in model, answers plain
conversations; a scripted model answers where a tool has to be called. The assertions do not depend
on what a model says: each request is answered, a client's conversation begins once, each further
request of it is a continuation, and every whole block of its prompt that the server already had is
reused.

    python -P -m cairn_clients.real_clients
    python -P -m cairn_clients.real_clients --only opencode codex

Prints the measured figures as a table, and what was not run, with the reason. Exits with 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import attrs

# The helpers of the tests are not installed.
sys.path.insert(0, str(Path(__file__).parents[4]))

from cairn_clients import alone, coding, packages, scripted
from cairn_clients.figures import Turn, faults, requests_of, turns_of
from cairn_clients.processes import Failed, Place, place, run
from tests.support.processes.subprocess_server import Serving, started

CHUNK = 64
_CACHE = Path(".cache/clients")
_INSIDE = "--inside"


@attrs.frozen(kw_only=True)
class Talk:
    """
    A conversation that a client holds.

    Attributes:
        client: the name of its package.
        title: the task, for the table.
        hold: holds it.
        openings: how many conversations it begins, including those for titles and agents.
        lines: what the scripted model says; None if Pebble answers.
    """

    client: str
    name: str
    title: str
    hold: Callable[[coding.Stage], None]
    openings: int = 1
    lines: Callable[[], list[scripted.Line]] | None = None


def _library(name: str) -> Callable[[coding.Stage], None]:
    def hold(stage: coding.Stage) -> None:
        at = stage.place(PYTHONPATH=str(stage.program))
        talk = Path(__file__).with_name("talk.py")
        output = run(at, sys.executable, "-P", talk, name, stage.url, stage.model)
        stage.rest()
        (first, *later) = [json.loads(line)["cached"] for line in output.splitlines()]
        if first or not later or not all(later):
            raise Failed(f"it reports {[first, *later]} cached tokens, turn by turn")

    return hold


TALKS = (
    Talk(
        client="openai",
        name="OpenAI SDK",
        title="chat completions, three turns",
        hold=_library("openai"),
    ),
    Talk(
        client="openai",
        name="OpenAI SDK",
        title="responses by `previous_response_id`, three turns",
        hold=_library("responses"),
    ),
    Talk(
        client="anthropic",
        name="Anthropic SDK",
        title="messages, three turns",
        hold=_library("anthropic"),
    ),
    Talk(
        client="langchain",
        name="langchain-openai",
        title="`ChatOpenAI`, three turns",
        hold=_library("langchain"),
    ),
    Talk(
        client="ollama",
        name="ollama",
        title="`chat`, three turns",
        hold=_library("ollama"),
    ),
    Talk(
        client="codex",
        name="Codex",
        title="`exec` with a call, then `exec resume --last`",
        hold=coding.codex_calls,
        lines=coding.codex_lines,
    ),
    Talk(
        client="opencode",
        name="opencode",
        title="`run`, then `run -c`",
        hold=coding.opencode_continued,
        openings=2,
    ),
    Talk(
        client="opencode",
        name="opencode",
        title="`run` with a call, then `run -c`",
        hold=coding.opencode_calls,
        openings=2,
        lines=coding.opencode_lines,
    ),
    Talk(
        client="claude-code",
        name="Claude Code",
        title="`-p` with a call, then `--continue`",
        hold=coding.claude_calls,
        lines=coding.claude_lines,
    ),
    Talk(
        client="claude-code",
        name="Claude Code",
        title="two at once, each as above",
        hold=coding.claude_twice,
        openings=2,
        lines=coding.claude_lines,
    ),
    Talk(
        client="claude-code",
        name="Claude Code",
        title="`-p` that starts an agent, then `--continue`",
        hold=coding.claude_sends,
        openings=2,
        lines=coding.claude_lines,
    ),
    Talk(
        client="claude-code",
        name="Claude Code",
        title="`-p` that searches for a tool, then `--continue`",
        hold=coding.claude_searches,
        lines=coding.claude_lines,
    ),
    Talk(
        client="claude-code",
        name="Claude Code",
        title="`-p`, then `--continue`",
        hold=coding.claude_continued,
    ),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=_CACHE,
        help="the folder of installed packages [default: %(default)s]",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=packages.NAMES,
        default=packages.NAMES,
        help="run only these clients",
    )
    parser.add_argument(
        "--model", choices=("pebble", "scripted"), help="run only the conversations with this model"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        help="the time limit of a conversation, in seconds [default: %(default)s]",
    )
    parser.add_argument("--keep", type=Path, help="keep the journals in this folder")
    parser.add_argument(_INSIDE, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    talks = [
        talk
        for talk in TALKS
        if talk.client in asked.only
        and asked.model in (None, "scripted" if talk.lines else "pebble")
    ]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if asked.inside is not None:
        alone.raise_loopback()
        raise SystemExit(_hold_all(talks, asked, json.loads(asked.inside)))
    missing = _install(talks, asked.cache)
    into = alone.command_into()
    if into is not None:
        again = [sys.executable, "-P", *sys.argv, _INSIDE, json.dumps(missing)]
        # Replaces this process, so that a signal to it reaches the conversations.
        os.execv(into[0], [*into, *again])
    raise SystemExit(_hold_all(talks, asked, missing))


def _install(talks: Sequence[Talk], cache: Path) -> dict[str, str]:
    """Install what is needed. Returns why clients are unavailable, by name."""
    missing: dict[str, str] = {}
    for name in dict.fromkeys(talk.client for talk in talks):
        try:
            packages.install(name, cache)
        except packages.Unavailable as error:
            missing[name] = str(error)
    return missing


def _hold_all(talks: Sequence[Talk], asked: argparse.Namespace, missing: Mapping[str, str]) -> int:
    """
    Hold the conversations and report the results; returns the exit code.

    Args:
        missing: why clients are unavailable, by name.
    """
    if alone.reaches_others():
        _log("no network namespace available: clients only get settings of dead proxies")
    rows: list[str] = []
    skipped: list[str] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cairn-clients-") as scratch:
        for number, talk in enumerate(talks):
            which = f"{talk.name} {packages.version(talk.client)}, {talk.title}"
            if talk.client in missing:
                skipped.append(f"{which}: {missing[talk.client]}")
                continue
            folder = (asked.keep or Path(scratch)).resolve() / f"{number:02}-{talk.client}"
            began = time.monotonic()
            try:
                turns = _held(talk, folder, asked)
                found = faults(turns, talk.openings, CHUNK)
            except packages.Unavailable as error:
                skipped.append(f"{which}: {error}")
                continue
            except Failed as error:
                turns, found = [], [str(error)]
            _log(f"{which}: {time.monotonic() - began:.0f} s, {'; '.join(found) or 'ok'}")
            wrong += [f"{which}: {one}" for one in found]
            if turns:
                rows.append(_row(talk, turns))
    print("\n".join([_HEAD, *rows]))
    for one in skipped:
        print(f"\nNOT RUN: {one}")
    for one in wrong:
        print(f"\nWRONG: {one}")
    return 1 if wrong else 0


def _held(talk: Talk, folder: Path, asked: argparse.Namespace) -> list[Turn]:
    """Hold a conversation on its own server; returns its turns."""
    is_program = talk.client in packages.NPM
    find = packages.program if is_program else packages.library
    program = find(talk.client, asked.cache)
    folder.mkdir(parents=True)
    options: list[object] = ["--block-tokens", CHUNK]
    if talk.lines is not None:
        model = scripted.make(folder / "scripted", talk.lines(), coding.AGREES)
        options += ["--model", model]
    env = {} if asked.inside is not None else alone.PROXIES
    with ExitStack() as stack, started(folder / "data", *options) as server:

        def enter(**more: str) -> Place:
            return stack.enter_context(place(asked.limit, {**env, **more}))

        stage = coding.Stage(
            url=server.url,
            model="scripted" if talk.lines else "pebble",
            program=program,
            place=enter,
            rest=lambda: _rest(server, asked.limit),
        )
        talk.hold(stage)
        return turns_of(requests_of(server.recorded()), CHUNK)


def _rest(server: Serving, limit_s: float) -> None:
    """Wait until the server is idle, which may take as long as a run."""
    end = time.monotonic() + limit_s
    while True:
        try:
            server.wait_idle()
        except AssertionError:
            if time.monotonic() > end:
                raise Failed(f"the server did not come to rest within {limit_s:.0f} s") from None
        else:
            return


_HEAD = """\
| client | version | conversation | model | requests | prompt tokens | further turns | reused | \
share | computed at most |
|---|---|---|---|---|---|---|---|---|---|"""


def _row(talk: Talk, turns: Sequence[Turn]) -> str:
    lengths = [len(turn.request.ids) for turn in turns]
    further = [turn.request for turn in turns if turn.before is not None]
    reused, asked = (
        sum(one.reused for one in further),
        sum(len(one.ids) for one in further),
    )
    paths = sorted({one.path for one in further})
    cells = [
        talk.name,
        packages.version(talk.client),
        talk.title,
        "scripted" if talk.lines else "Pebble",
        str(len(turns)),
        f"{min(lengths):,} to {max(lengths):,}",
        f"{len(further)}, {' and '.join(f'`{path}`' for path in paths)}",
        f"{reused:,} of {asked:,}",
        f"{reused / asked:.1%}".replace("%", " %") if asked else "",
        str(max((len(one.ids) - one.reused for one in further), default="")),
    ]
    return "| " + " | ".join(cells) + " |"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
