"""What ``ops serve`` prints when it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.actors.boot import booted
from cairn.engine.contract import StartedEngine
from cairn.journal.rows.store import MemoryStore
from cairn.ops.serve.banner import greet
from cairn.ops.serve.command import serve
from tests.support.fake_engine import NO_MODEL, started
from tests.support.in_process_server import SECRET, serving_fake, settings

pytestmark = pytest.mark.trio


@pytest.mark.parametrize(
    ("arguments", "share", "words"),
    [
        ([], 0.01, "1 % of answers computed again in idle time: 1 to 5 % more computing"),
        (["--shadow-check", "1"], 1.0, "100 % of answers computed again in idle time: 100 to 500"),
        (["--shadow-check", "0"], 0.0, "off: --shadow-check 0\n"),
        ([], 0.0, "off: the self-test failed on this device\n"),
    ],
)
async def test_what_is_checked_is_said(
    arguments: list[str],
    share: float,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The share and what it costs; that it is off, and why if the operator did not say so."""
    options = serve.make_context("serve", ["-v", *arguments, "--data-dir", str(tmp_path)]).params
    async with serving_fake(shadow_share=share) as server:
        greet("http://localhost:8000", server, {**options, "tenants": None})
    assert f"  checks       {words}" in capsys.readouterr().out


async def test_a_self_test_without_time_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line more says what it costs, and how to test again."""
    options = serve.make_context("serve", ["--data-dir", str(tmp_path)]).params

    def busy(*of: Any) -> StartedEngine:
        found = started(*of)
        late = "the search took longer than 180 s"
        return attrs.evolve(found, facts=attrs.evolve(found.facts, row_class_reason=late))

    async with booted(settings(NO_MODEL), MemoryStore(), SECRET, start_engine=busy) as server:
        greet("http://localhost:8000", server, {**options, "tenants": None})
        monkeypatch.setenv("CAIRN_PROGRAM", "./cairn")
        greet("http://localhost:8000", server, {**options, "tenants": None})
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    plain, of_checkout = said
    assert "reuse in whole blocks (the search took longer than 180 s): the machine" in plain
    assert plain.endswith("`ops serve --test-again`")
    assert of_checkout.endswith("`./cairn serve --test-again` or `make serve ARGS=--test-again`")


@pytest.mark.parametrize(
    ("tenants", "keys"), [(None, ""), ("alice, bob", ", with the API key of alice, bob")]
)
async def test_six_lines(
    tenants: str | None, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the page, the chat, the APIs and the log are; without --verbose no line more."""
    options = serve.make_context("serve", ["--data-dir", str(tmp_path)]).params
    async with serving_fake() as server:
        capsys.readouterr()
        greet("http://localhost:8000", server, {**options, "tenants": tenants})
        model = server.facts.model
    assert [
        f"Cairn serves {model} at http://localhost:8000",
        "  page       http://localhost:8000/",
        f"  chat       ops chat --data-dir {tmp_path}",
        f"  OpenAI     base URL http://localhost:8000/v1{keys}",
        f"  Anthropic  base URL http://localhost:8000{keys}",
        f"  log        {tmp_path / 'logs' / 'cairn.jsonl'}",
    ] == capsys.readouterr().out.splitlines()
