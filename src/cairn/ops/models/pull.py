"""
Downloads a model from the hub, file by file, into the hub's own cache.

Rules of this module:

1. Before the first large byte: what the hub lists is a model for MLX, and the disk has room.
2. A file gets its name in the cache only after its hash was compared with what the hub lists:
   SHA-256 of large files, git's hash of small ones. The hub's client compares only the size.
3. What was received of a file stays (``found.PART``) until the file is complete, however the
   download ends; the next one continues there. The hub's client begins again.
4. The name of the revision (``refs/main``) is written last, so an update that was interrupted
   leaves the model as it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase as fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import attrs
from tqdm import tqdm

from cairn.engine.json_text import parsed
from cairn.engine.model.files import directory_fault
from cairn.engine.model.hub import FILES, download_fault
from cairn.ops.cli import Unreadable
from cairn.ops.common.output import printable
from cairn.ops.common.program import program
from cairn.ops.models.fitting import gigabytes
from cairn.ops.models.found import PART, family_fault, hub_cache, hub_folder
from cairn.ops.models.names import meant

_CONFIG = "config.json"
_CONFIG_MAX = 16 << 20
_WEIGHTS = ".safetensors"
_READ_BYTES = 4 << 20


@attrs.frozen
class HubFile:
    """
    A file as the hub lists it.

    Attributes:
        digest: its SHA-256 if it is a large file (LFS), else git's hash of a blob, in hex.
    """

    name: str
    size: int
    digest: str
    is_large: bool


@attrs.frozen
class Listed:
    """
    A model as the hub lists it.

    Attributes:
        revision: the commit.
        files: that mlx-lm reads; the small ones first.
    """

    name: str
    revision: str
    files: tuple[HubFile, ...]

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files)

    @property
    def weights_bytes(self) -> int:
        """The size of the weights."""
        return sum(file.size for file in self.files if file.name.endswith(_WEIGHTS))

    @property
    def missing_bytes(self) -> int:
        """What is not on this machine yet."""
        return sum(file.size - _received(self.name, file) for file in self.files)


class Shows(Protocol):
    """Shows how far a download is."""

    def begin(self, what: str, done: int, total: int) -> None:
        """A step begins, of so many bytes."""

    def reach(self, done: int) -> None:
        """So many bytes of the step are done."""


def listed_on_hub(name: str) -> Listed:
    """
    What the hub lists of a model.

    Raises:
        Unreadable: it cannot be reached, has no such model, or the model is not for MLX.
    """
    from huggingface_hub import HfApi

    with _explained(name):
        info = HfApi().model_info(name, files_metadata=True)
    known = {one.rfilename: one for one in info.siblings or ()}
    files = []
    for path in (path for path in known if any(fnmatch(path, one) for one in FILES)):
        one = known[path]
        digest = one.lfs.sha256 if one.lfs is not None else one.blob_id
        if info.sha is None or digest is None or one.size is None:
            raise Unreadable(
                f"{hub_host()} does not list sizes and hashes of {printable(name)}, so a download "
                "cannot be checked. Set $HF_ENDPOINT to a hub that does."
            )
        files.append(HubFile(path, one.size, digest, one.lfs is not None))
    files.sort(key=lambda file: (file.name != _CONFIG, file.size))
    listed = Listed(name, info.sha or "", tuple(files))
    _check_listed(listed, set(known))
    return listed


def hub_host() -> str:
    """The hub's host."""
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT


def _check_listed(listed: Listed, names: set[str]) -> None:
    """
    Check that it is a model for MLX, by its list of files and its configuration, which is fetched.

    Raises:
        Unreadable: it is none.
    """
    name = printable(listed.name)
    weights = [file for file in listed.files if file.name.endswith(_WEIGHTS)]
    if not weights:
        other = "weights in GGUF alone" if any(one.endswith(".gguf") for one in names) else ""
        raise Unreadable(
            f"{name} is not a model for MLX: it has {other or 'no weights (model*.safetensors)'}. "
            f"Look for it among the models of mlx-community.{meant(listed.name)}"
        )
    config = next((file for file in listed.files if file.name == _CONFIG), None)
    if config is None or config.size > _CONFIG_MAX:
        raise Unreadable(f"{name} is not a model for MLX: it has no config.json.")
    with _explained(listed.name):
        path = _fetched(listed, config, lambda _: None)
    try:
        fault = family_fault(name, parsed(path.read_text(encoding="utf-8")))
    except ValueError as error:
        fault = f"{name} is not a model for MLX: its config.json cannot be read: {error}."
    if fault is not None:
        raise Unreadable(fault)


def disk_fault(listed: Listed) -> str | None:
    """Why the rest of a model does not fit on the disk, in a sentence; None if it does."""
    missing, free = listed.missing_bytes, free_disk()
    if missing <= free:
        return None
    return (
        f"{printable(listed.name)} does not fit on the disk: {gigabytes(missing)} are to be "
        f"downloaded, and {gigabytes(free)} are free at {hub_cache()}. Remove a model with "
        f"`{program()} rm NAME`, or set $HF_HOME to a folder on another disk."
    )


