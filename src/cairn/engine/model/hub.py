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
"""The files of a model that mlx-lm reads."""


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
    A subclass of tqdm that draws nothing and reports bytes. The hub's client shows several bars at
    a time (files, bytes received, bytes written), and how it downloads decides which of them move.
    """
    counted: list[tqdm] = []

    class Reported(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class takes it
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
