"""The location of Pebble."""

from pathlib import Path

from cairn.engine.model.builtin import builtin_directory, still_at


def test_pebble_is_found_where_cairn_is_installed_now(tmp_path: Path):
    """
    A journal may name a place where Cairn was once. Another model that is gone stays gone, whatever
    it was called, and one that is there is taken.
    """
    moved = tmp_path / "lib" / "cairn" / "pebble"
    assert str(builtin_directory()) == still_at(str(moved))
    moved.mkdir(parents=True)
    for path in (moved, tmp_path / "gone" / "pebble", tmp_path / "gone"):
        assert str(path) == still_at(str(path))
