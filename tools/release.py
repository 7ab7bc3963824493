"""
Makes a release: builds it from the commit, and writes its hashes, its SBOM and its tag.

Called by ``make release VERSION=0.1.0``; docs/how-to/release.md says what comes before and after.
Publishes nothing. Nothing is built if the commit cannot be released, and the tag comes last.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SBOM = "sbom.cdx.json"
SUMS = "SHA256SUMS"


def main() -> None:
    """Make a release, or say why there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="the version, such as 0.1.0")
    parser.add_argument("--no-tag", action="store_true", help="make all but the tag")
    parser.add_argument("--tools", type=Path, required=True, help="Python with build and cyclonedx")
    given = parser.parse_args()
    if faults := list(faults_of(ROOT, given.version)):
        sys.exit("\n".join(("No release was made.", *faults)))
    folder = ROOT / "dist" / given.version
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    wheel = build(ROOT, folder, given.tools)
    describe(ROOT, wheel, folder / SBOM, given.tools)
    sums = write_sums(folder)
    print(sums, end="")
    if given.no_tag:
        print(f"{folder}: built, without a tag")
        return
    tag = f"v{given.version}"
    run("git", "tag", "--annotate", tag, "--message", f"Cairn {given.version}\n\n{sums}", at=ROOT)
    print(f"{folder}: built, and tagged {tag}. Nothing was published.")


def faults_of(root: Path, version: str) -> Iterator[str]:
    """
    Why the commit of a checkout cannot be released under a version: a sentence for each reason.

    Changes nothing.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        yield f"{version!r} is not a version such as 0.1.0 or 0.2.0rc1."
        return
    with (root / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["version"]
    if declared != version:
        yield f"pyproject.toml has version {declared}, not {version}."
    module = (root / "src" / "cairn" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.*)"$', module, re.MULTILINE)
    if found is None or found[1] != version:
        yield f"src/cairn/__init__.py has version {found and found[1]}, not {version}."
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(heading, changes, re.MULTILINE):
        yield f"CHANGELOG.md has no heading `## [{version}] - YYYY-MM-DD`."
    if changed := run("git", "status", "--porcelain", at=root).splitlines():
        yield f"The working tree has changes; commit or remove them: {', '.join(changed[:5])}"
    if run("git", "tag", "--list", f"v{version}", at=root).strip():
        yield f"The tag v{version} exists. A version is released once."


def build(root: Path, folder: Path, tools: Path) -> Path:
    """
    Build the source distribution, and the wheel from it, of the checked-out commit.

    Args:
        folder: where they are written to.
        tools: a Python with the package build, which makes an environment of its own.

    Returns:
        The wheel.
    """
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, "commit.tar")
        run("git", "archive", "--output", str(archive), "HEAD", at=root)
        with tarfile.open(archive) as packed:
            packed.extractall(Path(scratch, "commit"), filter="data")
        # The same commit gives the same bytes.
        time = run("git", "log", "-1", "--format=%ct", at=root).strip()
        command = (str(tools), "-m", "build", "--outdir", str(folder))
        run(*command, at=Path(scratch, "commit"), variables={"SOURCE_DATE_EPOCH": time})
    (wheel,) = folder.glob("*.whl")
    return wheel


def describe(root: Path, wheel: Path, sbom: Path, tools: Path) -> None:
    """
    Install a wheel in an empty environment with the locked versions, run it, and write what is
    installed there as an SBOM of CycloneDX.

    Args:
        tools: a Python with the package cyclonedx-bom.
    """
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = str(Path(scratch, "bin", "python"))
        lock = (root / "requirements.lock").read_text(encoding="utf-8")
        pins = Path(scratch, "pins.txt")
        pins.write_text("\n".join(re.findall(r"^\S+==[^\\\n]+", lock, re.MULTILINE)))
        run(python, "-m", "pip", "install", "-q", "-c", str(pins), str(wheel), at=Path(scratch))
        said = run(str(Path(scratch, "bin", "cairn")), "version", at=Path(scratch))
        print(said.splitlines()[0])
        run(python, "-m", "pip", "uninstall", "-q", "-y", "pip", at=Path(scratch))
        run(
            *(str(tools), "-m", "cyclonedx_py", "environment", "--output-reproducible"),
            *("--pyproject", str(root / "pyproject.toml"), "--mc-type", "application"),
            *("--of", "JSON", "--output-file", str(sbom), python),
            at=root,
        )


def write_sums(folder: Path) -> str:
    """Write the SHA-256 of each file of a folder as ``sha256sum`` does. Returns the text."""
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")
    return "".join(lines)


def run(*command: str, at: Path, variables: dict[str, str] | None = None) -> str:
    """
    What a program writes to stdout.

    Raises:
        SystemExit: it failed; the message has the end of what it wrote.
    """
    done = subprocess.run(
        command,
        cwd=at,
        # Of the environment of this checkout, nothing counts.
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        sys.exit(f"No release was made. `{' '.join(command)}` failed:\n{end}")
    return done.stdout


if __name__ == "__main__":
    main()
