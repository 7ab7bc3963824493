"""The reference pages and the code have the same endpoints, fields, codes and metrics."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import attrs
import msgspec
import pytest

from cairn.http.agents import requests as agents
from cairn.http.app import create_app
from cairn.http.chat_completions import request as openai
from cairn.http.chat_completions.conversation import WireMessage
from cairn.http.completions import request as completions
from cairn.http.messages import (
    errors as anthropic_errors,
)
from cairn.http.messages import (
    request as anthropic,
)
from cairn.http.messages.objects import StopReason
from cairn.http.metrics.registry import OUTCOMES
from cairn.http.ollama import request as ollama
from cairn.http.openapi.document import OPERATIONS
from cairn.http.responses import conversation as responses_conversation
from cairn.http.responses import request as responses
from cairn.http.wire import parameters
from tests.http.fake_service import ACCEPTED, FINISHED, FakeService
from tests.http.responses.test_client import SUMMARY_TYPES, TYPES

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "src" / "cairn" / "http"
PAGES = ROOT / "docs" / "reference"


def section(page: str, heading: str) -> str:
    """The text below a heading of a page, up to the next heading."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.M)
    assert 2 == len(found), heading
    return re.split(r"^##+ ", found[1], flags=re.M)[0]


def rows(page: str, heading: str) -> list[str]:
    """The rows of a section's table, without its header, that begin with a name in backticks."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [line for line in lines[2:] if line.startswith("| `")]


def names(page: str, heading: str) -> list[str]:
    """All names in backticks in the first cells of a section's table."""
    cells = [row.split("|")[1] for row in rows(page, heading)]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def names_of_rows(page: str, heading: str) -> list[str]:
    """The first name in each row of a section's table."""
    return [row.split("`")[1] for row in rows(page, heading)]


def codes() -> set[str]:
    """The error codes in the sources: arguments, defaults and variables named ``code``."""
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
    """The body that an endpoint of a server returns."""
    response = await create_app(FakeService()).test_client().get(path)
    return await response.get_data(as_text=True)


def test_the_index_lists_every_endpoint_and_no_other():
    """The table of endpoints is the API description's."""
    expected = [f"{method} {path}" for method, path in OPERATIONS]
    listed = [name.replace("{id}", "{name}") for name in names("http", "Endpoints")]
    assert sorted(expected) == sorted(listed)


def test_every_field_of_a_request_is_described_and_no_other():
    """The tables of fields are those of the request and of its messages."""
    assert sorted(openai.RequestBody.__struct_fields__) == sorted(
        names("chat-completions", "Request")
    )
    assert sorted(WireMessage.__struct_fields__) == sorted(names("chat-completions", "Messages"))


def test_every_field_of_completions_is_described_and_no_other():
    """The table of fields of the older completions is what their adapter reads."""
    fields = completions.RequestBody.__struct_fields__
    assert sorted(fields) == sorted(names("completions", "Request"))


def test_every_field_of_responses_is_described_and_no_other():
    """The tables of fields and of items are what the adapter reads."""
    assert sorted(responses.RequestBody.__struct_fields__) == sorted(names("responses", "Request"))
    assert sorted(responses_conversation.ITEMS) == sorted(names_of_rows("responses", "Items"))


def test_every_field_of_agents_is_described_and_no_other():
    """
    The tables have the fields to create an agent, to fork it, and of the agent that is returned.
    """
    fields = agents.NewAgentBody.__struct_fields__
    assert sorted(fields) == sorted(names_of_rows("agents", "Create and fork"))
    text = section("agents", "Create and fork")
    assert all(f"`{name}`" in text for name in agents.ForkBody.__struct_fields__)
    service = FakeService()
    service.agents.have("notes")
    (facts,) = service.for_tenant("local").agents.all()
    returned = agents.agent_object(facts, service.facts, ("x",))
    assert list(msgspec.to_builtins(returned)) == names_of_rows("agents", "List, look up, delete")


