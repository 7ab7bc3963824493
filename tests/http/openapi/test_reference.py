"""The reference page and the code have the same fields, codes and metrics."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from cairn.http import completions as openai_texts
from cairn.http.agents import requests as agents
from cairn.http.app import create_app
from cairn.http.chat_completions import request as openai
from cairn.http.chat_completions.conversation import WireMessage
from cairn.http.messages import (
    answers as anthropic_answers,
)
from cairn.http.messages import (
    errors as anthropic_errors,
)
from cairn.http.messages import (
    request as anthropic,
)
from cairn.http.metrics.registry import OUTCOMES
from cairn.http.responses import conversation as responses_conversation
from cairn.http.responses import request as responses
from cairn.http.wire import parameters
from tests.http.fake_service import FakeService
from tests.http.responses.test_client import SUMMARY_TYPES, TYPES

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "src" / "cairn" / "http"
PAGE = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """The text below a heading, up to the next one of any kind."""
    found = re.split(rf"^##+ {re.escape(heading)}$", PAGE, flags=re.M)
    assert 2 == len(found), heading
    return re.split(r"^##+ ", found[1], flags=re.M)[0]


def names(heading: str) -> list[str]:
    """What stands in backticks in the first cells of a section's table."""
    cells = [line.split("|")[1] for line in section(heading).splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def names_of_rows(heading: str) -> list[str]:
    """The first name in each row of a section's table, but for the row of its head."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    rows = [line.split("`")[1] for line in lines]
    return [row for row in rows if row != "stop_reason"]


def codes() -> set[str]:
    """The error codes that the sources have, as arguments, defaults or variables named ``code``."""
    found: set[Any] = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.keyword(arg="code", value=ast.Constant(value=value)):
                    found.add(value)
                case ast.arguments(kwonlyargs=arguments, kw_defaults=defaults):
                    for argument, default in zip(arguments, defaults, strict=True):
                        if argument.arg == "code" and isinstance(default, ast.Constant):
                            found.add(default.value)
                case ast.Assign(
                    targets=[ast.Tuple(elts=[ast.Name(id="code"), *_])],
                    value=ast.Tuple(elts=[ast.Constant(value=value), *_]),
                ):
                    found.add(value)
                case _:
                    pass
    return found


async def body(path: str) -> str:
    """What an address of a server gives."""
    response = await create_app(FakeService()).test_client().get(path)
    return await response.get_data(as_text=True)


def test_every_field_of_a_request_is_told_and_no_other():
    """The tables of fields are those of the request and of its messages."""
    assert sorted(openai._Request.__struct_fields__) == sorted(names("Request"))
    assert sorted(WireMessage.__struct_fields__) == sorted(names("Messages"))


def test_every_field_of_texts_is_told_and_no_other():
    """The table of fields of the older completions is what their adapter reads."""
    fields = openai_texts._Request.__struct_fields__
    assert sorted(fields) == sorted(names("Texts that go on"))


def test_every_field_of_responses_is_told_and_no_other():
    """The tables of fields and of items are what the adapter reads."""
    assert sorted(responses._Request.__struct_fields__) == sorted(names("Fields of responses"))
    assert sorted(responses_conversation.ITEMS) == sorted(names_of_rows("Items of responses"))


def test_every_field_of_agents_is_told_and_no_other():
    """What an agent is created with and forked by, and what is told of it."""
    fields = agents._NewAgent.__struct_fields__
    assert sorted(fields) == sorted(names_of_rows("Fields of an agent"))
    text = section("Fields of an agent")
    assert all(f"`{name}`" in text for name in agents._Fork.__struct_fields__)
    service = FakeService()
    service.agents.have("notes")
    (facts,) = service.agents.all()
    told = agents.agent_object(facts, service.facts, ("x",))
    assert list(told) == names_of_rows("Answers of agents")


def test_every_event_of_a_responses_stream_is_told_and_no_other():
    """The page names the events that streams have, by whatever way they are made."""
    told = set(re.findall(r"`(response\.[a-z_.]+)`", section("Streams of responses")))
    assert {*TYPES, *SUMMARY_TYPES, "response.incomplete", "response.failed"} == told


def test_every_field_of_anthropics_is_told_and_no_other():
    """The tables of fields and of blocks are what its adapter reads."""
    fields = anthropic._Request.__struct_fields__
    assert sorted(fields) == sorted(names("Fields of Anthropic's"))
    assert sorted(block_types()) == sorted(names_of_rows("Blocks of Anthropic's"))


def test_every_end_and_error_of_anthropics_is_told_and_no_other():
    """The reasons to stop, and the types of errors with their statuses."""
    reasons = get_args(anthropic_answers._StopReason)
    assert sorted(reasons) == sorted(names_of_rows("Answers of Anthropic's"))
    lines = section("Errors of Anthropic's").splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    told = {
        int(status): kind.strip(" `")
        for kind, statuses in rows
        for status in re.findall(r"[0-9]{3}", statuses.partition(", which")[0])
        if "any other" not in statuses
    }
    assert dict(anthropic_errors._TYPES) == told


def block_types() -> set[str]:
    """The types of blocks that the adapter has an arm or a test for."""
    source = SOURCES / "messages" / "conversation.py"
    found: set[Any] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Match(subject=ast.Attribute(value=ast.Name(id="block"), attr="type")):
                patterns = [case.pattern for case in node.cases]
                found |= {
                    one.value.value
                    for one in patterns
                    if isinstance(one, ast.MatchValue) and isinstance(one.value, ast.Constant)
                }
            case ast.Compare(
                left=ast.Attribute(value=ast.Name(id="block"), attr="type"),
                comparators=[ast.Constant(value=value)],
            ):
                found.add(value)
            case _:
                pass
    return found


def test_every_group_header_is_told_in_order():
    """The headers that name a group, the first that counts first."""
    assert list(parameters.GROUP_HEADERS) == re.findall(r"`([^`]+)`", section("Headers in"))


def test_every_error_code_is_told_and_no_other():
    """The table of errors is what the sources give."""
    assert {"invalid_value", "not_found", "queue_full", "invalid_json"} <= codes()
    assert sorted(codes()) == sorted(names("Errors"))


@pytest.mark.trio
async def test_every_field_of_the_cairn_object_is_told_and_no_other():
    """The table of the object is that of an answer to a request that has something ignored."""
    client = create_app(FakeService()).test_client()
    ask = {"messages": [{"role": "user", "content": "Hello"}], "user": "me"}
    response = await client.post("/v1/chat/completions", data=json.dumps(ask))
    answer = json.loads(await response.get_data(as_text=True))
    assert list(answer["cairn"]) == names("The cairn object")


@pytest.mark.trio
async def test_every_field_of_health_is_told_and_no_other():
    """The table is the page's, in its order; the sessions' steps are told elsewhere."""
    found = []
    for name, value in json.loads(await body("/health")).items():
        nested = isinstance(value, dict) and name != "sessions"
        found += [f"{name}.{key}" for key in value] if nested else [name]
    assert found == names("Health")


@pytest.mark.trio
async def test_every_metric_is_told_with_its_type_and_no_other():
    """The table of metrics is what a scrape has, and the outcomes are those that are counted."""
    lines = (await body("/metrics")).splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    told = re.findall(r"^\| `(\w+)` \| (\w+) \|", section("Metrics"), flags=re.M)
    assert types == dict(told)
    outcomes = section("Metrics").split("The outcomes are")[1]
    assert set() == {name for name in OUTCOMES if f"`{name}`" not in outcomes}
