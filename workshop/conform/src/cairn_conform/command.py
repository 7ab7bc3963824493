"""
``ops conform``: a suite from outside, against any server that speaks OpenAI's chat completions.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import attrs
import click

from cairn import __version__
from cairn.ops.cli import Unreadable
from cairn.ops.common.locations import example
from cairn.ops.common.output import counted, printable, table
from cairn.ops.serve.api_keys import api_key_option
from cairn_conform.case import Result, Subject
from cairn_conform.client import Client
from cairn_conform.client_texts import new_salt, user
from cairn_conform.suite import ROWS, played

_MARKS = {"kept": "kept", "broken": "BROKEN", "not tried": "not tried"}
_CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "context_tokens")


@click.command(
    epilog=example(
        "ops conform http://127.0.0.1:8000",
        "ops conform http://127.0.0.1:8080 --restart 'systemctl --user restart llm' --json",
    )
)
@click.argument("url")
@click.option("--model", metavar="NAME", help="The model to ask for, if the server lists several.")
@click.option(
    "--row",
    "names",
    multiple=True,
    type=click.Choice(list(ROWS)),
    metavar="NAME",
    help="This row only; may be given again. docs/conformance.md lists them.",
)
@click.option(
    "--restart",
    metavar="COMMAND",
    help="A shell command that stops the server and starts it again at the same address. Without "
    "it, nothing is asked across a restart.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For each request, and twice that for a restart. What takes longer counts as hung.",
)
@click.option(
    "--words",
    type=click.IntRange(40, 20_000),
    default=400,
    show_default=True,
    help="Of a long prompt. It has to fill several blocks of the server's cache.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="The longest prompt of the model, if the server does not tell it.",
)
@click.option(
    "--salt",
    metavar="TEXT",
    help="What prompts begin with, to ask the same once more; drawn if there is none. A server "
    "that still has them cached gives no miss.",
)
@api_key_option
@click.option("--anywhere", is_flag=True, help="Ask a server on another machine too.")
@click.option("--json", "as_json", is_flag=True, help="JSON in place of the table.")
def conform(
    url: str,
    model: str | None,
    names: tuple[str, ...],
    restart: str | None,
    deadline: float,
    words: int,
    context: int | None,
    salt: str | None,
    api_key: str | None,
    anywhere: bool,
    as_json: bool,
) -> None:
    """
    Check over HTTP that a server's cache does not change its answers.

    URL is any server with OpenAI's chat completions. Each row is kept, broken or not tried, and
    says what was observed. What a server does not report is not counted against it. The server gets
    about 200 requests, some of them malformed and some whose client disconnects, so use a server
    that has no other clients at the moment.

    \b
    Exit code
      0  nothing is broken
      1  something is
      2  the server could not be asked
    """
    _check_url(url, anywhere=anywhere)
    client = Client(url, key=api_key, deadline_s=deadline)
    salt = salt or new_salt()
    subject, told = _met(client, url, model=model, context=context, salt=salt, words=words)
    subject = attrs.evolve(subject, restart=restart, restart_s=2 * deadline)
    chosen = [row for name, row in ROWS.items() if not names or name in names]
    click.echo(f"asking {url} ({_told_words(told)}); --salt {salt}", err=True)

    places = {row.name: place for place, row in enumerate(chosen, start=1)}
    results, lost = played(
        subject,
        chosen,
        lambda row: click.echo(f"[{places[row.name]}/{len(chosen)}] {row.name} ...", err=True),
    )
    if as_json:
        _tell_json(url, salt, told, results, lost)
    else:
        _tell(results)
    if any(result.verdict == "broken" for result in results):
        sys.exit(1)
    if lost is not None:
        raise Unreadable(f"{url}: {lost}. See its log.")


def _check_url(url: str, *, anywhere: bool) -> None:
    """
    Raises:
        Unreadable: it is no address, or not this machine's.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # and an address that no request could be sent to
        parts.path.encode("ascii")
    except ValueError as error:
        raise Unreadable(f"{url} is no address: {error}. Write http://127.0.0.1:8000.") from error
    if parts.scheme not in ("http", "https") or not host:
        raise Unreadable(f"{url} is no address of a server. Write http://127.0.0.1:8000.")
    if _is_loopback(host):
        return
    if not anywhere:
        raise Unreadable(
            f"{host} is not this machine's loopback. The suite sends broken requests and takes the "
            "server's time; if it is yours to try, give --anywhere."
        )
    click.echo(
        f"Warning: {host} may be another machine: requests go over the network, and others who "
        "use that server will notice.",
        err=True,
    )


