"""
Results of self-tests, in files that all data directories of a user share.

A self-test takes seconds, with a large model minutes, and a journal keeps its result for that
journal alone. These files spare the test to a new data directory, and to the private servers of
drills.

1. A result is stored if the test passed, and removed if a later one with the same key fails.
2. A file is used if its hash is right, only its owner can write it, and its key is the same: every
   field of the fingerprint, and the code of the engine that tested. Otherwise the self-test runs.
3. A file that cannot be read or written is logged, and changes nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec
import structlog

import cairn.engine
from cairn.engine.errors import EngineFault
from cairn.engine.machine.cache import replace_file
from cairn.engine.model import fingerprint
from cairn.engine.row_class import RowClass
from cairn.journal.events import SelfTestFinished

log = structlog.get_logger("cairn")

_FORMAT = 1
_MOST_BYTES = 1 << 20
_HASH_BYTES = 64
_encoder = msgspec.json.Encoder(order="deterministic")


@attrs.frozen
class StoredSelfTests:
    """The files of a folder. It is created with the first of them."""

    folder: Path

    def read(self, fields: Mapping[str, Any]) -> SelfTestFinished | None:
        """
        The result for a fingerprint without its row class; None if there is none to use, which is
        logged if there is a file.
        """
        path = self.path(fields)
        try:
            return _result(_read(path), fields)
        except FileNotFoundError:
            return None
        except OSError as error:
            fact = error.strerror or str(error)
        except (_Unusable, msgspec.MsgspecError, ValueError, EngineFault) as error:
            fact = str(error)
        log.warning(
            "a stored self-test cannot be used, so it runs again", file=str(path), fact=fact
        )
        return None

    def write(self, fields: Mapping[str, Any], tested: SelfTestFinished) -> None:
        """
        Store the result of a test that passed, or remove an earlier one if it failed. Logs what
        could not be written.
        """
        path = self.path(fields)
        try:
            if tested.passed:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                replace_file(path, _signed(_document(fields, msgspec.to_builtins(tested))))
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            fact = error.strerror or str(error)
            log.warning("the result of the self-test is not stored", file=str(path), fact=fact)

    def path(self, fields: Mapping[str, Any]) -> Path:
        """The file for a fingerprint without its row class, tested by this code."""
        return self.folder / f"{hashlib.sha256(_encoder.encode(_key(fields))).hexdigest()}.json"


def engine_code() -> str:
    """One hash over the modules of the engine: a change in them may find what a test missed."""
    return code_hash(Path(cairn.engine.__path__[0]))


@functools.cache
def code_hash(root: Path) -> str:
    """One hash over the names and contents of a folder's modules. They are read once."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        found.update(f"{path.relative_to(root)}/{len(text)}/".encode() + text)
    return found.hexdigest()


class _Unusable(Exception):
    """A file is not what was written. The message says why."""


def _key(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": _FORMAT, "fingerprint": dict(fields), "engine": engine_code()}


def _document(fields: Mapping[str, Any], result: Mapping[str, Any]) -> bytes:
    return _encoder.encode({"key": _key(fields), "result": result})


def _signed(document: bytes) -> bytes:
    """A document with its hash in a second line."""
    return document + b"\n" + hashlib.sha256(document).hexdigest().encode()


def _read(path: Path) -> bytes:
    """
    The document of a file.

    Raises:
        OSError: it cannot be read.
        _Unusable: others may have written it, or it is damaged.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        of = os.fstat(handle)
        if not stat.S_ISREG(of.st_mode):
            raise _Unusable("it is not a file")
        if of.st_uid != os.geteuid() or of.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _Unusable("other users can write it")
        content = os.read(handle, _MOST_BYTES)
    finally:
        os.close(handle)
    document = content[: -_HASH_BYTES - 1]
    if content != _signed(document):
        raise _Unusable("it is damaged")
    return document


def _result(document: bytes, fields: Mapping[str, Any]) -> SelfTestFinished:
    """
    What a document says.

    Raises:
        _Unusable: it is another test's.
        msgspec.MsgspecError: it is not of this form.
        EngineFault: there is no such row class.
    """
    result = msgspec.json.decode(document)["result"]
    if document != _document(fields, result):
        raise _Unusable("it is of another fingerprint")
    tested = msgspec.convert(result, SelfTestFinished)
    RowClass.of(tested.row_class)
    if not tested.passed or tested.base_fingerprint != fingerprint.base_of(fields):
        raise _Unusable("it is not of a passed test")
    return tested
