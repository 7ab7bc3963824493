"""
The examples of the HTTP reference are run as a reader would, page by page, against one server.

A block ``sh`` holds one call of curl, and the block ``json`` or ``text`` after it the answer that
the page shows: JSON must have the same keys and types, and each line of a text must occur in the
answer, in order; ``…`` is anything. A word in capitals that ends with ``_ID`` is an id from an
earlier answer of the page.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.http.openapi.document import OPERATIONS
from tests.e2e.conftest import servers
from tests.support.models.embedding_model import make_embedding_model
from tests.support.processes.subprocess_server import DEADLINE_S, Serving, started

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGES = sorted(page for page in REFERENCE.glob("*.md") if page.name != "cli.md")

#: The server of these tests has no embedding model, and is no node of a fleet.
_NOT_RUN = {("POST", path) for path in ("/v1/embeddings", "/api/embed", "/api/embeddings")}
_NOT_RUN |= {("POST", f"/v1/agents/{{name}}/{act}") for act in ("release", "adopt")}

_BLOCK = re.compile(r"^```(sh|json|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ID = re.compile(r"[A-Z]+_ID")
_HOST = "localhost:8000"

#: Objects whose keys are values: the existing states of sessions.
_MAPS = ("sessions",)


@attrs.frozen
class Example:
    """A call of curl, and the answer that the page shows."""

    command: str
    language: str = ""
    shown: str = ""


def examples(page: Path) -> list[Example]:
    """The examples of a page, in their order."""
    found: list[Example] = []
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "sh":
            found.append(Example(text))
        elif found:
            found[-1] = attrs.evolve(found[-1], language=language, shown=text)
    return found


def endpoint(command: str) -> tuple[str, str]:
    """The method and the path that a call of curl requests."""
    words = shlex.split(command)
    (url,) = [word for word in words if word.startswith(_HOST)]
    default = "POST" if "-d" in words else "GET"
    method = words[words.index("-X") + 1] if "-X" in words else default
    return method, url.removeprefix(_HOST).partition("?")[0]


def has_shape(answer: Any, shown: Any) -> bool:
    """
    Whether an answer has the keys and the types of the one that is shown. Each element of a list
    has those of an element that is shown.
    """
    match shown:
        case dict():
            return (
                isinstance(answer, dict)
                and answer.keys() == shown.keys()
                and all(key in _MAPS or has_shape(answer[key], shown[key]) for key in shown)
            )
        case list():
            return isinstance(answer, list) and (
                not shown or all(any(has_shape(one, like) for like in shown) for one in answer)
            )
        case int() | float() if not isinstance(shown, bool):
            return isinstance(answer, int | float) and not isinstance(answer, bool)
        case _:
            return type(answer) is type(shown)


def run(server: Serving, command: str) -> str:
    """What a call of curl prints; a status other than 2xx is an error."""
    url = server.url.removeprefix("http://")
    checked = command.replace("curl ", "curl --fail-with-body ", 1).replace(_HOST, url)
    done = subprocess.run(
        ["bash", "-c", checked], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert 0 == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def ids(example: Example, answer: str) -> dict[str, str]:
    """The ids that the page shows as a word in capitals, as they are in the answer."""
    found = {}
    for key, name in re.findall(rf'"(\w+)": "({_ID.pattern})"', example.shown):
        found[name] = str(json.loads(answer)[key])
    return found


def lines_of(text: str) -> list[str]:
    """The lines of a text, without empty ones and those that are only ``…``."""
    return [line for line in text.splitlines() if line.strip() not in ("", "…")]


def assert_shows(example: Example, answer: str) -> None:
    """Assert that the answer is what the page shows, except for its values."""
    if example.language == "json":
        assert has_shape(json.loads(answer), json.loads(example.shown)), answer
        return
    lines = iter(lines_of(answer))
    for line in lines_of(example.shown):
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert any(re.fullmatch(pattern, one) for one in lines), f"{line}\n\n{answer}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Serving]:
    """One server for the examples alone, because some of them list what it has."""
    with servers(tmp_path_factory.mktemp("reference"), model_directory) as start:
        yield start()


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with an embedding model, for the page that needs one."""
    folder = tmp_path_factory.mktemp("embeddings")
    place = make_embedding_model(folder / "vectors")
    models = folder / "models.toml"
    models.write_text(
        f"[models.pebble]\nbuiltin = true\n"
        f"[models.qwen-embedding]\npath = '{place}'\nembeddings = true\n",
        encoding="utf-8",
    )
    with started(folder / "home", "--models", models) as server:
        yield server


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_get_the_answers_it_shows(
    page: Path, request: pytest.FixtureRequest
):
    """Every call of curl gets a status of 2xx, and an answer of the shape that the page shows."""
    named = "embedding_server" if page.stem == "embeddings" else "server"
    server: Serving = request.getfixturevalue(named)
    known: dict[str, str] = {}
    for example in examples(page):
        command = example.command
        for name, value in known.items():
            command = command.replace(name, value)
        answer = run(server, command)
        assert_shows(example, answer)
        known |= ids(example, answer)


def test_every_endpoint_has_an_example():
    """Each operation of the API description has a call of curl on one of the pages."""
    called = {endpoint(example.command) for page in PAGES for example in examples(page)}
    for method, path in OPERATIONS.keys() - _NOT_RUN:
        pattern = re.sub(r"\{\w+\}", "[^/]+", path)
        assert any(method == used and re.fullmatch(pattern, address) for used, address in called), (
            f"{method} {path}"
        )


def test_a_different_shape_is_noticed():
    """A key, a type or a line that the answer does not have is not what the page shows."""
    answer = '{"id": "a", "usage": {"tokens": 1}, "data": [{"x": 1}, {"x": 2}]}'
    assert_shows(Example("", "json", answer), answer.replace("2}", "3}"))
    for wrong in ('"tokens": "1"', '"number": 1', '"tokens": null'):
        changed = answer.replace('"tokens": 1', wrong)
        with pytest.raises(AssertionError):
            assert_shows(Example("", "json", changed), answer)
    with pytest.raises(AssertionError):
        assert_shows(Example("", "json", answer), answer.replace('{"x": 2}', '{"y": 2}'))
    assert_shows(Example("", "text", "event: a\n…\nevent: …b\n"), "event: a\n\nevent: b\n")
    with pytest.raises(AssertionError):
        assert_shows(Example("", "text", "event: b\nevent: a\n"), "event: a\nevent: b\n")
