"""OpenAI's responses over HTTP: the official client, unmodified, against a served app."""

from __future__ import annotations

from typing import Any

import attrs
import openai
import pytest

from cairn.actors.errors import Broken, CannotRecord, FormatRefused, PromptTooLong
from cairn.actors.requests.messages import Delta, Reply, StoredTurn
from cairn.engine.answer.parts import Called, Calling, Said, Thought
from cairn.engine.prompt.template import Message
from cairn.http.app import create_app
from cairn.http.responses.answers import ResponsesAnswer, ResponsesStream
from cairn.http.responses.form import Form
from cairn.http.responses.objects import Echo
from cairn.http.responses.request import read_responses_request
from cairn.http.wire.answers import UnfinishedAnswer
from cairn.http.wire.parameters import Ignored
from tests.http.chat_completions.test_client import ask
from tests.http.conftest import Serve
from tests.http.fake_service import (
    ACCEPTED,
    ANSWER,
    FACTS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
)

pytestmark = pytest.mark.trio

ASK: dict[str, Any] = {"model": "any", "input": "Hello"}
LOOK = Called(index=0, id="a1", name="look", arguments='{"city": "Öslo"}')
GO = Called(index=1, id="b2", name="go", arguments="{}")
SCRIPT: tuple[Reply, ...] = (
    ACCEPTED,
    Delta(parts=(Thought("Two"),)),
    Delta(parts=(Thought(" cities."),)),
    Delta(parts=(Said("I "),)),
    Delta(parts=(Said("look."), LOOK, GO)),
    Delta(parts=(Said("\nDone."),)),
    FINISHED,
)
LONG = "Be brief. " * 20
CUT = attrs.evolve(FINISHED, finish_reason="length")
ITEMS = ["reasoning", "message", "function_call", "function_call", "message"]
IDS = ["rs_req-1_0", "msg_req-1_1", "fc_req-1_2", "fc_req-1_3", "msg_req-1_4"]


def stored(request: str = "req-1", previous: str | None = None, **form: Any) -> StoredTurn:
    """A stored turn."""
    return StoredTurn(
        request=request,
        previous=previous,
        created_s=ACCEPTED.created_s,
        asked=(Message(role="user", content=f"Hello from {request}"),),
        parts=(Thought("Two cities."), Said("I look."), LOOK),
        note=Form(**{"echo": Echo(metadata={"a": "b"}), "model": "any", **form}).note(),
        finished=FINISHED,
    )


async def stream(url: str, **fields: Any) -> list[Any]:
    """The events of a stream."""
    return await ask(url, lambda api: list(api.responses.create(**{**ASK, **fields}, stream=True)))


async def test_whole(serve: Serve):
    """Items are in the order in which they were written, with the usage and the path."""
    url = await serve(FakeService(SCRIPT))
    tools: list[Any] = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    answer: Any = await ask(
        url,
        lambda api: api.responses.create(**ASK, tools=tools, metadata={"a": "b"}, user="me"),
    )
    assert ("resp_req-1", "response", "completed") == (answer.id, answer.object, answer.status)
    assert (FACTS.model, ACCEPTED.created_s) == (answer.model, answer.created_at)
    assert list(zip(ITEMS, IDS, strict=True)) == [(one.type, one.id) for one in answer.output]
    thought, words, look, go, rest = answer.output
    assert ["Two cities."] == [part.text for part in thought.content]
    assert ([], None) == (thought.summary, thought.encrypted_content)
    assert ("assistant", "I look.") == (words.role, words.content[0].text)
    assert ("a1", "look", LOOK.arguments) == (look.call_id, look.name, look.arguments)
    assert ("b2", "go", "{}") == (go.call_id, go.name, go.arguments)
    assert "\nDone." == rest.content[0].text
    assert "I look.\nDone." == answer.output_text
    usage = answer.usage
    assert (2048, 3, 2051) == (usage.input_tokens, usage.output_tokens, usage.total_tokens)
    assert 128 == usage.input_tokens_details.cached_tokens
    assert ({"a": "b"}, "look") == (answer.metadata, answer.tools[0].name)
    got = answer.model_extra["cairn"]
    assert ("sess-1", "new_session", ["user"]) == (got["session"], got["path"], got["ignored"])


