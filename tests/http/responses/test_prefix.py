"""
How clients of OpenAI's responses send an answer back: the next prompt begins with the earlier input
and answer, whether a client sends all of it, item by item, or names the response.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.requests.messages import Delta, Generate, Reply, StoredTurn
from cairn.engine.answer.parts import AnswerPart, Called, Said, Thought
from cairn.engine.prompt.template import conversation_parts, message_of
from cairn.engine.prompt.turns import messages_of, messages_text, parts_of, parts_text
from cairn.http.responses.answers import ResponsesAnswer
from cairn.http.responses.request import Draft, read_responses_request
from cairn.http.wire.json import encode
from cairn.http.wire.parameters import Ignored
from tests.http.fake_service import ACCEPTED, FACTS, FINISHED

Body = dict[str, Any]

TOOLS = [
    {"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}}
    for name in ("look", "go")
]
ASKED: Body = {
    "instructions": "You know cities.",
    "tools": [*TOOLS, {"type": "web_search"}],
    "reasoning": {"effort": "medium"},
    "parallel_tool_calls": False,
}
LOOK = Called(index=0, id="a1", name="look", arguments='{"city": "\\u00d6slo", "days": 3.0}')
GO = Called(index=1, id="b2", name="go", arguments="{}")
ANSWERS: list[tuple[AnswerPart, ...]] = [
    (Thought("I look "), Thought("it up."), Said("I "), Said("look."), LOOK, GO),
    (Thought("Hm."), LOOK),
    (Said("I look."), GO),
    (LOOK, GO),
    (Thought("Hm."), Said("It rains.")),
    (Said("It "), Thought("Rain?"), Said("rains.")),
    (Thought("Only thought."),),
]
FIRST = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Öslo?"}]}
NEXT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And?"}]}


def draft(body: Body) -> Draft:
    """A request that was read."""
    return read_responses_request(json.dumps(body).encode(), {}, Ignored(), FACTS)


def parts(command: Generate) -> tuple[tuple[str, bytes, bytes], ...]:
    """The parts by which conversations are compared."""
    assert command.conversation is not None
    return conversation_parts(command.conversation)


def output(body: Body, answered: tuple[AnswerPart, ...]) -> list[Body]:
    """The output items that a client receives."""
    whole = ResponsesAnswer(draft(body).complete((), {}))
    replies: list[Reply] = [ACCEPTED, *(Delta(parts=(part,)) for part in answered), FINISHED]
    for reply in replies:
        whole.take(reply)
    found: list[Body] = json.loads(encode(whole.body()))["output"]
    return found


def results(answered: tuple[AnswerPart, ...]) -> list[Body]:
    """What a client sends after an answer: the results of its calls, or another message."""
    calls = [part for part in answered if isinstance(part, Called)]
    return [
        {"type": "function_call_output", "call_id": call.id, "output": "Rain."} for call in calls
    ] or [NEXT]


def as_codex_keeps(item: Body) -> Body:
    """
    An item as Codex keeps it in its history: no status, no id, and of reasoning only the sealed
    text and the summary.
    """
    left_out = {"id", "status"} | ({"content"} if item["type"] == "reasoning" else set())
    kept = {key: value for key, value in item.items() if key not in left_out}
    if item["type"] == "message":
        words = [{"type": one["type"], "text": one["text"]} for one in item["content"]]
        kept["content"] = words
    return kept


def as_the_sdk_sends(item: Body) -> Body:
    """An item as OpenAI's libraries send it: with all fields."""
    return item


CLIENTS = [
    pytest.param(
        {"store": False, "include": ["reasoning.encrypted_content"]}, as_codex_keeps, id="codex"
    ),
    pytest.param(
        {"store": False, "reasoning": {"effort": "medium", "summary": "auto"}},
        as_codex_keeps,
        id="codex with summaries",
    ),
    pytest.param({}, as_the_sdk_sends, id="the sdk"),
    pytest.param(
        {"reasoning": {"effort": "medium", "summary": "auto"}}, as_the_sdk_sends, id="summaries"
    ),
]


@pytest.mark.parametrize(("fields", "keeps"), CLIENTS)
@pytest.mark.parametrize("answered", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_is_sent_back(fields: Body, keeps: Any, answered: tuple[AnswerPart, ...]):
    """Item by item, it is the message that settling expected, after everything before it."""
    body = {**ASKED, **fields, "input": [FIRST]}
    asked = draft(body).complete((), {}).command
    back = [keeps(item) for item in output(body, answered)]
    onward = draft({**body, "input": [FIRST, *back, *results(answered)]}).complete((), {}).command
    assert parts(asked) == parts(onward)[: len(parts(asked))]
    assert onward.conversation is not None
    assert message_of(answered) == onward.conversation.messages[2]


@pytest.mark.parametrize("answered", ANSWERS[:-1], ids=range(len(ANSWERS) - 1))
def test_a_client_that_drops_reasoning(answered: tuple[AnswerPart, ...]):
    """Without its reasoning an answer is the same, also after one with less reasoning effort."""
    body = {**ASKED, "input": [FIRST]}
    back = output(body, answered)
    kept = [item for item in back if item["type"] != "reasoning"]
    whole, pruned = (
        draft({**body, **more, "input": [FIRST, *items, *results(answered)]})
        .complete((), {})
        .command
        for items, more in ((back, {}), (kept, {"reasoning": {"effort": "none"}}))
    )
    assert parts(whole) == parts(pruned)
    assert whole.conversation != pruned.conversation


@pytest.mark.parametrize("answered", ANSWERS, ids=range(len(ANSWERS)))
def test_an_answer_that_is_named(answered: tuple[AnswerPart, ...]):
    """
    A client that names the response continues like one that sends everything: the prompts are
    equal.
    """
    body = {**ASKED, "input": [FIRST]}
    asked = draft(body).complete((), {}).command
    keep = asked.keep
    assert keep is not None
    turn = StoredTurn(
        request="req-1",
        previous=keep.previous,
        created_s=1,
        asked=messages_of(messages_text(keep.asked)),
        parts=parts_of(parts_text(answered)),
        note=keep.note,
        finished=FINISHED,
    )
    more = {**ASKED, "input": results(answered), "previous_response_id": "resp_req-1"}
    named = draft(more).complete((turn,), {}).command
    back = output(body, answered)
    sent = draft({**body, "input": [FIRST, *back, *results(answered)]}).complete((), {}).command
    assert parts(asked) == parts(named)[: len(parts(asked))]
    assert sent.conversation == named.conversation
    assert parts(sent) == parts(named)
    assert named.keep is not None
    assert ("req-1", len(results(answered))) == (named.keep.previous, len(named.keep.asked))


def test_turns_as_text():
    """Messages and parts are the same after storing them as text; consecutive texts become one."""
    for answered in ANSWERS:
        assert message_of(answered) == message_of(parts_of(parts_text(answered)))
        said = (message_of(answered), attrs.evolve(message_of(()), name="x", tool_call_id="y"))
        assert said == messages_of(messages_text(said))
    assert (Thought("I look it up."), Said("I look."), LOOK, GO) == parts_of(parts_text(ANSWERS[0]))