def test_every_event_of_a_responses_stream_is_described_and_no_other():
    """The page names every event of a stream."""
    named = set(re.findall(r"`(response\.[a-z_.]+)`", section("responses", "Streams")))
    assert {*TYPES, *SUMMARY_TYPES, "response.incomplete", "response.failed"} == named


def test_every_field_of_messages_is_described_and_no_other():
    """The tables of fields and of blocks are what the adapter reads."""
    fields = anthropic.RequestBody.__struct_fields__
    assert sorted(fields) == sorted(names("messages", "Request"))
    assert sorted(block_types()) == sorted(names_of_rows("messages", "Blocks"))


def test_every_field_and_option_of_ollamas_is_described_and_no_other():
    """The tables are what the adapter reads, for both kinds of requests together."""
    fields = {*ollama.ChatBody.__struct_fields__, *ollama.GenerateBody.__struct_fields__}
    assert sorted(fields) == sorted(names("ollama", "Request"))
    assert sorted(ollama.Options.__struct_fields__) == sorted(names("ollama", "Options"))


def test_every_end_and_error_of_messages_is_described_and_no_other():
    """The tables have the reasons to stop, and the types of errors with their statuses."""
    reasons = get_args(StopReason)
    assert sorted(reasons) == sorted(names_of_rows("messages", "Answer"))
    cells = [row.split("|")[1:3] for row in rows("messages", "Errors")]
    described = {
        int(status): kind.strip(" `")
        for kind, statuses in cells
        for status in re.findall(r"[0-9]{3}", statuses.partition("(")[0])
        if "every other" not in statuses
    }
    assert dict(anthropic_errors.TYPES) == described


def block_types() -> set[str]:
    """The types of blocks that the adapter handles."""
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


def test_every_group_header_is_named_in_order():
    """The headers that name a group, the first one that counts first."""
    of_groups, _, _ = section("http", "Request headers").partition("\n\n`traceparent`")
    named = re.findall(r"`([^`]+)`", of_groups)
    assert list(parameters.GROUP_HEADERS) == named


def test_every_error_code_is_described_and_no_other():
    """The table of errors has the codes of the sources."""
    assert {"invalid_value", "not_found", "queue_full", "invalid_json"} <= codes()
    assert sorted(codes()) == sorted(names("errors", "Errors"))


@pytest.mark.trio
async def test_every_field_of_the_cairn_object_is_described_and_no_other():
    """The table has the fields in the answer to a request with an ignored field."""
    explained = attrs.evolve(ACCEPTED, explanation="It is new.")
    client = create_app(FakeService((explained, FINISHED))).test_client()
    ask = {"messages": [{"role": "user", "content": "Hello"}], "user": "me"}
    response = await client.post("/v1/chat/completions", data=json.dumps(ask))
    answer = json.loads(await response.get_data(as_text=True))
    assert list(answer["cairn"]) == names("http", "The cairn object")


@pytest.mark.trio
async def test_every_field_of_health_is_described_and_no_other():
    """
    The table has the endpoint's fields in their order. States of sessions are listed elsewhere, and
    idle work that ended at its field.
    """
    found = []
    for name, value in json.loads(await body("/health")).items():
        nested = isinstance(value, dict) and name not in ("sessions", "degraded")
        found += [f"{name}.{key}" for key in value] if nested else [name]
    # A server outside of a fleet has no name.
    assert found == [name for name in names("models-and-health", "Health") if name != "node"]


@pytest.mark.trio
async def test_every_metric_is_described_with_its_type_and_no_other():
    """The table has the metrics of a scrape, and the outcomes that are counted."""
    lines = (await body("/metrics")).splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    # Of the process, by the library, and not on every system.
    types = {name: kind for name, kind in types.items() if not name.startswith("process_")}
    text = section("metrics", "Metrics")
    assert types == dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, flags=re.M))
    outcomes = text.split("The outcomes are")[1]
    assert set() == {name for name in OUTCOMES if f"`{name}`" not in outcomes}
