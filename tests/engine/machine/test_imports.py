"""The list of transformers' names that is kept between imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

from cairn.engine.machine.imports import Names, stored

LISTED: Names = {
    frozenset(): {"one.configuration_one": {"OneConfig", "OneTextConfig"}},
    frozenset({"torch", "vision"}): {"one.modeling_one": {"OneModel"}},
}


class Maker:
    """Makes the list, and counts how often."""

    def __init__(self) -> None:
        self.calls: list[tuple[Path, str | None]] = []

    def __call__(self, module_path: Path, prefix: str | None = None) -> Names:
        self.calls.append((module_path, prefix))
        return LISTED


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("CAIRN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package."""
    package = tmp_path / "models"
    package.mkdir()
    (package / "__init__.py").touch()
    return package


def test_made_once(cache: Path, folder: Path) -> None:
    """The second call reads the list of the first, also when it names a file of the folder."""
    first, second = Maker(), Maker()
    assert LISTED == stored(first)(folder, "models") == stored(second)(folder, "models")
    assert [(folder, "models")] == first.calls
    assert [] == second.calls
    stored(second)(folder / "__init__.py")
    assert [(folder / "__init__.py", None)] == second.calls


def test_made_again_when_the_folder_has_changed(cache: Path, folder: Path) -> None:
    """A new version has other files."""
    stored(Maker())(folder)
    os.utime(folder, ns=(1, 1))
    again = Maker()
    stored(again)(folder)
    assert [(folder, None)] == again.calls


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"a": 1}', "[[[], []]]"])
def test_made_again_when_the_file_is_damaged(text: str, cache: Path, folder: Path) -> None:
    """It is written again."""
    stored(Maker())(folder)
    (file,) = (cache / "imports").iterdir()
    file.write_text(text, encoding="utf-8")
    again, last = Maker(), Maker()
    assert LISTED == stored(again)(folder)
    assert LISTED == stored(last)(folder)
    assert (1, 0) == (len(again.calls), len(last.calls))


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is made each time."""
    monkeypatch.setenv("CAIRN_CACHE_DIR", str(folder / "__init__.py"))
    maker = Maker()
    assert LISTED == stored(maker)(folder) == stored(maker)(folder)
    assert 2 == len(maker.calls)


def test_the_names_of_transformers(cache: Path) -> None:
    """An import keeps them; those of the file are those that transformers makes."""
    code = "import cairn.engine.mlx, transformers; print(transformers.AutoTokenizer.__name__)"
    for _ in range(2):
        said = subprocess.check_output([sys.executable, "-P", "-c", code], text=True)
        assert "AutoTokenizer" == said.strip()
    stored_files = sorted((cache / "imports").iterdir())
    models = Path(import_utils.__file__).parents[1] / "models"
    named = stored(import_utils.define_import_structure)(models, "models")
    assert stored_files == sorted((cache / "imports").iterdir())
    assert import_utils.define_import_structure(models, "models") == named
