"""
``ops doctor --report``: what a machine is and what the self-test found there, for others to read.

A server of its own, in a temporary directory, tests the model and answers for a minute. The report
has no text of a conversation, and the home directory is written as a tilde.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cairn import __version__
from cairn.engine.machine.memory import machine_memory
from cairn.engine.model.builtin import builtin_directory
from cairn.journal.errors import JournalError
from cairn.journal.events import ModelLoaded, SelfTestFinished
from cairn.ops.chat.server import OwnServer
from cairn.ops.chat.terminal.signals import on_interrupt, signals_later, signals_that_leave
from cairn.ops.cli import Unreadable
from cairn.ops.common.http_client import http_client
from cairn.ops.common.locations import url_of
from cairn.ops.common.output import printable

PROBE_S = 30.0
"""How long each of the two probes lasts, in seconds; a last request is finished."""

_WORDS = "The path goes past the old bridge and the lake. "
_PROMPTS = (16, 64, 256)  # times these words: from 200 to 3,000 tokens
_DECODED = 128
_TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def write_report(
    path: Path,
    model: str | None,
    checks: list[Mapping[str, str]],
    progress: Progress,
    probe_s: float = PROBE_S,
) -> str | None:
    """
    Write a report as JSON. The file must not exist.

    Args:
        model: as in `ops serve --model`; None for Pebble.
        checks: the findings of the doctor.
        progress: called with each step when it begins.

    Returns:
        Why the server did not start or answer; None if it did.

    Raises:
        Unreadable: the file cannot be written.
    """
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError as error:
        raise Unreadable(f"{path} exists. Name another file.") from error
    except OSError as error:
        raise Unreadable(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with file, signals_that_leave():
            found = {**_machine(), "checks": checks, **_of_server(model, progress, probe_s)}
            text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
            file.write(_without_home(text) + "\n")
    except BaseException:  # a signal, too: what is incomplete would be in the way of the next try
        path.unlink(missing_ok=True)
        raise
    fault = found["fault"]
    assert fault is None or isinstance(fault, str)
    return fault


def _without_home(text: str) -> str:
    try:
        return text.replace(f"{Path.home()}/", "~/")
    except RuntimeError:  # this user has none
        return text


def _machine() -> dict[str, Any]:
    return {
        "cairn": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "macos": platform.mac_ver()[0],
            "processor": f"{platform.machine()} {platform.processor()}".strip(),
            "cores": os.cpu_count(),
            "memory_bytes": machine_memory(),
            "python": sys.version.split()[0],
        },
    }


def _of_server(model: str | None, progress: Progress, probe_s: float) -> dict[str, Any]:
    """What a server says of itself, and how fast it is. One that refuses to start has findings."""
    fault = None
    probes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="cairn-report-") as folder:
        data_dir = Path(folder)
        chosen = model or str(builtin_directory())
        server = OwnServer(data_dir, chosen, "--test-again", is_apart=True)
        try:
            with signals_later():
                server.start()
            server.wait_ready(_changes(lambda step: progress(f"starting a server: {step}")))
            with http_client(server.url, timeout_s=_TIMEOUT_S) as client:
                progress(f"decoding for {probe_s:.0f} s")
                probes["decode"] = _decode(client, probe_s)
                progress(f"prefilling for {probe_s:.0f} s")
                probes["prefill"] = _prefill(client, probe_s)
        except Unreadable as failed:
            # The place of its output is gone when the report is read.
            fault = failed.format_message().splitlines()[0]
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError) as failed:
            fault = f"The server did not answer: {printable(str(failed))}"
        finally:
            progress("stopping the server")
            server.end()
            with on_interrupt(server.end):
                server.wait()
        return {"fault": fault, **_events(data_dir), "probes": probes}


def _changes(progress: Progress) -> Progress:
    """Passes on a step unless it is the same as the last one."""
    last: str | None = None

    def pass_on(step: str) -> None:
        nonlocal last
        if step != last:
            last = step
            progress(step)

    return pass_on


def _events(data_dir: Path) -> dict[str, Any]:
    """The public fields of the model's load and of the self-test, as journaled; None without."""
    from cairn.journal.rows.database.schema import schema_revision
    from cairn.journal.rows.store_sql import SqlStore

    kinds = (ModelLoaded.kind, SelfTestFinished.kind)
    found: dict[str, Any] = dict.fromkeys(kinds)
    url = url_of(data_dir, None)
    try:
        if schema_revision(url) is None:
            return found
        store = SqlStore.open(url, read_only=True)
        try:
            for row in store.read(kinds=kinds):
                found[row.kind] = msgspec.json.decode(row.public)
        finally:
            store.close()
    except JournalError as error:
        found["journal"] = str(error)
    return found


def _decode(client: httpx.Client, seconds: float) -> dict[str, float]:
    """Answers to a short prompt, one after the other."""
    end_s = time.monotonic() + seconds
    requests = tokens = 0
    duration_ms = 0.0
    while not requests or time.monotonic() < end_s:
        timings = _timings(client, _WORDS, _DECODED, seed=requests)
        requests += 1
        tokens += timings["predicted_n"]
        duration_ms += timings["predicted_ms"]
    return _rate(requests, tokens, duration_ms)


def _prefill(client: httpx.Client, seconds: float) -> list[dict[str, float]]:
    """Prompts of several lengths, none of which reuses anything; the shortest one first."""
    found = []
    for times in _PROMPTS:
        end_s = time.monotonic() + seconds / len(_PROMPTS)
        requests = tokens = 0
        duration_ms = 0.0
        while not requests or time.monotonic() < end_s:
            timings = _timings(client, _WORDS * times, 1, seed=0)
            requests += 1
            tokens += timings["prompt_n"]
            duration_ms += timings["prompt_ms"]
        found.append(_rate(requests, tokens, duration_ms))
    return found


def _timings(client: httpx.Client, prompt: str, max_tokens: int, seed: int) -> Mapping[str, Any]:
    body = {
        "model": "any",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "seed": seed,
        "cache_prompt": False,
    }
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    timings = msgspec.json.decode(response.content)["timings"]
    assert isinstance(timings, dict)
    return timings


def _rate(requests: int, tokens: int, duration_ms: float) -> dict[str, float]:
    return {
        "requests": requests,
        "tokens": tokens,
        "duration_ms": round(duration_ms, 1),
        "tokens_per_s": round(1000 * tokens / duration_ms, 1) if duration_ms else 0.0,
    }
