"""
Reasoning and tool calls over the wire: a model with scripted answers calls two tools, and a client
acts as clients do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import servers
from tests.support.models.scripted_model import make_scripted_model
from tests.support.processes.subprocess_server import Serving, run_ops, user

CHUNK = 8
LOOK = '{"name": "look", "arguments": {"city": "Rom", "days": 3}}'
GO = '{"name": "go", "arguments": {}}'
CALLS = f"\n{LOOK}\n</tool_call>\n<tool_call>\n{GO}\n"
NO_CALL = '\n{"name": "look", "arguments": {"city": \n'
WORDS = "I look.\n\n"
THOUGHT = "\nI look up Rom.\n"
SCRIPT = (
    # A prompt ends with the first, or with the second if thinking is off.
    ("\n", "<think>", 1.0),
    ("\n\n", "<tool_call>", 1.0),
    ("<think>", THOUGHT, 1.0),
    (THOUGHT, "</think>", 1.0),
    ("</think>", "\n\n", 1.0),
    # Used by a bias if a client asks for text too.
    ("\n\n", WORDS, 0.8),
    (WORDS, "<tool_call>", 1.0),
    ("<tool_call>", CALLS, 1.0),
    ("<tool_call>", NO_CALL, 0.8),
    (CALLS, "</tool_call>", 1.0),
    (NO_CALL, "</tool_call>", 1.0),
    ("</tool_call>", "<|im_end|>", 1.0),
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("look", "go")
]
ASKED = [user("Tell me of Rome.")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the scripted model and small chunks."""
    folder = tmp_path_factory.mktemp("scripted")
    model = make_scripted_model(folder / "model", SCRIPT)
    with servers(folder, model) as start:
        yield start("--block-tokens", CHUNK)


@pytest.fixture(scope="module")
def client(server: Serving) -> openai.OpenAI:
    """The official client."""
    return server.client()