def free_disk() -> int:
    """The free bytes of the disk with the hub's cache."""
    place = hub_cache().absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def download_model(listed: Listed, shows: Shows) -> Path:
    """
    Download what is missing, and check all of it. Modifies the hub's cache.

    Returns:
        The model's directory.

    Raises:
        Unreadable: it cannot be downloaded, or a file is not what the hub lists. What was received
            stays, except for that file.
    """
    from huggingface_hub import hf_hub_download

    # Its warnings that it tries again would be written into the bar.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with _explained(listed.name), _alone(listed.name):
        _check_present(listed, shows)
        done = listed.total_bytes - listed.missing_bytes
        shows.begin("downloading", done, listed.total_bytes)
        for file in listed.files:
            before = done - _received(listed.name, file)
            _fetched(listed, file, partial(_reach_after, shows, before))
            done = before + file.size
            shows.reach(done)
        # This writes the name of the revision.
        current = Path(hf_hub_download(listed.name, _CONFIG))
    if current.parent.name != listed.revision:
        raise Unreadable(
            f"{printable(listed.name)} was changed on {hub_host()} during the download. Run the "
            "command again: it downloads what is new."
        )
    directory = current.parent
    if (fault := directory_fault(str(directory))) is not None:
        raise Unreadable(f"{printable(listed.name)} is what {hub_host()} lists, but: {fault}")
    return directory


def _check_present(listed: Listed, shows: Shows) -> None:
    """Compare the hashes of complete files that are here already. A damaged one is removed."""
    blobs = hub_folder(listed.name) / "blobs"
    present = [file for file in listed.files if (blobs / file.digest).exists()]
    if any(file.is_large for file in present):
        shows.begin("checking what is here", 0, sum(file.size for file in present))
    done = 0
    for file in present:
        blob = blobs / file.digest
        if _digest_of(blob, file, partial(_reach_after, shows, done)) != file.digest:
            blob.unlink()
        done += file.size


def _reach_after(shows: Shows, before: int, size: int) -> None:
    shows.reach(before + size)


def _received(name: str, file: HubFile) -> int:
    """How many bytes of a file are on this machine."""
    blob = hub_folder(name) / "blobs" / file.digest
    if blob.exists():
        return file.size
    part = blob.with_name(blob.name + PART)
    return min(file.size, part.stat().st_size) if part.exists() else 0


def _fetched(listed: Listed, file: HubFile, reach: Callable[[int], None]) -> Path:
    """
    A file in the cache, downloaded and checked if it was not there.

    Args:
        reach: called with how many bytes of the file are here.

    Raises:
        Unreadable: it is not what the hub lists; it was removed.
    """
    from huggingface_hub import hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # in its docs

    blob = hub_folder(listed.name) / "blobs" / file.digest
    if not blob.exists():
        part = blob.with_name(blob.name + PART)
        part.parent.mkdir(parents=True, exist_ok=True)
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()
        with part.open("ab") as written:
            if (size := written.tell()) < file.size:
                http_get(
                    hf_hub_url(listed.name, file.name, revision=listed.revision),
                    written,
                    resume_size=size,
                    headers=build_hf_headers(),
                    expected_size=file.size,
                    displayed_filename=file.name,
                    tqdm_class=_reports(reach),
                )
        found = _digest_of(part, file, lambda _: None)
        if found != file.digest:
            part.unlink()
            raise Unreadable(
                f"{printable(file.name)} of {printable(listed.name)} is not what {hub_host()} "
                f"lists: its hash is {found[:16]}..., and not {file.digest[:16]}.... It was "
                "removed. Run the command again; if that repeats, something on the way from "
                f"{hub_host()} changes files."
            )
        part.rename(blob)
    # The hub's client finds the contents, and gives them their name.
    return Path(hf_hub_download(listed.name, file.name, revision=listed.revision))


def _digest_of(path: Path, file: HubFile, reach: Callable[[int], None]) -> str:
    """The hash of a file of the kind that the hub lists for it."""
    if file.is_large:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    done = 0
    with path.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            digest.update(data)
            done += len(data)
            reach(done)
    return digest.hexdigest()


@contextlib.contextmanager
def _alone(name: str) -> Iterator[None]:
    """
    Keep other downloads of this model by Cairn out while the context lasts.

    Raises:
        Unreadable: there is one.
    """
    folder = hub_folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "cairn.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unreadable(
                f"Another process downloads {printable(name)} at the moment. Wait until it ends."
            ) from error
        yield


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn the errors of the hub's client into sentences."""
    try:
        yield
    except (Unreadable, KeyboardInterrupt):
        raise
    except Exception as error:  # the hub's client raises many kinds of errors
        words = download_fault(printable(name), error)
        if words.startswith("There is no model"):
            words += meant(name)
        raise Unreadable(words) from error


def _reports(reach: Callable[[int], None]) -> type[tqdm]:
    """A subclass of tqdm that draws nothing and reports how many bytes there are."""

    class Reported(tqdm):  # type: ignore[misc]  # tqdm has no types
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # only the hub's own class takes it
            super().__init__(*args, **{**kwargs, "disable": True})
            self.n = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self.n += int(n or 0)
            reach(self.n)
            return None

    return Reported
