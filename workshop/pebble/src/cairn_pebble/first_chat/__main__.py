"""
Ask Pebble the 200 openings as a stranger would, and count what judges say of its answers.

`ask` starts a server of its own with the model and sends each opening as `cairn chat` would: alone
in a new chat, and every fifth one also in one long chat. It writes the transcript, in which loops
and answers that did not end are already decided:

    python -P -m cairn_pebble.first_chat ask --model src/cairn/pebble --out /tmp/asked

Two judges then read the transcript by the rubric (`rubric` prints it), and each writes a file of
lines `ID VERDICT`, with `fitting`, `honest` or `wrong`, for every answer that is not yet decided.
`count` takes both; where they disagree, the worse verdict counts. It also says how many of the
openings are messages in the training:

    python -P -m cairn_pebble.first_chat count /tmp/asked/transcript.jsonl one.txt two.txt
"""

import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import httpx

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.files import directory_fault
from cairn.ops.chat.server import OwnServer
from cairn.ops.common.http_client import http_client
from cairn_pebble.first_chat.openings import (
    Opening,
    asked_in_one_chat,
    read_openings,
    read_rubric,
)
from cairn_pebble.first_chat.trained import trained_on
from cairn_pebble.first_chat.verdicts import (
    IN_ONE_CHAT,
    LONGEST_ANSWER,
    Asked,
    decided,
    read_transcript,
    read_verdicts,
    report,
)


def ask_all(url: str, openings: Sequence[Opening]) -> Iterator[Asked]:
    """Ask a server each opening alone, and then every fifth one in one chat."""
    with http_client(url, timeout_s=600) as client:
        for opening in openings:
            answer = _answer(client, [{"role": "user", "content": opening.text}])
            yield decided(opening, opening.id, *answer)
        messages: list[dict[str, str]] = []
        for opening in asked_in_one_chat(tuple(openings)):
            messages.append({"role": "user", "content": opening.text})
            answer = _answer(client, messages)
            messages.append({"role": "assistant", "content": answer[0]})
            yield decided(opening, IN_ONE_CHAT + opening.id, *answer)


def _answer(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, str, int]:
    """The text, why it ended, and its tokens."""
    body = {"messages": messages, "max_tokens": LONGEST_ANSWER}
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    choice = answer["choices"][0]
    message = choice["message"]
    said = message.get("content") or ""
    if message.get("tool_calls"):
        said += json.dumps(message["tool_calls"])
    return said, choice["finish_reason"], answer["usage"]["completion_tokens"]


@click.group(help=__doc__)
def main() -> None:
    """The command line."""


@main.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=builtin_directory(),
    help="The directory of the model. Default: the one that ships.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A folder.")
def ask(model: Path, out: Path) -> None:
    """Ask every opening, and write OUT/transcript.jsonl."""
    if fault := directory_fault(str(model)):
        raise click.ClickException(f"{fault} Name a model's directory with --model.")
    out.mkdir(parents=True, exist_ok=True)
    weights = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    openings = read_openings()
    total = len(openings) + len(asked_in_one_chat(openings))
    asked: list[Asked] = []
    with tempfile.TemporaryDirectory() as folder:
        server = OwnServer(Path(folder), str(model), is_apart=True)
        server.start()
        try:
            server.wait_ready(lambda step: click.echo(step, err=True))
            with click.progressbar(
                ask_all(server.url, openings),
                length=total,
                label="answers",
                file=sys.stderr,
            ) as bar:
                asked.extend(bar)
        finally:
            server.end()
            server.wait()
    path = out / "transcript.jsonl"
    lines = [{"weights": weights}, *map(attrs.asdict, asked)]
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), "utf-8")
    decided = Counter(one.verdict for one in asked if one.verdict)
    click.echo(
        f"{path}: {len(asked)} answers, {decided['loop']} of them loops and {decided['wrong']} "
        "wrong by the program. Judge the others, and run `count`."
    )


@main.command()
@click.argument("transcript", type=click.Path(exists=True, path_type=Path))
@click.argument("judges", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
def count(transcript: Path, judges: tuple[Path, ...]) -> None:
    """Print the figures of a transcript, by the files of its judges."""
    facts, asked = read_transcript(transcript)
    verdicts = [read_verdicts(path, asked) for path in judges]
    click.echo(report(facts, asked, verdicts, trained_on(read_openings())), nl=False)


@main.command()
def rubric() -> None:
    """Print what decides a verdict, and what fits each kind of opening."""
    for name, text in read_rubric().items():
        click.echo(f"{name}: {text}\n")
    for kind, fits in {one.kind: one.fits for one in read_openings()}.items():
        click.echo(f"{kind}: {fits}")


if __name__ == "__main__":
    main()