def create(client: openai.OpenAI, **body: Any) -> Any:
    """A greedy completion by the official client."""
    asked = {"model": "any", "messages": ASKED, "temperature": 0, "max_tokens": 40, **body}
    return client.chat.completions.create(**asked)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message."""
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]


WANTED = [("look", {"city": "Rom", "days": 3}), ("go", {})]


def test_thoughts_and_calls(client: openai.OpenAI):
    """Each is in its field, and the answer ended because of its calls."""
    (choice,) = create(client, tools=TOOLS).choices
    message = choice.message
    assert ("tool_calls", None, WANTED) == (
        choice.finish_reason,
        message.content,
        calls_of(message),
    )
    extra = message.model_extra
    assert ("I look up Rom.", "I look up Rom.") == (extra["reasoning_content"], extra["reasoning"])


def test_a_stream_adds_up(client: openai.OpenAI):
    """A client that adds up deltas gets the same message as one that does not stream."""
    asked: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": 40, "tools": TOOLS}
    with client.chat.completions.stream(model="any", **asked) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    added: Any = choice.message
    # The first delta of a stream has an empty text; in a whole answer, the content is null.
    assert "" == added.content
    assert ("tool_calls", WANTED) == (choice.finish_reason, calls_of(added))
    assert "I look up Rom." == added.model_extra["reasoning_content"]
    assert [9, 9] == [len(one.id) for one in added.tool_calls]


def test_a_stop_text_in_a_call(client: openai.OpenAI):
    """The call before it is sent, the rest of the other is text, and clients do not act on it."""
    (choice,) = create(client, tools=TOOLS, stop='"go"').choices
    assert ("stop", WANTED[:1]) == (choice.finish_reason, calls_of(choice.message))
    assert choice.message.content == '<tool_call>\n{"name": '


def test_without_tools_nothing_is_a_call(client: openai.OpenAI):
    """What looks like a call is text; reasoning stays reasoning."""
    (choice,) = create(client).choices
    assert ("stop", f"<tool_call>{CALLS}</tool_call>", None) == (
        choice.finish_reason,
        choice.message.content,
        choice.message.tool_calls,
    )
    assert "I look up Rom." == choice.message.model_extra["reasoning"]


def test_forbidden_tools_are_not_called(client: openai.OpenAI):
    """The model would call them, but the token with which a call begins is suppressed."""
    (choice,) = create(client, tools=TOOLS, tool_choice="none").choices
    assert ("stop", None) == (choice.finish_reason, choice.message.tool_calls)
    assert choice.message.content.startswith("I look.")
    assert "<tool_call>" not in choice.message.content


def test_a_rejected_call_is_text_and_on_record(server: Serving, client: openai.OpenAI):
    """The client gets what the model wrote, and the journal says why it is not a call."""
    before = server.position()
    forbidden = {str(_token(server, CALLS)): -100}
    completion = create(client, tools=TOOLS, logit_bias=forbidden)
    (choice,) = completion.choices
    text = f"<tool_call>{NO_CALL}</tool_call>"
    assert ("stop", text, None) == (
        choice.finish_reason,
        choice.message.content,
        choice.message.tool_calls,
    )
    (rejected,) = server.events(ev.CallRejected, after=before)
    assert ("unparsable", text) == (rejected.reason, rejected.text)
    assert completion.id == f"chatcmpl-{rejected.request}"


def test_an_answer_cut_off_in_a_call_or_a_thought(server: Serving, client: openai.OpenAI):
    """
    Half a call is text after a complete one, half a thought is reasoning; and the answer was cut
    off.
    """
    before = server.position()
    (choice,) = create(client, tools=TOOLS, max_tokens=6).choices
    assert ("length", f"<tool_call>\n{GO}\n", WANTED[:1]) == (
        choice.finish_reason,
        choice.message.content,
        calls_of(choice.message),
    )
    assert ["truncated"] == [one.reason for one in server.events(ev.CallRejected, after=before)]
    (choice,) = create(client, tools=TOOLS, max_tokens=2).choices
    assert ("length", "") == (choice.finish_reason, choice.message.content)
    assert "I look up Rom." == choice.message.model_extra["reasoning_content"].strip()


@pytest.mark.parametrize(("thinks", "says"), [(True, False), (True, True), (False, False)])
def test_an_answer_that_is_sent_back_is_a_hit(
    server: Serving, client: openai.OpenAI, thinks: bool, says: bool
):
    """
    Over three turns, calls, reasoning, text followed by an empty line, and results are sent back as
    clients do. All chunks that prompt and answer fill are reused, including what the template puts
    before a result if it fills one more. With thinking off, the template ends a prompt with empty
    reasoning and leaves it out of earlier answers: up to there, the same holds.
    """
    empty_thoughts = 4
    talk: list[dict[str, Any]] = [user(f"Tell me of Rome, {'with' if thinks else 'without'} care.")]
    talk[0]["content"] += " Say it." if says else ""
    body: dict[str, Any] = {"tools": TOOLS, "extra_body": {"enable_thinking": thinks}}
    body |= {"logit_bias": {str(_token(server, WORDS)): 15}} if says else {}
    answer = create(client, messages=talk, **body)
    for turn in range(3):
        usage = answer.usage
        same = usage.total_tokens if thinks else usage.prompt_tokens - empty_thoughts
        server.wait_idle()
        assert (WORDS.removesuffix("\n") if says else None) == answer.choices[0].message.content
        # As the client dumps it, with reasoning under both names.
        talk.append(answer.choices[0].message.model_dump(exclude_none=True))
        calls = answer.choices[0].message.tool_calls
        talk += [
            {"role": "tool", "tool_call_id": one.id, "content": f"{turn}: sunny"} for one in calls
        ]
        answer = create(client, messages=talk, **body)
        assert ("continuation", WANTED) == (
            answer.model_extra["cairn"]["path"],
            calls_of(answer.choices[0].message),
        )
        assert same // CHUNK * CHUNK <= answer.usage.prompt_tokens_details.cached_tokens
        selected = server.events(ev.PathSelected, request=answer.id.removeprefix("chatcmpl-"))
        assert [not thinks] == [one.rerendered_tokens > 0 for one in selected]


def test_the_journal_has_what_the_model_wrote(server: Serving, client: openai.OpenAI):
    """The journal's text has the markers that no client sees, and a replay reproduces it."""
    completion = create(client, tools=TOOLS, max_tokens=30)
    request = completion.id.removeprefix("chatcmpl-")
    raw = f"<think>{THOUGHT}</think>\n\n<tool_call>{CALLS}</tool_call>"
    assert raw == server.released(request)[0]
    session = completion.model_extra["cairn"]["session"]
    server.wait_idle()
    code, shown, failed = run_ops("replay", session, "--engine", "--data-dir", server.data_dir)
    assert 0 == code, shown + failed


def _token(server: Serving, text: str) -> int:
    """The id of a text in the server's model."""
    path = server.data_dir.parent / "model" / "tokenizer.json"
    added = json.loads(path.read_text("utf-8"))["added_tokens"]
    (found,) = (one["id"] for one in added if one["content"] == text)
    assert isinstance(found, int)
    return found


def test_the_form_of_calls_is_on_record(server: Serving):
    """A reader of the journal knows by it how a stored call was written."""
    (loaded,) = server.events(ev.ModelLoaded)
    assert ["json_tools", "<tool_call>", "</tool_call>"] == loaded.fields["calls"]
    assert {"<tool_call>", "</tool_call>"} <= {*loaded.fields["markers"]}


def test_a_stored_call_holds(server: Serving, client: openai.OpenAI):
    """That of a stored response is what its text is read as."""
    tools: list[Any] = [
        {**one["function"], "type": "function", "strict": False}  # type: ignore[dict-item]
        for one in TOOLS
    ]
    client.responses.create(
        model="any", input="Tell me of Rome.", temperature=0, max_output_tokens=40, tools=tools
    )
    (turn,) = server.events(ev.TurnStored)
    called = [part["called"]["name"] for part in json.loads(turn.answer) if "called" in part]
    assert ["look", "go"] == called
    assert not server.events(ev.InvariantViolated)
