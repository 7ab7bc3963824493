"""
Makes a release: builds it from the commit alone, installs and tries the wheel, writes the list of
its parts and the hashes, and tags the commit. Nothing is published.

``make release`` runs it; ``--dry-run`` does all but the tag. The same commit gives the same files.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SBOM = "sbom.cyclonedx.json"
HASHES = "SHA256SUMS"


class Refused(Exception):
    """The release cannot be made. The message says why, and what to do."""


def main() -> None:
    """Make a release, or say in a sentence why not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().split("\n\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="do all but the tag")
    parser.add_argument("--sbom", type=Path, required=True, help="the program cyclonedx-py")
    given = parser.parse_args()
    try:
        version = checked(ROOT)
        folder = ROOT / "dist" / version
        shutil.rmtree(folder, ignore_errors=True)
        build(folder)
        try_out(folder, version, given.sbom)
        write_hashes(folder)
        if not given.dry_run:
            said = ("-m", f"Cairn {version}", "-m", (folder / HASHES).read_text(encoding="utf-8"))
            run("git", "tag", "-a", f"v{version}", *said)
    except Refused as refused:
        raise SystemExit(f"release: {refused}") from refused
    done = "not tagged" if given.dry_run else f"tagged v{version}"
    print(f"release: {folder.relative_to(ROOT)}, {done}")
    print((folder / HASHES).read_text(encoding="utf-8"), end="")


def checked(root: Path) -> str:
    """
    The version of the commit.

    Raises:
        Refused: something is not committed, the places that name the version differ, the changelog
            has no dated section for it, or it is tagged already.
    """
    if changed := run("git", "status", "--porcelain", at=root):
        raise Refused(f"these are not committed:\n{changed}")
    init = (root / "src/cairn/__init__.py").read_text(encoding="utf-8")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    versions = {
        "src/cairn/__init__.py": _found(r'^__version__ = "(.+)"$', init),
        "pyproject.toml": _found(r'^version = "(.+)"$', project),
    }
    if len(set(versions.values())) != 1:
        raise Refused(f"the version differs: {versions}")
    version = versions["pyproject.toml"]
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", log, re.M):
        raise Refused(f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`")
    if run("git", "tag", "--list", f"v{version}", at=root):
        raise Refused(f"v{version} is a tag already; raise the version")
    return version


def build(folder: Path) -> None:
    """Build wheel and source archive of the commit, from its files alone and with its time."""
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        archive = source / "source.tar"
        run("git", "archive", "--output", str(archive), "HEAD")
        run("tar", "-xf", str(archive), at=source)
        archive.unlink()
        epoch = run("git", "log", "-1", "--format=%ct")
        run(
            *(sys.executable, "-P", "-m", "hatchling", "build", "-d", str(folder)),
            at=source,
            SOURCE_DATE_EPOCH=epoch,
        )


def try_out(folder: Path, version: str, sbom: Path) -> None:
    """
    Install the wheel as its users do, and have the model in it answer. Writes the list of what was
    installed with it.
    """
    (wheel,) = folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as name:
        environment, home = Path(name) / "venv", Path(name) / "home"
        run(sys.executable, "-m", "venv", str(environment))
        run(str(environment / "bin/pip"), "install", "--quiet", str(wheel))
        cairn = str(environment / "bin/cairn")
        said = run(cairn, "version", at=Path(name))
        if said != f"cairn {version}":
            raise Refused(f"the wheel says that it is {said!r}")
        chat = (cairn, "chat", "--data-dir", str(home), "What is Cairn?")
        if not run(*chat, at=Path(name)).startswith("Cairn is a server"):
            raise Refused("the model in the wheel does not answer")
        list_of = (str(sbom), "environment", "--output-reproducible", "--of", "JSON")
        run(*list_of, "-o", str(folder / SBOM), str(environment / "bin/python"))


def write_hashes(folder: Path) -> None:
    """The SHA-256 of each file, as ``sha256sum -c`` reads it."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != HASHES
    ]
    (folder / HASHES).write_text("".join(lines), encoding="utf-8")


def run(*command: str, at: Path = ROOT, **environment: str) -> str:
    """
    What a command prints.

    Raises:
        Refused: it failed; the message has what it said.
    """
    # A checkout on the path would be tried in place of the wheel.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=at,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Refused(f"`{' '.join(command)}` failed:\n{done.stderr or done.stdout}")
    return done.stdout.strip()


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.M)
    return found[1] if found is not None else ""


if __name__ == "__main__":
    main()
