"""OpenAI's older completions: from the wire to a command, and back to the official client."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from cairn.actors.errors import PromptTooLong
from cairn.actors.requests.messages import Delta, ServerFacts, TokenInfo
from cairn.engine.answer.parts import Said
from cairn.http.app import create_app
from cairn.http.completions.request import TextRequest, read_text_request
from cairn.http.wire.checks import ClientError
from cairn.http.wire.parameters import Ignored
from tests.http.chat_completions.test_client import ask
from tests.http.conftest import Serve
from tests.http.fake_service import (
    ACCEPTED,
    DELTAS,
    FACTS,
    FINISHED,
    PREFILLING,
    QUEUED,
    FakeService,
    token,
)

INFILL = attrs.evolve(FACTS, infill=("<p>", "<s>", "<m>"))


def read(facts: ServerFacts = INFILL, **fields: Any) -> TextRequest:
    """Read a request of these fields."""
    return read_text_request(json.dumps(fields).encode(), {}, Ignored(), facts)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", "Once"),
        ("", ""),
        (["Once"], "Once"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
        ([0], (0,)),
    ],
)
def test_prompts(prompt: Any, expected: Any):
    """A text or token ids, alone or as the only element of a list."""
    assert expected == read(prompt=prompt).command.prompt


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [[1], []]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
        ({"prompt": [1], "suffix": "b"}, "prompt", "unsupported_value"),
        ({"prompt": [2000]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": 7}, "prompt", "invalid_type"),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "echo", "unsupported_value"),
        ({"prompt": "a", "best_of": 3, "n": 2}, "best_of", "unsupported_value"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of", "unsupported_value"),
        ({"prompt": "a", "logprobs": 6}, "logprobs", "invalid_value"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "n": 17}, "n", "invalid_value"),
        ({"prompt": "a", "logit_bias": {"foo": 0}}, "logit_bias", "invalid_value"),
    ],
)
def test_what_cannot_be_used(fields: dict[str, Any], param: str, code: str):
    """Each is refused with its parameter."""
    with pytest.raises(ClientError) as refused:
        read(**fields)
    assert (param, code) == (refused.value.param, refused.value.code)


def test_several_prompts():
    """Each is a command of its own, alike but for its prompt."""
    found = read(prompt=["Once", [1, 2]], seed=3, max_tokens=0)
    assert ("Once", 0) == (found.command.prompt, found.command.max_tokens)
    assert (attrs.evolve(found.command, prompt=(1, 2)),) == found.more
    assert (False, ("Once", None)) == (found.echo, found.echoes)


def test_a_gap():
    """The texts before and after it are put between the model's own tokens; others are refused."""
    found = read(prompt=["def f(", "g("], suffix="):", echo=True)
    assert "<p>def f(<s>):<m>" == found.command.prompt
    assert ["<p>g(<s>):<m>"] == [one.prompt for one in found.more]
    assert ("def f(", "g(") == found.echoes
    with pytest.raises(ClientError, match="not supported by cairn/small-1") as refused:
        read(FACTS, prompt="a", suffix="b")
    assert "suffix" == refused.value.param


def test_parameters():
    """Supported parameters are in the command, and unknown ones are reported."""
    found = read(
        prompt="a",
        temperature=0.5,
        max_tokens=9,
        stop="b",
        seed=3,
        logprobs=2,
        n=2,
        best_of=2,
        echo=False,
        suffix="",
        user="me",
    )
    command = found.command
    assert ("openai.completions", 0.5, 9, ("b",), 3, 2, 2) == (
        command.protocol,
        command.sampling.temperature,
        command.max_tokens,
        command.stop,
        command.seed,
        command.top_logprobs,
        command.choices,
    )
    assert ("user",) == found.ignored


ASK: dict[str, Any] = {"model": "any", "prompt": "Once"}
SCRIPT = (
    ACCEPTED,
    *DELTAS,
    attrs.evolve(ACCEPTED, request="req-2", choice=1),
    Delta(parts=(Said("Other"),), choice=1),
    FINISHED,
    attrs.evolve(FINISHED, choice=1),
)


