"""Downloads a model from a hub, with its progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

Progress = Callable[[str, int, int], None]

WHAT = "downloading the model"

FILES = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""What mlx-lm reads of a model."""


def download(name: str, progress: Progress, snapshot: Callable[..., str]) -> Path:
    """
    Download a model from a hub, or find it in the hub's cache. Modifies that cache.

    Args:
        snapshot: ``huggingface_hub.snapshot_download``, which reports progress through a class like
            tqdm's.
    """
    return Path(snapshot(name, allow_patterns=list(FILES), tqdm_class=bars(progress)))


def bars(progress: Progress) -> type[tqdm]:
    """
    A class of tqdm's bars that draw nothing and report their bytes. The hub has several at a time,
    of files, of bytes received and of bytes written, and not all of them move on every way.
    """
    counted: list[tqdm] = []

    class Reported(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the hub's own class has it
            if kwargs.get("unit") == "B":
                counted.append(self)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            done = max((int(bar.n) for bar in counted), default=0)
            total = max((int(bar.total or 0) for bar in counted), default=0)
            if total:
                progress(WHAT, min(done, total), total)
            return None

    return Reported
