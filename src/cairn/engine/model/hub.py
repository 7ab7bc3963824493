"""Downloads a model from a hub, with its progress."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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


def download_fault(name: str, error: BaseException) -> str:
    """
    Why a model could not be downloaded, and what to do. The hub's client raises many kinds of
    errors, and some only as the cause of another.
    """
    from huggingface_hub import constants, errors

    host = urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT
    chain = list(_chain(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(one, kinds) for one in chain)

    if has(errors.OfflineModeIsEnabled) or (constants.HF_HUB_OFFLINE and _not_here(chain)):
        return (
            f"{name} is neither a local directory nor in the cache of downloaded models, and "
            "$HF_HUB_OFFLINE forbids downloads. Unset it, or name a directory."
        )
    if has(errors.GatedRepoError):
        return (
            f"{name} on {host} is only for those who accept its terms. Accept them there, and set "
            "$HF_TOKEN to a token of your account."
        )
    if has(errors.RepositoryNotFoundError, errors.HFValidationError):
        return (
            f"There is no model {name} on {host}, and no local directory of that name. Names on "
            f"{host} look like mlx-community/Qwen3-4B-4bit. If it is private, set $HF_TOKEN."
        )
    if any(isinstance(one, OSError) and one.errno == errno.ENOSPC for one in chain):
        return (
            f"The disk is full, so {name} could not be downloaded. Free some space; the download "
            "continues where it stopped."
        )
    if has(errors.HfHubHTTPError):
        return f"{host} did not send {name}: {_words(error)}. Try again later."
    if _not_here(chain) or any(type(one).__name__ in _UNREACHABLE for one in chain):
        return (
            f"{host} cannot be reached, and {name} is neither a local directory nor in the cache "
            "of downloaded models. Check the network, or name a directory."
        )
    return f"{name} could not be downloaded from {host}: {_words(error)}."


_UNREACHABLE = ("ConnectError", "ConnectTimeout", "ReadTimeout", "ConnectionError", "Timeout")
"""Errors of the client's HTTP library, which need not be the one that Cairn uses."""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _not_here(chain: list[BaseException]) -> bool:
    from huggingface_hub import errors

    return any(isinstance(one, errors.LocalEntryNotFoundError) for one in chain)


def _words(error: BaseException) -> str:
    """The first line of an error, without a full stop."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


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
