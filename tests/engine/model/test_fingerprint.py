"""The fingerprint: everything that may change a bit changes the name."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.machine.blas import BlasIdentity
from cairn.engine.model import fingerprint
from cairn.engine.model.fingerprint import (
    STEERING,
    collect,
    hash_files,
    hash_libraries,
    mlx_folders,
)
from cairn.journal.keys import fingerprint_of

FILES = {
    "model-00001-of-00002.safetensors": b"weights",
    "model-00002-of-00002.safetensors": b"more weights",
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "vocab.json": b"{}",
    "merges.txt": b"a b",
    "qwen.tiktoken": b"a 1",
    "chat_template.jinja": b"{{ messages }}",
}
WEIGHTS = (*list(FILES)[:2], "config.json", "generation_config.json")
FIELDS = {
    "weights",
    "tokenizer",
    "dtypes",
    "mlx",
    "mlx_libraries",
    "mlx_lm",
    "llguidance",
    "cairn_engine",
    "device",
    "system",
    "system_build",
    "processor",
    "blas",
    "environment",
    "block_tokens",
    "tail_rule",
    "decode_rows",
    "kv_policy",
    "kv_cache",
    "shards",
    "context_tokens",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory, and an environment without variables that affect kernels."""
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for name in STEERING:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def fields(directory: Path, **changes: Any) -> Mapping[str, Any]:
    """The fields of a fingerprint."""
    usual: dict[str, Any] = {
        "device": {"name": "cpu", "memory": "1"},
        "dtypes": {"float32": 3, "uint32": 4},
        "block_tokens": 64,
        "decode_rows": 4,
        "kv_cache": "slab",
        "context_tokens": 4096,
    }
    return collect(directory=directory, **{**usual, **changes})


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """The fields that differ, if the names do."""
    assert fingerprint_of(one) != fingerprint_of(other)
    return {field for field in one if one[field] != other[field]}


def test_the_fields(directory: Path) -> None:
    """Nothing is left out, and two collections of the same are equal."""
    found = fields(directory)

    assert set(found) == FIELDS
    assert found == fields(directory)
    assert fingerprint_of(found) == fingerprint_of(fields(directory))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_field_changes_the_name(directory: Path, field: str) -> None:
    """A field with a different value, or without one, gives a different name."""
    found = dict(fields(directory))
    expected = fingerprint_of(found)

    assert expected != fingerprint_of({**found, field: "other"})
    del found[field]
    assert expected != fingerprint_of(found)


def test_another_build_of_mlx_changes_the_name(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's own libraries count by their bytes, whatever version they say they are."""
    folder = tmp_path / "mlx"
    (folder / "lib").mkdir(parents=True)
    for name in ("core.cpython-311-x86_64-linux-gnu.so", "lib/libmlx.so", "lib/mlx.metallib"):
        (folder / name).write_bytes(name.encode())
    (folder / "lib" / "notes.txt").write_text("of no kernel")
    monkeypatch.setattr(fingerprint, "mlx_folders", lambda: (folder,))
    before = fields(directory)
    assert before == fields(directory)
    (folder / "lib" / "notes.txt").write_text("other")
    assert before == fields(directory)
    for name in ("core.cpython-311-x86_64-linux-gnu.so", "lib/libmlx.so", "lib/mlx.metallib"):
        was = fields(directory)
        (folder / name).write_bytes(name.encode()[::-1])
        assert {"mlx_libraries"} == differing(was, fields(directory))


def test_the_libraries_that_compute_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Those of this environment are found without an import, hashed, and read once as long as the
    system knows them by the same.
    """
    folders = mlx_folders()
    found = {
        path.name.split(".")[0] for one in folders for path in one.rglob("*") if path.is_file()
    }
    assert {"core", "libmlx"} <= found
    hashed = hash_libraries(folders)
    assert 64 == len(hashed)
    assert hashed != hash_libraries(())

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(fingerprint, "blake3", never)
    assert hashed == hash_libraries(folders)


def test_a_name_is_pinned() -> None:
    """Names are pinned, because old journals have them; the order of fields does not count."""
    made = {"weights": "w", "device": {"name": "cpu", "memory": "1"}, "shards": 1, "blas": None}

    assert "6a2ec87fd15e2ed4" == fingerprint_of(made)
    assert fingerprint_of(made) == fingerprint_of(dict(reversed(made.items())))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", {"name": "gpu", "memory": "1"}),
        ("device", {"name": "cpu", "memory": "2"}),
        ("dtypes", {"float32": 4, "uint32": 4}),
        ("dtypes", {"float16": 3, "uint32": 4}),
        ("block_tokens", 128),
        ("decode_rows", 1),
        ("kv_cache", "mlx-lm"),
        ("context_tokens", 8192),
    ],
)
def test_what_is_given_is_in_it(directory: Path, field: str, value: Any) -> None:
    """Each argument comes into the field of its name and into no other."""
    assert {field} == differing(fields(directory), fields(directory, **{field: value}))


def test_the_order_of_what_is_given_does_not_count(directory: Path) -> None:
    """The same device and types in another order have the same name."""
    turned = fields(
        directory,
        device={"memory": "1", "name": "cpu"},
        dtypes={"uint32": 4, "float32": 3},
    )

    assert fingerprint_of(fields(directory)) == fingerprint_of(turned)


@pytest.mark.parametrize("variable", STEERING)
def test_a_variable_that_steers_kernels(
    directory: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """It is in the fingerprint when it is set, with its value, and even if it is set to nothing."""
    unset = fields(directory)
    assert {} == unset["environment"]
    monkeypatch.setenv(variable, "")
    empty = fields(directory)
    monkeypatch.setenv(variable, "1")
    one = fields(directory)

    assert {variable: "1"} == one["environment"]
    assert 3 == len({fingerprint_of(unset), fingerprint_of(empty), fingerprint_of(one)})


def test_another_variable_is_not_in_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other variables do not change the name."""
    before = fingerprint_of(fields(directory))
    monkeypatch.setenv("CAIRN_TEST_STEERS_NOTHING", "1")

    assert before == fingerprint_of(fields(directory))


@pytest.mark.parametrize(("package", "field"), [("mlx", "mlx"), ("mlx-lm", "mlx_lm")])
def test_versions(
    directory: Path, monkeypatch: pytest.MonkeyPatch, package: str, field: str
) -> None:
    """A different version of a computing library gives a different name."""
    before, version = fields(directory), importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.0.1" if name == package else version(name)
    )

    assert {field} == differing(before, fields(directory))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("ENGINE_VERSION", "cairn_engine", 0),
        ("TAIL_RULE", "tail_rule", "padded"),
        ("_processor", "processor", lambda: "another one"),
        (
            "loaded_blas",
            "blas",
            lambda: BlasIdentity(name="other", sha256="9", core=None, threads=None),
        ),
    ],
)
def test_engine_and_machine(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, field: str, value: Any
) -> None:
    """A different engine, processor or BLAS gives a different name."""
    before = fields(directory)
    monkeypatch.setattr(fingerprint, name, value)

    assert {field} == differing(before, fields(directory))