async def test_cut_off(serve: Serve):
    """An answer that was cut off is incomplete, and so is its last item, whole and as a stream."""
    service = FakeService((ACCEPTED, Delta(parts=(Said("Gr"),)), CUT))
    url = await serve(service)
    whole: Any = await ask(url, lambda api: api.responses.create(**ASK))
    *_, last = await stream(url)
    assert "response.incomplete" == last.type
    for answer in (whole, last.response):
        assert ("incomplete", "max_output_tokens") == (
            answer.status,
            answer.incomplete_details.reason,
        )
        assert ["incomplete"] == [item.status for item in answer.output]


TYPES = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


SUMMARY_TYPES = [
    "response.reasoning_summary_part.added",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.reasoning_summary_part.done",
]


async def test_stream(serve: Serve):
    """All events in their order, numbered; the completed items are those of the whole answer."""
    url = await serve(FakeService(SCRIPT))
    events = await stream(url)
    assert TYPES == [event.type for event in events]
    assert list(range(len(TYPES))) == [event.sequence_number for event in events]
    whole: Any = await ask(url, lambda api: api.responses.create(**ASK))
    first, last = events[0].response, events[-1].response
    assert ("in_progress", [], None) == (first.status, first.output, first.usage)
    assert "sess-1" == first.model_extra["cairn"]["session"]
    assert whole == last
    done = [event for event in events if event.type == "response.output_item.done"]
    assert whole.output == [event.item for event in done]
    assert [0, 1, 2, 3, 4] == [event.output_index for event in done]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert IDS == [item.id for item in added] == [item.id for item in whole.output]
    assert {"in_progress"} == {item.status for item in added}
    assert [[], [], "", "", []] == [
        item.arguments if item.type == "function_call" else item.content for item in added
    ]


async def test_deltas_add_up(serve: Serve):
    """The text of an item is that of its deltas, and each delta names its item."""
    url = await serve(FakeService(SCRIPT))
    events = await stream(url)
    grown: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            grown[event.item_id] = grown.get(event.item_id, "") + event.delta
    words = ["Two cities.", "I look.", LOOK.arguments, "{}", "\nDone."]
    assert dict(zip(IDS, words, strict=True)) == grown


async def test_the_clients_own_sum(serve: Serve):
    """The client's helper builds the answer from the stream."""
    url = await serve(FakeService(SCRIPT))

    def add_up(api: openai.OpenAI) -> Any:
        with api.responses.stream(**ASK) as events:
            return events.get_final_response()

    whole: Any = await ask(url, lambda api: api.responses.create(**ASK))
    found = await ask(url, add_up)
    assert whole.output_text == found.output_text
    assert [item.id for item in whole.output] == [item.id for item in found.output]


async def test_a_summary_that_is_requested(serve: Serve):
    """Reasoning is in the field of its summary, in the stream too, and nowhere twice."""
    url = await serve(FakeService(SCRIPT))
    reasoning = {"effort": "low", "summary": "auto"}
    whole: Any = await ask(url, lambda api: api.responses.create(**ASK, reasoning=reasoning))  # type: ignore[call-overload]
    thought = whole.output[0]
    assert ["Two cities."] == [part.text for part in thought.summary]
    assert thought.content is None
    types = [event.type for event in await stream(url, reasoning=reasoning)]
    assert SUMMARY_TYPES == types[3:8]
    assert not any("reasoning_text" in one for one in types)


async def test_sealed_thoughts(serve: Serve):
    """Reasoning is also sent sealed if the client asks for it."""
    url = await serve(FakeService(SCRIPT))
    include: list[Any] = ["reasoning.encrypted_content"]
    whole: Any = await ask(url, lambda api: api.responses.create(**ASK, include=include))
    assert "cairn:Two cities." == whole.output[0].encrypted_content
    events = await stream(url, include=include)
    assert whole == events[-1].response


async def test_a_waiting_client_gets_events(serve: Serve):
    """
    In the queue, comments keep the stream alive; after that, events with the response's state.
    """
    script = (QUEUED, ACCEPTED, PREFILLING, Delta(parts=(Said("Gr"),)), PREFILLING, FINISHED)
    url = await serve(FakeService(script))
    events = await stream(url)
    assert ["response.created", "response.in_progress", "response.in_progress"] == [
        event.type for event in events[:3]
    ]
    assert 3 == [event.type for event in events].count("response.in_progress")
    assert list(range(len(events))) == [event.sequence_number for event in events]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_is_too_long(serve: Serve, is_streamed: bool):
    """The error names this protocol's field."""
    url = await serve(FakeService(refusal=PromptTooLong(5000, 4096)))
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(url, lambda api: api.responses.create(**ASK, stream=is_streamed))
    assert ("context_length_exceeded", "input") == (caught.value.code, caught.value.param)


