"""`ops top`: a running server, at one moment and over time."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cairn.ops.top import Kv, Look, Session, lines
from tests.ops.chat.conftest import faked

HEALTH: dict[str, Any] = {
    "status": "ok",
    "model": "tiny",
    "queue": {"queued": 2, "running": 1},
    "pool": {"slabs": 1, "slabs_total": 4, "bytes": 1024, "bytes_total": 4096},
    "blocks": {
        "count": 3,
        "bytes": 512,
        "bytes_total": 2048,
        "disk_count": 0,
        "disk_bytes": 0,
        "disk_bytes_total": 0,
    },
}
SESSION = Session(
    id="f221b9a8-dec4-4006-b7c0-1964353c27be",
    state="decoding",
    turns=3,
    prompt_tokens=100,
    reused_tokens=64,
    context_tokens=120,
    context_max=4096,
    used_us=0,
    kv=Kv(where="slab"),
    words="Hello \x1b[2Jthere",
    bugs=("b1",),
)
LOOK = Look(health=HEALTH, sessions=(SESSION,), generated=100.0, at_s=1.0)


def test_what_is_shown():
    """The server first, then its sessions; nothing of them steers the terminal."""
    assert [
        "tiny  ok",
        "running 1  waiting 2",
        "slabs   1 of 4  1.0 KiB of 4.0 KiB (25 %)",
        "memory  3 blocks  512 bytes of 2.0 KiB (25 %)",
        "disk    0 blocks  0 bytes of 0 bytes",
        "",
        "session   state     first words         turns  context   reused  kv    used",
        "f221b9a8  decoding  Hello \\x1b[2Jthere  3      120/4096  64 %    slab  2 min ago  1 bugs",
    ] == lines(LOOK, None, 120_000_000)


def test_tokens_a_second():
    """By two looks; a server that was started again has a rate of 0."""
    later = attrs.evolve(LOOK, generated=150.0, at_s=3.0)
    assert "tiny  ok  25 tok/s" == lines(later, LOOK, 0)[0]
    assert "tiny  ok  0 tok/s" == lines(attrs.evolve(later, generated=1.0), LOOK, 0)[0]
    for other in (attrs.evolve(LOOK, generated=None), attrs.evolve(LOOK, at_s=3.0)):
        assert "tiny  ok" == lines(later, other, 0)[0]


def test_a_tenant_sees_no_totals():
    """What a server leaves out is left out."""
    look = attrs.evolve(LOOK, health={"status": "ok", "model": "tiny"})
    assert ["tiny  ok", ""] == lines(look, None, 0)[:2]


def test_once(run):
    """Without a terminal it is printed once, over a server that runs."""
    with faked() as server:
        result = run("top", "--url", server.url)
    assert 0 == result.exit_code
    head, queue, *_ = result.stdout.splitlines()
    assert head.startswith("cairn/small-1  ok")
    assert "running 1  waiting 2" == queue


@pytest.mark.parametrize("options", [(), ("--url", "http://127.0.0.1:9")])
def test_no_server(run, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """The message says how to start one, or that nothing answers."""
    monkeypatch.setattr("cairn.ops.chat.server.DEFAULT_URL", "http://127.0.0.1:9")
    result = run("top", *options)
    assert 2 == result.exit_code
    assert "ops serve" in result.stderr
