"""The installed package rather than the checkout: the wheel, and the server in it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cairn.engine.model.builtin import builtin_directory
from cairn.journal import events as ev
from tests.support.processes.subprocess_server import ask, assistant, started, user

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as an installer builds it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_model_is_in_it(wheel: Path):
    """All of Pebble's files, as they are in the tree, and together at most 8 MB."""
    packed = zipfile.ZipFile(wheel)
    sizes = {one.filename: one.file_size for one in packed.infolist()}
    shipped = builtin_directory().iterdir()
    here = {f"cairn/pebble/{path.name}": path.stat().st_size for path in shipped}
    there = {name: size for name, size in sizes.items() if name.startswith("cairn/pebble/")}
    assert here == there
    assert sum(there.values()) <= 8_000_000


def test_the_product_alone_is_in_it(wheel: Path):
    """It has none of the benchmarks, the conformance suite and the other workshop packages."""
    tops = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {name for name in tops if not name.endswith(".dist-info")}
    assert {"cairn"} == packages
    workshop = {path.name for path in (ROOT / "workshop").glob("*/src/*")}
    assert {"cairn_bench", "cairn_conform"} <= workshop
    inside = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in inside if workshop & set(Path(name).parts)]


@pytest.mark.long
def test_a_read_only_installation(wheel: Path, tmp_path: Path):
    """A read-only installation serves Pebble."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = sorted(site.rglob("*"))
    talk = [user("Please remember that my name is Jordis."), assistant("Noted.")]
    try:
        env = {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        with started(tmp_path / "home", env=env) as server:
            answer = ask(server, *talk, user("What is my name?"), max_tokens=40)
            assert "Your name is Jordis." == answer.text
            (loaded,) = server.events(ev.ModelLoaded)
            assert str(site / "cairn" / "pebble") == loaded.directory
            assert 0 == server.stop()
        assert before == sorted(site.rglob("*"))  # also if root may write everywhere
    finally:
        for folder in folders:
            folder.chmod(0o755)
