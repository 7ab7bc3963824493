"""
Names that were replaced do not come back: docs/glossary.md has the terms that are used instead.

The tests check modules, classes, functions, fields, attributes, values of enumerations, options and
metrics of src/cairn, and its texts: help, messages, log lines and docstrings.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cairn.ops.cli import ops

ROOT = Path(__file__).parent.parent / "src" / "cairn"
MODULES = sorted(ROOT.rglob("*.py"))

REPLACED = {
    "prewarm": r"anticipat[a-z]*|foresight|foresee[a-z]*|ahead",
    "idle": r"own_time|quiet|calm|at_rest|rested|undisturbed|disturbed|stir",
    "ttl, expires_at, expired": r"life|lives|life_over|due",
    "quarantined": r"doubt",
    "SessionContext": r"house",
    "reported, formatted, metadata, logged": r"told",
    "still_needed, DrawSpec": r"wanted",
    "GrammarMatcher, constrained": r"guide|held_to",
    "sibling": r"sisters?",
    "eviction_lock": r"steady",
    "statistics": r"figures",
    "text cache": r"remembered",
    "stored": r"kept",
    "clock": r"outside",
    "prepare": r"reading",
    "request context": r"arrival",
    "claim": r"taking",
    "queue, running, admit": r"seated|going_in",
    "placeholders": r"stand_ins?",
    "suggestions": r"spellings?",
    "not_found": r"addresses",
    "restore_prefix": r"lay_stones",
    "reused_from_slab, reused_from_pool": r"kept_blocks|shared_blocks",
    "_noop, _identity": r"nobody|undone|as_it_is",
    "block_tokens": r"chunk_tokens",
}
"""The current term, and the words of the names that it replaced, in snake case and camel case."""

PROSE = re.compile(
    r"\b(anticipat\w*|foresight|foreseen|own time|in doubt|sisters?|undisturbed|house|told|anew"
    r"|nobody|somebody|whoever|who asks|lay stones|stand-ins?)\b",
    re.IGNORECASE,
)


def words_of(name: str) -> str:
    """The words of a name in snake case, between underscores."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.replace("-", "_")).lower()
    return f"_{snake.strip('_')}_"


def term_for(name: str) -> str | None:
    """The term to use instead of a word in this name; None if the name is fine."""
    words = words_of(name)
    found = (term for term, old in REPLACED.items() if re.search(f"_({old})_", words))
    return next(found, None)


def names_of(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines, except for arguments and local variables."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name, body=body):
                yield name
                yield from fields_of(body)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass
    yield from fields_of(tree.body)


def fields_of(body: list[ast.stmt]) -> Iterator[str]:
    """The names that are assigned in a class or a module, and string values that are names too."""
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name
            case _:
                continue
        match value:
            case ast.Constant(value=str() as text) if re.fullmatch(r"[a-z_-]+", text):
                yield text


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """All commands, with the context that their help needs."""

    def below(command: click.Command, above: click.Context | None) -> Iterator[click.Context]:
        context = click.Context(command, info_name=command.name, parent=above)
        yield context
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                if found is not None:
                    yield from below(found, context)

    for context in below(ops, None):
        yield context.command_path, context.command, context


@pytest.mark.parametrize(
    "name",
    [
        "anticipated",
        "_own_time",
        "SisterFailed",
        "is_at_rest",
        "--chunk-tokens",
        "Told",
        "keptBlocks",
    ],
)
def test_a_name_that_was_replaced_is_found(name: str):
    """A replaced name is found in any case style."""
    assert term_for(name) is not None


@pytest.mark.parametrize("name", ["prewarm", "lifetime", "lifecycle", "residue", "overhead"])
def test_a_word_that_has_one_in_it_is_right(name: str):
    """Only whole words are replaced names."""
    assert term_for(name) is None


def test_no_name_that_was_replaced():
    """No module, class, function, field or value of src/cairn has a replaced name."""
    found = {}
    for path in MODULES:
        place = str(path.relative_to(ROOT))
        defined = [*names_of(ast.parse(path.read_text(encoding="utf-8"))), *path.parent.parts[-1:]]
        for name in {*defined, path.stem}:
            if (term := term_for(name)) is not None:
                found[f"{place}: {name}"] = term
    assert {} == found


def test_no_option_that_was_replaced():
    """No command, option or argument has a replaced name."""
    names = {
        name
        for path, command, _ in commands()
        for name in [*path.split(), *(o for p in command.params for o in p.opts)]
    }
    assert len(names) > 50
    assert {} == {name: term for name in names if (term := term_for(name))}


def test_the_help_of_every_command_is_in_plain_english():
    """It has none of the replaced words."""
    found = {
        path: PROSE.findall(command.get_help(context)) for path, command, context in commands()
    }
    assert len(found) > 10
    assert {} == {path: words for path, words in found.items() if words}


def test_the_texts_of_the_source_are_in_plain_english():
    """Messages, log lines and docstrings of src/cairn have none of the replaced words."""
    found = {}
    texts = 0
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += " " in node.value
                if words := PROSE.findall(node.value):
                    found[f"{path.relative_to(ROOT)}:{node.lineno}"] = words
    assert texts > 1000
    assert {} == found


def test_the_help_of_make_is_in_plain_english():
    """It has none of the replaced words."""
    makefile = (ROOT.parents[1] / "Makefile").read_text(encoding="utf-8")
    texts = re.findall(r"(?m)^[a-z]+:.*?## (.+)$", makefile)
    assert len(texts) > 10
    assert {} == {text: words for text in texts if (words := PROSE.findall(text))}


def test_metrics():
    """The names of metrics have none of the replaced words."""
    names = {
        given.value
        for path in sorted((ROOT / "http" / "metrics").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for given in [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(given, ast.Constant) and isinstance(given.value, str)
        if re.fullmatch(r"[a-z_]+", given.value)
    }
    assert len(names) > 20
    assert {} == {name: term for name in names if (term := term_for(name))}


def test_a_folder_can_be_taken_in_at_a_glance():
    """A folder has at most fifteen modules; the journal is readable with more."""
    workshop = (ROOT.parents[1] / "workshop").glob("*/src/**/*.py")
    counts = Counter(path.parent for path in (*MODULES, *workshop) if path.name != "__init__.py")
    assert counts.pop(ROOT / "journal") > 15
    assert {} == {folder: count for folder, count in counts.items() if count > 15}
