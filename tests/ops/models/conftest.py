"""A hub of the tests, and the command line in a process that knows no other."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.support.hub import Hub, running_hub

NAME = "mlx-community/Qwen3-0.6B-4bit"
WEIGHTS = "model.safetensors"
WEIGHTS_BYTES = 24_000_000
_LIMIT_S = 120


@attrs.frozen
class Shell:
    """Runs commands of `cairn` for a user who has nothing but an empty home directory."""

    home: Path
    hub: Hub

    @property
    def folder(self) -> Path:
        """The folder of the model in the hub's cache."""
        return self.home / "hub" / f"models--{NAME.replace('/', '--')}"

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of the process."""
        left_out = ("HF_", "XDG_", "OLLAMA_", "CAIRN_")
        own = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
        places = {"HOME": self.home, "HF_HOME": self.home, "CAIRN_DATA_DIR": self.home / "data"}
        return {
            **own,
            **{key: str(value) for key, value in places.items()},
            "CAIRN_CACHE_DIR": os.environ["CAIRN_CACHE_DIR"],
            "CAIRN_CONFIG": os.devnull,
            "HF_ENDPOINT": self.hub.url,
            "NO_PROXY": "*",
            **more,
        }

    def command(self, *arguments: str) -> list[str]:
        """The command line of a command."""
        return [sys.executable, "-P", "-m", "cairn", *arguments]

    def run(
        self, *arguments: str, lines: str = "", **more: str
    ) -> subprocess.CompletedProcess[str]:
        """
        Run a command to its end.

        Args:
            lines: what comes through a pipe.
        """
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(**more),
            input=lines,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub on the loopback."""
    with running_hub() as hub:
        yield hub


@pytest.fixture
def shell(tmp_path: Path, hub: Hub) -> Shell:
    """The command line, with a home directory of its own and this hub."""
    return Shell(tmp_path / "home", hub)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a model that is large enough to be cut off, and that nothing can compute."""
    return make_files(tmp_path_factory.mktemp("large"))


def make_files(folder: Path, size: int = WEIGHTS_BYTES) -> Path:
    """The files of a model of the family llama, with weights of a size."""
    config = {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "quantization": {"bits": 4, "group_size": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not a file that mlx-lm reads")
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": tensor}).encode()
    content = bytes(range(256)) * (size // 256 + 1)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + content[:size])
    return folder
