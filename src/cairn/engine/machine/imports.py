"""
A quicker import of transformers.

Whenever it is imported, transformers reads its 3,000 files to learn which names each of them has:
half of the time that a server takes to start. That list is kept in the user's cache, and made again
if the files have changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from cairn.engine.machine.cache import cache_folder, replace_file

_MODULE = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"

Names = dict[frozenset[str], dict[str, set[str]]]
"""The names in each module, by what has to be installed for them."""


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """While this is open, an import of transformers uses the list that is kept, or keeps it."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, as Python does, and replaces a function in it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if found is not None and isinstance(found.loader, importlib.machinery.SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if make := getattr(module, _FUNCTION, None):
            setattr(module, _FUNCTION, stored(make))


def stored(make: Callable[..., Names]) -> Callable[..., Names]:
    """
    The same function, which looks for its result in a file first.

    Args:
        make: of a folder, or of a file in it, and of a prefix of all modules.
    """

    @functools.wraps(make)
    def define(module_path: str | Path, prefix: str | None = None) -> Names:
        file = _file_of(Path(module_path), prefix)
        if file is None:
            return make(module_path, prefix)
        # A file that cannot be read, or is not whole, is written again.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            listed = json.loads(file.read_text(encoding="utf-8"))
            if not listed:
                raise ValueError("a list without names")
            return {
                frozenset(needed): {name: set(names) for name, names in modules.items()}
                for needed, modules in listed
            }
        made = make(module_path, prefix)
        with contextlib.suppress(OSError):
            _write(file, made)
        return made

    return define


def _file_of(module_path: Path, prefix: str | None) -> Path | None:
    """The file for a list: another when the folder or the code that makes lists has changed."""
    cache = cache_folder()
    folder = module_path if module_path.is_dir() else module_path.parent
    if cache is None:
        return None
    version = importlib.metadata.version("transformers")  # times and sizes may be equal
    digest = hashlib.sha256(f"{sys.version_info[:2]} {version} {folder} {prefix}".encode())
    for place in (folder, folder / "__init__.py", Path(sys.modules[_MODULE].__file__ or folder)):
        facts = place.stat()
        digest.update(f" {facts.st_mtime_ns} {facts.st_size}".encode())
    return cache / "imports" / f"transformers-{digest.hexdigest()[:16]}.json"


def _write(file: Path, names: Names) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    listed = [
        [sorted(needed), {name: sorted(found) for name, found in modules.items()}]
        for needed, modules in names.items()
    ]
    replace_file(file, json.dumps(listed).encode())
