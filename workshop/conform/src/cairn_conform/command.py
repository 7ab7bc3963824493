"""
``ops conform``: tests any server with OpenAI's chat completions from outside.
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

_MARKS = {"passed": "passed", "failed": "FAILED", "skipped": "skipped"}
_CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "context_tokens")


@click.command(
    epilog=example(
        "ops conform http://127.0.0.1:8000",
        "ops conform http://127.0.0.1:8080 --restart 'systemctl --user restart llm' --json",
    )
)
@click.argument("url")
@click.option("--model", metavar="NAME", help="The model to test, if the server lists several.")
@click.option(
    "--row",
    "names",
    multiple=True,
    type=click.Choice(list(ROWS)),
    metavar="NAME",
    help="Run only this row. Repeat the option for several. docs/conformance.md lists the rows.",
)
@click.option(
    "--restart",
    metavar="COMMAND",
    help="A shell command that restarts the server at the same address. Without it, nothing is "
    "tested across a restart.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="The time limit of a request; a restart may take twice as long.",
)
@click.option(
    "--words",
    type=click.IntRange(40, 20_000),
    default=400,
    show_default=True,
    help="The length of a long prompt. It has to fill several blocks of the server's cache.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    metavar="TOKENS",
    help="The model's context length, if the server does not report it.",
)
@click.option(
    "--salt",
    metavar="TEXT",
    help="The beginning of all prompts, to repeat a run; random by default. If the server still "
    "has the prompts cached, no request is a miss.",
)
@api_key_option
@click.option("--anywhere", is_flag=True, help="Allow a server on another machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
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

    URL is any server with OpenAI's chat completions. Each row passes, fails or is skipped, and
    says what was observed. What a server does not report is not counted against it. The server gets
    about 200 requests, some of them malformed and some whose client disconnects, so use a server
    that has no other clients at the moment.

    \b
    Exit code
      0  no row fails
      1  a row fails
      2  the server could not be tested
    """
    _check_url(url, anywhere=anywhere)
    client = Client(url, key=api_key, deadline_s=deadline)
    salt = salt or new_salt()
    subject, reported = _meet(client, url, model=model, context=context, salt=salt, words=words)
    subject = attrs.evolve(subject, restart=restart, restart_s=2 * deadline)
    chosen = [row for name, row in ROWS.items() if not names or name in names]
    click.echo(f"testing {url} ({_reported_words(reported)}); --salt {salt}", err=True)

    places = {row.name: place for place, row in enumerate(chosen, start=1)}
    results, lost = played(
        subject,
        chosen,
        lambda row: click.echo(f"[{places[row.name]}/{len(chosen)}] {row.name} ...", err=True),
    )
    if as_json:
        _print_json(url, salt, reported, results, lost)
    else:
        _print(results)
    if any(result.verdict == "failed" for result in results):
        sys.exit(1)
    if lost is not None:
        raise Unreadable(f"{url}: {lost}. See the server's log.")


def _check_url(url: str, *, anywhere: bool) -> None:
    """
    Raises:
        Unreadable: it is invalid, or not on this machine.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # raises for an address that no request could be sent to
        parts.path.encode("ascii")
    except ValueError as error:
        raise Unreadable(
            f"{url} is not a valid address: {error}. Expected one like http://127.0.0.1:8000."
        ) from error
    if parts.scheme not in ("http", "https") or not host:
        raise Unreadable(
            f"{url} is not the address of a server. Expected one like http://127.0.0.1:8000."
        )
    if _is_loopback(host):
        return
    if not anywhere:
        raise Unreadable(
            f"{host} is not this machine's loopback. The suite sends malformed requests and keeps "
            "the server busy; if you may test that server, give --anywhere."
        )
    click.echo(
        f"Warning: {host} may be another machine. Requests go over the network, and other clients "
        "of that server will notice.",
        err=True,
    )


def _is_loopback(host: str) -> bool:
    """Whether a host is certainly this machine. Any other name may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _meet(
    client: Client, url: str, *, model: str | None, context: int | None, salt: str, words: int
) -> tuple[Subject, dict[str, Any]]:
    """
    The server to test, and what it reports about itself.

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
            f"{url} cannot be tested: {answer.outcome}. Check the address, --model, whether the "
            "server is running, and whether it requires a key (--api-key)."
        )
    reported = {
        "model": model,
        "context": subject.context_tokens,
        "logprobs": answer.tokens is not None,
        "usage": answer.prompt_tokens is not None,
        "cached_tokens": answer.cached_tokens is not None,
    }
    return subject, reported


def _listed(value: Any) -> dict[str, Mapping[str, Any]]:
    """The models that a server lists, by name."""
    entries = value.get("data") if isinstance(value, Mapping) else None
    found = [entry for entry in entries or () if isinstance(entry, Mapping)]
    return {str(entry["id"]): entry for entry in found if "id" in entry}


def _context(facts: Any) -> int | None:
    """The context length, under the names that servers use; OpenAI's API has none."""
    if not isinstance(facts, Mapping):
        return None
    values = (facts.get(name) for name in _CONTEXT_NAMES)
    return next((number for number in values if isinstance(number, int) and number > 0), None)


# --- output --------------------------------------------------------------------------------------


def _reported_words(reported: Mapping[str, Any]) -> str:
    words = [f"model {printable(reported['model'] or 'not reported')}"]
    for name, what in (
        ("logprobs", "log-probabilities"),
        ("usage", "usage"),
        ("cached_tokens", "cached tokens"),
    ):
        words.append(f"{what}: {'reported' if reported[name] else 'not reported'}")
    return ", ".join(words)


def _print(results: Sequence[Result]) -> None:
    rows = [
        (one.row.name, _MARKS[one.verdict], one.row.asks, "; ".join(one.words)) for one in results
    ]
    table(("row", "verdict", "asks", "seen"), rows, spare=("asks",), wrapped="seen")
    counts = {verdict: sum(result.verdict == verdict for result in results) for verdict in _MARKS}
    numbers = ", ".join(f"{verdict}: {number}" for verdict, number in counts.items())
    asked = counted(sum(result.requests for result in results), "request")
    click.echo(f"{numbers} ({asked})")


def _print_json(
    url: str, salt: str, reported: Mapping[str, Any], results: Sequence[Result], lost: str | None
) -> None:
    rows = [
        {
            "row": one.row.name,
            "asks": one.row.asks,
            "verdict": one.verdict,
            "failures": one.failures,
            "not_tested": one.untested,
            "seen": one.evidence,
            "requests": one.requests,
        }
        for one in results
    ]
    report = {
        "url": url,
        "cairn": __version__,
        "salt": salt,
        "reported": reported,
        "lost": lost,
        "rows": rows,
    }
    click.echo(json.dumps(report, indent=2))