@pytest.mark.trio
async def test_whole(serve: Serve):
    """A completion is parsed with its texts, log-probabilities and usage."""
    url = await serve(FakeService(SCRIPT))
    answer = await ask(url, lambda api: api.completions.create(**ASK, n=2, logprobs=1))
    assert ("cmpl-req-1", "text_completion") == (answer.id, answer.object)
    assert [(0, "Grüße!", "stop"), (1, "Other", "stop")] == [
        (one.index, one.text, one.finish_reason) for one in answer.choices
    ]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (["Gr", "üße", "", "!"], [0, 2, 5, 5]) == (logprobs.tokens, logprobs.text_offset)
    assert [-0.25, -0.5, -0.75, -1.0] == logprobs.token_logprobs
    assert logprobs.top_logprobs is not None
    assert {"Gr": -0.25, "<s>": -9999.0} == logprobs.top_logprobs[0]
    assert answer.usage is not None
    assert 6 == answer.usage.completion_tokens


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_are_part_of_a_character(serve: Serve, stream: bool):
    """
    They are named by their bytes, so that none replaces another, and begin where the character
    begins.
    """

    def part(token_id: int, raw: bytes) -> TokenInfo:
        top = (
            (token_id, "\ufffd", raw, -0.5),
            (9, "\ufffd", b"\x80", -1.0),
            (8, "\ufffd", None, -2.0),
        )
        return TokenInfo(id=token_id, text="\ufffd", raw=raw, logprob=-0.5, top=top)

    script = (
        ACCEPTED,
        Delta(parts=(), tokens=(part(1, b"\xf0\x9f"),)),
        Delta(parts=(Said("\U0001faa8!"),), tokens=(part(2, b"\xaa\xa8"), token(3, "!", -1.0))),
        FINISHED,
    )
    url = await serve(FakeService(script))
    fields = {**ASK, "logprobs": 3}
    sent: list[Any] = []
    if stream:
        chunks = await ask(url, lambda api: list(api.completions.create(**fields, stream=True)))
        sent = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    else:
        answer = await ask(url, lambda api: api.completions.create(**fields))
        sent = [answer.choices[0].logprobs]
    found = [one for one in sent if one is not None]

    names = ["bytes:\\xf0\\x9f", "bytes:\\xaa\\xa8", "!"]
    assert names == [name for one in found for name in one.tokens]
    assert [0, 0, 1] == [place for one in found for place in one.text_offset]
    likely = {names[0]: -0.5, "bytes:\\x80": -1.0, "\ufffd": -2.0}
    assert likely == found[0].top_logprobs[0]


@pytest.mark.trio
async def test_stream(serve: Serve):
    """A stream adds up to the same text, with continuous offsets."""
    url = await serve(FakeService(SCRIPT))
    asked: dict[str, Any] = {
        **ASK,
        "n": 2,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
    }
    chunks = await ask(url, lambda api: list(api.completions.create(**asked, stream=True)))
    texts, offsets = ["", ""], list[int]()
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                offsets += choice.logprobs.text_offset or []
    assert ["Grüße!", "Other"] == texts
    assert [0, 2, 5, 5] == offsets
    assert [6] == [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]


@pytest.mark.trio
@pytest.mark.parametrize("stream", [False, True])
async def test_answers_to_several_prompts(serve: Serve, stream: bool):
    """They come in order, each with its prompt if it is to be repeated; each prompt counts once."""
    service = FakeService(SCRIPT, (QUEUED, *SCRIPT))
    url = await serve(service)
    asked: dict[str, Any] = {"model": "any", "prompt": ["Once ", [72, 105]], "echo": True, "n": 2}
    texts = [""] * 4
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await ask(url, lambda api: list(api.completions.create(**asked)))
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
        ended = [one.index for chunk in chunks for one in chunk.choices if one.finish_reason]
        assert [0, 1, 2, 3] == ended
    else:
        answer = await ask(url, lambda api: api.completions.create(**asked))
        for choice in answer.choices:
            texts[choice.index] += choice.text
        usage = answer.usage
        assert usage is not None
    assert ["Once Grüße!", "Once Other", "HiGrüße!", "HiOther"] == texts
    assert (4096, 12) == (usage.prompt_tokens, usage.completion_tokens)
    assert 256 == usage.prompt_tokens_details.cached_tokens
    # The token ids were decoded before.
    assert [(72, 105), "Once ", (72, 105)] == [one.prompt for one in service.commands]
    assert 2 == service.entered == service.left


@pytest.mark.trio
async def test_a_prompt_that_is_refused_after_another():
    """The whole request fails, with what was refused."""
    service = FakeService(SCRIPT, [PromptTooLong(5000, 4096)])
    body = json.dumps({"prompt": ["a", "b"], "n": 2})
    response = await create_app(service).test_client().post("/v1/completions", data=body)
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (400, "prompt") == (response.status_code, error["param"])
    assert 2 == service.entered == service.left


@pytest.mark.trio
async def test_an_error_names_the_prompt():
    """The error for a prompt that is too long names this protocol's field."""
    service = FakeService(refusal=PromptTooLong(5000, 4096))
    response = await create_app(service).test_client().post("/v1/completions", data=json.dumps(ASK))
    error = json.loads(await response.get_data(as_text=True))["error"]
    assert (400, "prompt") == (response.status_code, error["param"])


@pytest.mark.trio
async def test_a_stream_that_waits_is_kept_alive():
    """While the prompt is queued or prefilled, comments report the progress."""
    script = (QUEUED, ACCEPTED, PREFILLING, FINISHED)
    client = create_app(FakeService(script)).test_client()
    response = await client.post(
        "/v1/completions", data=json.dumps({"prompt": "a", "stream": True})
    )
    text = await response.get_data(as_text=True)
    assert text.startswith(": waiting\n\n")
    assert ": prefill 512/2048\n\n" in text
