"""How the server treats clients that know little about it: names, defaults, adapters."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import struct
from pathlib import Path

import pytest

from cairn.journal import events as ev
from cairn.ops.models.fitting import suggestion, this_machine
from tests.e2e.conftest import Start
from tests.e2e.operation.test_startup import refusal
from tests.support.models.lora_adapters import make_adapter
from tests.support.processes.subprocess_server import started, user

HELLO = [user("Hello")]


@pytest.mark.long
def test_requested_and_served_model_are_reported(start: Start):
    """
    A request for another model is served, and journal and answer name the model; with strict names
    it is refused, and only the server's own name, or none, is served.
    """
    easy, strict = start(), start("--model-name", "stones", "--strict-model-names")

    answer = easy.post(messages=HELLO, model="gpt-9", max_tokens=2).json()

    (loaded,) = easy.events(ev.ModelLoaded)
    assert loaded.name == answer["model"] != "gpt-9"
    assert ["gpt-9"] == [one.requested_model for one in easy.events(ev.RequestReceived)]
    assert [404, 200, 200] == [
        strict.post(messages=HELLO, max_tokens=2, **model).status_code
        for model in ({"model": "gpt-9"}, {"model": "stones"}, {})
    ]
    assert ["stones", ""] == [one.requested_model for one in strict.events(ev.RequestReceived)]


@pytest.mark.long
def test_the_defaults_of_the_model_apply(tmp_path: Path, model_directory: Path):
    """
    The journal has the settings of each request: the model's recommended ones for fields that were
    left out.
    """
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    recommended = {"do_sample": False, "top_k": 7, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps(recommended))

    with started(tmp_path / "home", "--model", model) as server:
        for body in ({}, {"temperature": 0.5, "repetition_penalty": 1}):
            assert 200 == server.post(messages=HELLO, max_tokens=2, **body).status_code
        used = [dict(one.sampling) for one in server.events(ev.RequestReceived)]

    said, unsaid = used[1], used[0]
    names = ("temperature", "top_k", "repetition_penalty", "top_p")
    assert [0.0, 7, 1.5, 1.0] == [unsaid[name] for name in names]
    assert [0.5, 7, 1.0, 1.0] == [said[name] for name in names]


def test_a_model_that_does_not_fit(tmp_path: Path, model_directory: Path):
    """Weights too large for any machine are refused by their header alone, with both numbers."""
    model = tmp_path / "model"
    shutil.copytree(model_directory, model)
    size = 1 << 43
    tensors = {"t": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}
    header = json.dumps(tensors).encode()
    with (model / "model-00002-of-00002.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)

    sentence = refusal("--data-dir", tmp_path / "home", "--model", model)

    assert f"{model} does not fit in memory: its weights take 8.0 TiB" in sentence
    assert "loading the model" not in sentence
    fitting = suggestion(this_machine())
    assert fitting is None or f"One that fits this machine: `ops serve --model {fitting.name}`" in (
        sentence
    )


@pytest.mark.long
def test_an_adapter_is_reported_and_a_broken_one_refused(
    start: Start, tmp_path: Path, model_directory: Path
):
    """
    The startup banner and, as a private field, the journal name it; a missing one is refused in one
    sentence.
    """
    adapter = make_adapter(model_directory, tmp_path / "adapter", seed=3)

    server = start("--adapter", adapter)

    greeting = server.greeting()
    assert f"  adapter      {adapter}" in greeting
    assert "  sampling     temperature 0, repetition_guard 1, unless" in greeting
    assert "  context      65536 tokens\n" in greeting
    (loaded,) = server.events(ev.ModelLoaded)
    assert str(adapter) == loaded.adapter
    assert 200 == server.post(messages=HELLO, max_tokens=2).status_code
    missing = tmp_path / "missing"
    assert f"There is no adapter directory at '{missing}'." == refusal(
        "--data-dir", tmp_path / "other", "--model", model_directory, "--adapter", missing
    ).removeprefix("Error: ")


def test_silent_connections_stop_no_one(tmp_path: Path, model_directory: Path):
    """
    A server with few descriptors, and more silent connections than it has: it answers, and its log
    has no failure. The import of mlx_lm has not changed its limits.
    """
    few = ("sh", "-c", 'ulimit -Sn 200 && ulimit -Hn 300 && exec "$@"', "sh")
    with started(tmp_path / "home", "--model", model_directory, within=few) as server:
        limits = Path(f"/proc/{server.pid}/limits")
        if limits.exists():
            (line,) = [one for one in limits.read_text().splitlines() if "open files" in one]
            assert ["300", "300"] == line.split()[3:5]
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                stack.enter_context(socket.create_connection(server.address, timeout=60))
            assert "ok" == server.health()["status"]
            assert 200 == server.post(messages=HELLO, max_tokens=2).status_code
        assert 0 == server.stop()
        assert "Traceback" not in server.stderr()
        assert {"too many connections wait; the oldest are closed"} == {
            line["event"] for line in server.log() if line["level"] == "warning"
        }