@pytest.mark.parametrize("part", ["name", "sha256", "core", "threads"])
def test_the_blas(directory: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Each of the BLAS's name, bytes, core and number of threads counts."""
    parts: dict[str, Any] = {"name": "openblas", "sha256": "1", "core": "a", "threads": 2}
    monkeypatch.setattr(fingerprint, "loaded_blas", lambda: BlasIdentity(**parts))
    before = fields(directory)
    parts[part] = "other"

    assert {"blas"} == differing(before, fields(directory))


def test_the_system(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System and architecture count; the build only on macOS, where the kernels come with it."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "release", lambda: "1")
    linux = fields(directory)
    monkeypatch.setattr(platform, "release", lambda: "2")
    assert fingerprint_of(linux) == fingerprint_of(fields(directory))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert {"system"} == differing(linux, fields(directory))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    second = fields(directory)
    monkeypatch.setattr(platform, "release", lambda: "3")
    assert {"system_build"} == differing(second, fields(directory))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_changes(directory: Path, name: str) -> None:
    """One byte changed in any of a model's files, or one more, gives another name."""
    field = {"weights" if name in WEIGHTS else "tokenizer"}
    before, path = fields(directory), directory / name
    path.write_bytes(bytes([FILES[name][0] ^ 1]) + FILES[name][1:])
    assert field == differing(before, fields(directory))
    path.write_bytes(FILES[name] + b" ")
    assert field == differing(before, fields(directory))
    path.unlink()
    assert field == differing(before, fields(directory))


def test_a_file_that_is_renamed(directory: Path) -> None:
    """The same bytes under a different file name are a different model."""
    before = fields(directory)
    (directory / "model-00002-of-00002.safetensors").rename(directory / "model-3.safetensors")

    assert {"weights"} == differing(before, fields(directory))


def test_a_file_that_is_none_of_the_models(directory: Path) -> None:
    """Files that are not read do not change the name."""
    before = fingerprint_of(fields(directory))
    (directory / "README.md").write_text("A model.", encoding="utf-8")

    assert before == fingerprint_of(fields(directory))


def test_bytes_do_not_move_between_files(tmp_path: Path) -> None:
    """The border between two files counts, and so does which of them has which bytes."""
    found = set()
    for first, second in [("ab", "c"), ("a", "bc"), ("", "abc"), ("c", "ab")]:
        (tmp_path / "a.safetensors").write_text(first, encoding="utf-8")
        (tmp_path / "b.safetensors").write_text(second, encoding="utf-8")
        found.add(hash_files(tmp_path, ("*.safetensors",)))

    assert 4 == len(found)


def test_a_file_that_two_patterns_name_is_hashed_once(directory: Path) -> None:
    """Patterns may overlap."""
    assert hash_files(directory, ("*.json",)) == hash_files(directory, ("*.json", "config.*"))


def test_progress_ends_at_the_whole(directory: Path) -> None:
    """Progress counts bytes up to those of all files."""
    reported: list[tuple[int, int]] = []
    hash_files(directory, ("*.safetensors",), lambda done, total: reported.append((done, total)))

    assert [(7, 19), (19, 19)] == reported