@pytest.mark.parametrize(
    ("refusal", "where"),
    [
        (FormatRefused("broken", "schema"), "text.format.schema"),
        (FormatRefused("broken", "schema", (3, "look")), "tools.look.parameters"),
    ],
)
async def test_a_format_that_is_refused(serve: Serve, refusal: FormatRefused, where: str):
    """The error names this protocol's field."""
    url = await serve(FakeService(refusal=refusal))
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(url, lambda api: api.responses.create(**ASK))
    assert ("format_refused", where) == (caught.value.code, caught.value.param)


async def test_a_fault_in_mid_stream(serve: Serve):
    """A response that failed says why, with the output until then."""
    fault = Broken("0f8fad5b-d9cb-469f-a165-70867728950e")
    url = await serve(FakeService((*SCRIPT[:5], fault)))
    events = await stream(url)
    last = events[-1]
    assert ("response.failed", "failed") == (last.type, last.response.status)
    assert "kv_cache_inv_violation" == last.response.error.code
    assert fault.message == last.response.error.message
    assert ["reasoning", "message", "function_call"] == [one.type for one in last.response.output]


async def test_a_fault_in_the_queue(serve: Serve):
    """Before the response exists, the error is an event of its own."""
    url = await serve(FakeService((QUEUED, CannotRecord())))
    (last,) = await stream(url)
    assert ("error", "journal_stalled", 0) == (last.type, last.code, last.sequence_number)


@pytest.mark.parametrize("replies", [(), (ACCEPTED,)])
async def test_an_answer_that_is_not_complete(replies: tuple[Reply, ...]):
    """They never become a response, and the stream has no end event."""
    read = read_responses_request(b'{"input": "Hello"}', {}, Ignored(), FACTS).complete((), {})
    whole, chunks = ResponsesAnswer(read), ResponsesStream(read)
    for reply in replies:
        whole.take(reply)
        chunks.take(reply)
    with pytest.raises(UnfinishedAnswer):
        whole.body()
    with pytest.raises(UnfinishedAnswer):
        chunks.done()


# --- stored responses ------------------------------------------------------------------------


async def test_looked_up(serve: Serve):
    """A stored answer has the same items and ids as before, with the input items of its request."""
    service = FakeService(ANSWER)
    service.turns["local", "req-1"] = stored(sealed=True)
    url = await serve(service)
    found: Any = await ask(url, lambda api: api.responses.retrieve("resp_req-1"))
    assert ("resp_req-1", "completed", {"a": "b"}) == (found.id, found.status, found.metadata)
    assert IDS[:3] == [item.id for item in found.output]
    assert "cairn:Two cities." == found.output[0].encrypted_content
    assert 128 == found.usage.input_tokens_details.cached_tokens
    items: Any = await ask(url, lambda api: list(api.responses.input_items.list("resp_req-1")))
    assert [("user", "Hello from req-1")] == [(one.role, one.content[0].text) for one in items]


async def test_no_stream_of_a_stored_response():
    """A client that asks for a stream gets an error, not one object."""
    service = FakeService()
    service.turns["local", "req-1"] = stored()
    client = create_app(service).test_client()
    for query, status in (("stream=true", 400), ("stream=false", 200), ("include=x", 200)):
        response = await client.get(f"/v1/responses/resp_req-1?{query}")
        assert status == response.status_code
        error = (await response.get_json()).get("error") or {}
        assert ("stream" if status == 400 else None) == error.get("param")


async def test_items_in_pages(serve: Serve):
    """The client gets all pages, in the order that it asks for."""
    said = tuple(Message(role="user", content=str(number)) for number in range(5))
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    acted = Message(role="assistant", content="I look.", reasoning="Hm.", tool_calls=(call,))
    broken = {"id": "a2", "type": "function", "function": {"name": "go", "arguments": "{"}}
    called = Message(role="assistant", content="", tool_calls=(broken,))
    result = Message(role="tool", content="Rain.", tool_call_id="a1")
    asked = (*said, acted, result, called)
    service = FakeService()
    service.turns["local", "req-1"] = attrs.evolve(stored(), asked=asked)
    url = await serve(service)

    def listed(order: Any) -> Any:
        return lambda api: list(api.responses.input_items.list("resp_req-1", limit=2, order=order))

    found: Any = await ask(url, listed("asc"))
    assert ["0", "1", "2", "3", "4"] == [item.content[0].text for item in found[:5]]
    kinds = ["reasoning", "message", "function_call", "function_call_output", "function_call"]
    assert kinds == [item.type for item in found[5:]]
    assert "{" == found[-1].arguments
    assert ('{"a":1}', "Rain.") == (found[7].arguments, found[8].output)
    assert found == list(reversed(await ask(url, listed("desc"))))
    assert 10 == len({item.id for item in found})