def _is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine: any other name may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _met(
    client: Client, url: str, *, model: str | None, context: int | None, salt: str, words: int
) -> tuple[Subject, dict[str, Any]]:
    """
    The server as it presents itself, and what it reports.

    Raises:
        Unreadable: it gives no answer to a plain request.
    """
    listed = _listed(client.get("/v1/models"))
    if model is None and len(listed) > 1:
        names = ", ".join(map(printable, listed))
        raise Unreadable(f"{url} lists several models: {names}. Choose one with --model.")
    model = model or next(iter(listed), None)
    facts = [listed.get(model or "", {}), client.get("/health")]
    fields: dict[str, Any] = {} if model is None else {"model": model}
    subject = Subject(
        client=client,
        fields={**fields, "logprobs": True},
        context_tokens=context or next(filter(None, map(_context, facts)), None),
        salt=salt,
        words=words,
    )
    answer = client.ask(subject.body([user(f"{salt} Hello.")]))
    if answer.refused:
        # Perhaps it does not know log-probabilities.
        subject = attrs.evolve(subject, fields=fields)
        answer = client.ask(subject.body([user(f"{salt} Hello.")]))
    if not answer.complete:
        raise Unreadable(
            f"{url} cannot be asked: {answer.outcome}. Check the address, whether the server is "
            "up, --model, and whether it wants a key (--api-key)."
        )
    told = {
        "model": model,
        "context": subject.context_tokens,
        "logprobs": answer.tokens is not None,
        "usage": answer.prompt_tokens is not None,
        "cached_tokens": answer.cached_tokens is not None,
    }
    return subject, told


def _listed(value: Any) -> dict[str, Mapping[str, Any]]:
    """The models that a server lists, by name."""
    entries = value.get("data") if isinstance(value, Mapping) else None
    found = [entry for entry in entries or () if isinstance(entry, Mapping)]
    return {str(entry["id"]): entry for entry in found if "id" in entry}


def _context(facts: Any) -> int | None:
    """How long a prompt may be, by the names that servers use; OpenAI has none for it."""
    if not isinstance(facts, Mapping):
        return None
    told = (facts.get(name) for name in _CONTEXT_NAMES)
    return next((number for number in told if isinstance(number, int) and number > 0), None)


# --- what is told --------------------------------------------------------------------------------


def _told_words(told: Mapping[str, Any]) -> str:
    words = [f"model {printable(told['model'] or 'not reported')}"]
    for name, what in (
        ("logprobs", "log-probabilities"),
        ("usage", "usage"),
        ("cached_tokens", "cached tokens"),
    ):
        words.append(f"{what}: {'reported' if told[name] else 'not reported'}")
    return ", ".join(words)


def _tell(results: Sequence[Result]) -> None:
    rows = [
        (one.row.name, _MARKS[one.verdict], one.row.asks, "; ".join(one.words)) for one in results
    ]
    table(("row", "verdict", "asks", "seen"), rows, spare=("asks",), wrapped="seen")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _MARKS}
    numbers = ", ".join(f"{verdict}: {number}" for verdict, number in counts.items())
    asked = counted(sum(result.requests for result in results), "request")
    click.echo(f"{numbers} ({asked})")


def _tell_json(
    url: str, salt: str, told: Mapping[str, Any], results: Sequence[Result], lost: str | None
) -> None:
    rows = [
        {
            "row": one.row.name,
            "asks": one.row.asks,
            "verdict": one.verdict,
            "broken": one.broken,
            "not_tried": one.untried,
            "seen": one.evidence,
            "requests": one.requests,
        }
        for one in results
    ]
    report = {
        "url": url,
        "cairn": __version__,
        "salt": salt,
        "told": told,
        "lost": lost,
        "rows": rows,
    }
    click.echo(json.dumps(report, indent=2))
