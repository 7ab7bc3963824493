"""The table of short names, and which of its models fit a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cairn.ops.models.fitting import (
    Fit,
    Machine,
    fit_of,
    fit_of_known,
    gigabytes,
    suggested_words,
    suggestion,
    this_machine,
)
from cairn.ops.models.short_names import (
    KNOWN_MODELS,
    PEBBLE,
    known_model,
    similar_names,
)

GIB = 1 << 30
FAMILIES = Path(__file__).parents[3] / "docs" / "models.md"


def machine(memory: int, free: int, *, on_cpu: bool = False) -> Machine:
    """A machine, in GiB."""
    return Machine(memory_bytes=memory * GIB, free_bytes=free * GIB, on_cpu=on_cpu)


def test_names_are_unique() -> None:
    """A short name is one, whichever case it is typed in, and none is the built-in model's."""
    names = [model.name for model in KNOWN_MODELS]
    assert len(names) == len({*names, PEBBLE}) - 1 == len({one.hub_name for one in KNOWN_MODELS})
    assert 12 <= len(names)
    assert all(name == name.lower() and "/" not in name for name in names)
    for model in KNOWN_MODELS:
        for typed in (model.name, model.name.upper(), model.hub_name, model.hub_name.lower()):
            assert model is known_model(typed)
    assert None is known_model("qwen")


def test_families_are_served() -> None:
    """Each family is in the table of docs/models.md, with the same bits."""
    rows = FAMILIES.read_text(encoding="utf-8").splitlines()
    for model in KNOWN_MODELS:
        (row,) = (one for one in rows if f"| `{model.family}` |" in one)
        assert row.endswith("| yes |"), model.family


def test_sizes_are_those_of_the_bits() -> None:
    """Four bits and the scales and biases of groups are a good half byte a weight."""
    for model in KNOWN_MODELS:
        assert 0.55 < model.weights_bytes / (model.parameters * 1e9) < 0.6
        assert round(model.parameters * 4e9) == model.float32_bytes
        assert 16_384 <= model.context_tokens


@pytest.mark.parametrize(
    ("typed", "first"),
    [
        ("qwen3-4", "qwen3-4b"),
        ("qwne3-8b", "qwen3-8b"),
        ("qwen3", "qwen3-0.6b"),
        ("phi", "phi4"),
        ("mlx-community/gpt-oss-20", "gpt-oss-20b"),
    ],
)
def test_similar_names(typed: str, first: str) -> None:
    """At most three are suggested, the most similar first."""
    found = similar_names(typed)
    assert first == found[0]
    assert len(found) <= 3


@pytest.mark.parametrize("typed", ["zzzzzzzz", "", "owner/"])
def test_nothing_is_similar(typed: str) -> None:
    """What resembles no name gets no suggestion."""
    assert [] == similar_names(typed)


@pytest.mark.parametrize(
    ("weights", "float32", "where", "expected"),
    [
        (8, 64, machine(16, 12), Fit.YES),
        (8, 64, machine(16, 9), Fit.TIGHT),
        (15, 120, machine(16, 16), Fit.NO),
        (2, 8, machine(16, 10, on_cpu=True), Fit.YES),
        (2, 8, machine(16, 9, on_cpu=True), Fit.TIGHT),
        (2, 15, machine(16, 16, on_cpu=True), Fit.SLOW),
        (15, 15, machine(16, 16, on_cpu=True), Fit.NO),
    ],
)
def test_what_fits(weights: int, float32: int, where: Machine, expected: Fit) -> None:
    """A CPU needs room for float32; free memory decides between yes and tight."""
    assert expected is fit_of(weights * GIB, float32 * GIB, where)


def test_suggestions_are_by_free_memory() -> None:
    """The largest that fits beside other programs; on a CPU a smaller one; none if none fits."""
    assert "qwen3-14b" == name(machine(24, 12))
    assert "qwen3-4b" == name(machine(24, 4))
    assert "qwen3-30b" == name(machine(64, 50))
    assert "qwen3-4b" == name(machine(24, 20, on_cpu=True))
    assert None is suggestion(machine(1, 0))
    assert "" == suggested_words(machine(1, 0), "cairn pull")
    assert "`cairn pull qwen3-4b` (2.3 GB)." in suggested_words(machine(24, 4), "cairn pull")
    found = suggestion(machine(24, 12))
    assert found is not None
    assert Fit.YES is fit_of_known(found, machine(24, 12))


def name(where: Machine) -> str | None:
    """The short name that is suggested."""
    found = suggestion(where)
    return None if found is None else found.name


def test_this_machine() -> None:
    """It has some memory, and no more of it is free."""
    found = this_machine()
    assert 0 < found.free_bytes <= found.memory_bytes


@pytest.mark.parametrize(
    ("size", "words"),
    [(12, "12 bytes"), (1500, "2 kB"), (2_260_000_000, "2.3 GB"), (8e6, "8 MB")],
)
def test_sizes_for_people(size: float, words: str) -> None:
    """In units of a thousand, as hubs and disks give them."""
    assert words == gigabytes(size)