BAD_PAGES = [
    *("limit=0", "limit=101", "limit=x", "limit=", "limit=-1", "limit=%C2%B2"),
    *("limit=0000000019999", f"limit=000000001{'0' * 4400}"),
    *("order=up", "after=msg_none"),
]


@pytest.mark.parametrize("query", BAD_PAGES, ids=lambda query: query[:20])
async def test_an_invalid_page(query: str):
    """It is refused, and the error names the parameter."""
    service = FakeService()
    service.turns["local", "req-1"] = stored()
    client = create_app(service).test_client()
    response = await client.get(f"/v1/responses/resp_req-1/input_items?{query}")
    assert 400 == response.status_code
    assert query.partition("=")[0] == (await response.get_json())["error"]["param"]


@pytest.mark.parametrize("limit", ["2", "002", f"{'0' * 4400}2"], ids=["2", "002", "thousands"])
async def test_a_page_has_as_many_as_requested(limit: str):
    """The number may be written in any form."""
    service = FakeService()
    said = tuple(Message(role="user", content=str(number)) for number in range(5))
    service.turns["local", "req-1"] = attrs.evolve(stored(), asked=said)
    client = create_app(service).test_client()
    response = await client.get(f"/v1/responses/resp_req-1/input_items?limit={limit}")
    page = await response.get_json()
    assert (200, 2, True) == (response.status_code, len(page["data"]), page["has_more"])


async def test_deleted(serve: Serve):
    """A deleted response is no longer found by any endpoint."""
    service = FakeService()
    service.turns["local", "req-1"] = stored()
    url = await serve(service)
    await ask(url, lambda api: api.responses.delete("resp_req-1"))
    calls: list[Any] = [
        lambda api: api.responses.retrieve("resp_req-1"),
        lambda api: api.responses.delete("resp_req-1"),
        lambda api: list(api.responses.input_items.list("resp_req-1")),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(url, call)
        assert "response_not_found" == caught.value.code
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(url, lambda api: api.responses.create(**ASK, previous_response_id="resp_req-1"))
    assert ("previous_response_not_found", "previous_response_id") == (
        refused.value.code,
        refused.value.param,
    )


@pytest.mark.parametrize("sent", ["resp_req-1", "req-1", "that of before"])
async def test_a_response_that_is_not_there_is_named_as_it_was_sent(serve: Serve, sent: str):
    """The error has the id that the client sent, also if it is not in our form."""
    url = await serve(FakeService())
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(url, lambda api: api.responses.create(**ASK, previous_response_id=sent))
    assert f"the response {sent!r}, or one before it, is not stored" in refused.value.message


async def test_continuing_from_a_response(serve: Serve):
    """The prompt begins with all earlier messages, but without earlier instructions."""
    service = FakeService()
    service.turns["local", "one"] = stored("one")
    service.turns["local", "two"] = stored("two", previous="one")
    url = await serve(service)
    await ask(
        url,
        lambda api: api.responses.create(
            **ASK, previous_response_id="resp_two", instructions="Be brief."
        ),
    )
    (command,) = service.commands
    assert command.conversation is not None
    assert [
        ("system", "Be brief."),
        ("user", "Hello from one"),
        ("assistant", "I look."),
        ("user", "Hello from two"),
        ("assistant", "I look."),
        ("user", "Hello"),
    ] == [(message.role, message.content) for message in command.conversation.messages]
    assert command.keep is not None
    assert ("two", ["Hello"]) == (command.keep.previous, [m.content for m in command.keep.asked])


async def test_a_history_with_a_gap(serve: Serve):
    """Everything before a response must be stored too."""
    service = FakeService()
    service.turns["local", "two"] = stored("two", previous="one")
    url = await serve(service)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(url, lambda api: api.responses.create(**ASK, previous_response_id="resp_two"))
    assert "previous_response_not_found" == caught.value.code


async def test_references(serve: Serve):
    """An item that a client only refers to is the one that it received."""
    service = FakeService()
    service.turns["local", "req-1"] = stored()
    url = await serve(service)
    items: list[Any] = [
        {"role": "user", "content": "Hello from req-1"},
        *({"type": "item_reference", "id": name} for name in IDS[:3]),
        {"type": "function_call_output", "call_id": "a1", "output": "Rain."},
    ]
    await ask(url, lambda api: api.responses.create(model="any", input=items))
    (command,) = service.commands
    assert command.conversation is not None
    assert stored().messages == command.conversation.messages[:2]
    for name in ("msg_req-1_7", "msg_other_0", "whatever"):
        items[1] = {"type": "item_reference", "id": name}
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(url, lambda api: api.responses.create(model="any", input=items))
        assert ("item_not_found", "input[1].id") == (caught.value.code, caught.value.param)


async def test_references_to_what_was_asked(serve: Serve):
    """The listed ids of a request's input items can be referred to as well."""
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    asked = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hello"),
        Message(role="assistant", content="I look.", reasoning="Hm.", tool_calls=(call,)),
        Message(role="tool", content="Rain.", tool_call_id="a1"),
    )
    service = FakeService()
    service.turns["local", "req-1"] = attrs.evolve(stored(), asked=asked)
    url = await serve(service)
    listed: Any = await ask(
        url, lambda api: list(api.responses.input_items.list("resp_req-1", order="asc"))
    )
    names = [item.id for item in listed]
    assert "fco_req-1_in5" == names[-1]
    items: list[Any] = [{"type": "item_reference", "id": name} for name in names]
    await ask(url, lambda api: api.responses.create(model="any", input=items))
    (command,) = service.commands
    assert command.conversation is not None
    assert asked == command.conversation.messages
    for name in ("msg_req-1_in6", "fc_req-1_in0", "msg_other_in0"):
        items[0] = {"type": "item_reference", "id": name}
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(url, lambda api: api.responses.create(model="any", input=items))
        assert ("item_not_found", "input[0].id") == (caught.value.code, caught.value.param)


