"""
Tests use what they test as its callers do: they read, call and patch public names only.

The tests look for private names of other modules and objects in the syntax of all tests, those of
the workshop included. What is private to a test module itself, or to a class in it, is not meant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = sorted(
    path for tests in ("tests", "workshop/*/tests") for path in ROOT.glob(f"{tests}/**/*.py")
)

OWN = {"self", "cls"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}
"""Functions, and methods of ``monkeypatch``, that take the names of attributes as texts."""

_TOKENIZER = "of a library: mlx-lm's wrapper has no other way to the tokenizer in it"

ALLOWED = {
    "tests/engine/answer/test_markers.py: tokenizer._tokenizer": _TOKENIZER,
    "tests/engine/prompt/test_cuts.py: wrapper.encode.__self__._tokenizer": _TOKENIZER,
    "tests/gate/test_speculation.py: mlx_engine._read": "a control: drafts that none checked",
    "tests/http/chat_completions/test_client.py: answer._request_id": "documented by OpenAI",
    "tests/journal/cache/test_eviction_order.py: ends._heaps": "not visible: old ends are few",
    "tests/journal/test_retention.py: base._Snapshot": "fields are hashed by their names",
    "tests/ops/drills/test_drill.py: _NO_RETRY": "a control: an error without its header",
    "tests/ops/drills/test_drill.py: _REFUSALS": "a control: an error without its header",
    "tests/ops/drills/test_drill.py: errors._REFUSALS": "a control: an error without its header",
    "tests/ops/drills/test_drill.py: _taken_out": "a control: a violation that quarantines nothing",
    "tests/support/forgetting_killed.py: keys._connection": "killed within a commit of SQLite",
    "tests/support/forgetting_killed.py: keys._path": "the snapshot is in the same folder",
    "tests/simulation/simulation.py: trio.testing.MockClock._autojump": "finds a deadlock",
    "tests/simulation/turns.py: trio._core": "trio has no other way to a seeded order of tasks",
    "tests/simulation/turns.py: trio._core._run": "as before",
}
"""The private names that tests may use, by file, with the reason."""


def is_private(name: str) -> bool:
    """Whether a name is private: one underscore in front, and more than that."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def reached(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """
    The private names of others that a module uses, with their lines: as attributes, as imports, and
    as texts in calls of ``BY_NAME``.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner)) if owner in OWN:
                pass
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                yield node.lineno, ast.unparse(node)
            case ast.ImportFrom(module=module, names=names):
                for one in names:
                    if is_private(one.name):
                        yield node.lineno, f"{module}.{one.name}"
            case ast.Call(args=[ast.Name(id=owner), *_]) if owner in OWN:
                pass
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=arguments):
                for given in arguments[:2] if called in BY_NAME else ():
                    match given:
                        case ast.Constant(value=str(text)) if is_private(text.rpartition(".")[2]):
                            yield node.lineno, text
            case _:
                pass


@cache
def all_reached() -> tuple[tuple[str, int, str], ...]:
    """The private names that all tests use, with their files and lines."""
    return tuple(
        (str(path.relative_to(ROOT)), line, name)
        for path in TESTS
        for line, name in reached(ast.parse(path.read_text(encoding="utf-8")))
    )


def test_no_test_reaches_into_private_state():
    """A private name of another module or object is in the list, with a reason, or not used."""
    found = [
        f"{place}:{line}: {name}"
        for place, line, name in all_reached()
        if f"{place}: {name}" not in ALLOWED
    ]
    assert [] == found


def test_all_tests_are_read():
    """Those of the product, and those of each tool of the workshop that has any."""
    places = {path.relative_to(ROOT).parts[:2] for path in TESTS}
    assert {("tests", "journal"), ("workshop", "bench"), ("workshop", "pebble")} <= places


def test_the_list_has_no_more_than_is_used():
    """A name that no test uses any more leaves the list."""
    assert set() == ALLOWED.keys() - {f"{place}: {name}" for place, _, name in all_reached()}


@pytest.mark.parametrize(
    "source",
    [
        "server._tickets",
        "del server.loaded._tickets",
        "self.server._tickets",
        "from cairn.actors.memory import _BATCH",
        "monkeypatch.setattr(memory, '_BATCH', 2)",
        "monkeypatch.setattr('cairn.actors.memory._BATCH', 2)",
        "getattr(server, '_tickets')",
        "getattr(server.loaded, '_tickets', None)",
        "hasattr(server, '_tickets')",
        "setattr(server, '_tickets', {})",
        "builtins.delattr(server, '_tickets')",
        "operator.attrgetter('_tickets')(server)",
    ],
)
def test_private_reach_is_found(source: str):
    """By whatever syntax."""
    assert 1 == len(list(reached(ast.parse(source))))


@pytest.mark.parametrize(
    "source",
    [
        "self._tickets",
        "cls._made",
        "super()._take()",
        "server.__class__",
        "_ = server",
        "server.tickets",
        "getattr(self, '_tickets')",
        "getattr(server, '__dict__')",
        "name.startswith('_tickets')",
    ],
)
def test_what_is_public_or_its_own_is_not_found(source: str):
    """Neither a test's own names nor those with two underscores."""
    assert [] == list(reached(ast.parse(source)))