async def test_the_form_is_read_again():
    """The echoed parameters and the form of reasoning are stored as text and read again."""
    echo = Echo(metadata={"ä": "ö"}, instructions=LONG)
    form = Form(echo=echo, model="any", summarised=True, sealed=True)
    assert {"instructions": f'"{LONG}"'} == form.texts()
    assert LONG not in form.note()
    service = FakeService()
    turn = attrs.evolve(stored(), note=form.note(), texts=form.texts())
    service.turns["local", "req-1"] = turn
    response = await create_app(service).test_client().get("/v1/responses/resp_req-1")
    found = await response.get_json()
    assert ({"ä": "ö"}, LONG) == (found["metadata"], found["instructions"])
    assert [{"type": "summary_text", "text": "Two cities."}] == found["output"][0]["summary"]


async def test_arguments_come_in_pieces(serve: Serve):
    """
    Each call is one item, whose pieces add up to its arguments; one that is cut off is incomplete.
    """

    def more(index: int, id_: str, name: str, arguments: str) -> Calling:
        return Calling(index=index, id=id_, name=name, arguments=arguments)

    cut = attrs.evolve(GO, arguments="{", cut="<tool_call>...")
    script = (
        ACCEPTED,
        Delta(parts=(Said("I look."),), calling=more(0, "a1", "look", "")),
        Delta(parts=(), calling=more(0, "a1", "look", '{"city": "')),
        Delta(parts=(), calling=more(0, "a1", "look", "Öslo")),
        Delta(parts=(LOOK,), calling=more(1, "b2", "go", "{")),
        Delta(parts=(cut,)),
        CUT,
    )
    url = await serve(FakeService(script))
    got = await stream(url)
    kind = "response.function_call_arguments"
    pieces = [(one.output_index, one.delta) for one in got if one.type == f"{kind}.delta"]
    assert [(1, '{"city": "'), (1, "Öslo"), (1, '"}'), (2, "{")] == pieces
    assert [LOOK.arguments, "{"] == [one.arguments for one in got if one.type == f"{kind}.done"]
    whole: Any = await ask(url, lambda api: api.responses.create(**ASK))
    items = [(one.id, one.status) for one in whole.output]
    assert ["completed", "completed", "incomplete"] == [status for _, status in items]
    assert items == [(one.id, one.status) for one in got[-1].response.output]
