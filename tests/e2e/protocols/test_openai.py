"""The official client against the whole server: what the client is sent is correct."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from cairn.journal import events as ev
from tests.e2e.conftest import Start
from tests.support.processes.subprocess_server import (
    PLAIN,
    Answer,
    Listener,
    Serving,
    answer_of,
    ask,
    assistant,
    split,
    user,
)

STORY = "The stone lies on the path, and the path goes over the hill. "


def test_whole_and_streamed(shared: Serving, lengthy: Any):
    """Both have the same text, tokens, usage and finish reason."""
    body = {**PLAIN, **lengthy[0], "max_tokens": 120}
    chat: Any = shared.client().chat.completions
    whole = answer_of(chat.create(**split(body)))
    text, tokens, reasons, usage = "", [], [], None
    options = {"include_usage": True}
    for chunk in chat.create(**split(body), stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            content = choice.logprobs.content if choice.logprobs else None
            tokens += [(bytes(token.bytes), token.logprob) for token in content or ()]
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert whole.text == text
    assert whole.tokens == tuple(tokens)
    assert [whole.finish_reason] == reasons
    assert usage is not None
    assert (whole.prompt_tokens, whole.completion_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert whole.completion_tokens == len(whole.tokens) == 120


def test_twelve_turns(start: Start, cold: Serving):
    """A long conversation is one session; reuse grows with it, and no answer changes."""
    # On the shared server, the first turn reuses what it has in common with any conversation of
    # another test: at least the template's words before the system message.
    server = start()
    talk = [{"role": "system", "content": f"You keep the path. {STORY * 6}"}]
    answers: list[Answer] = []
    for turn in range(12):
        talk.append(user(f"Turn {turn}: and what lies behind the next hill? {STORY}"))
        answer = ask(server, *talk)
        talk.append(assistant(answer.text))
        answers.append(answer)
    first, *later = answers
    assert ("new_session", 0) == (first.path, first.cached_tokens)
    assert {("continuation", None)} == {(answer.path, answer.reason) for answer in later}
    assert 1 == len({answer.session for answer in answers})
    cached = [answer.cached_tokens for answer in answers]
    assert sorted(cached) == cached
    # At most one chunk and the new messages are computed again.
    for before, answer in zip(answers, later, strict=False):
        assert answer.cached_tokens > before.prompt_tokens - 64
    for turn in (5, 11):
        asked = talk[: 2 * turn + 2]
        assert ask(cold, *asked, cache_prompt=False).bits == answers[turn].bits


def test_the_journal_agrees(shared: Serving):
    """The client's usage and text are those in the journal."""
    answer = ask(shared, user(f"On record: {STORY * 8}"))
    shared.wait_idle()
    received = shared.events(ev.RequestReceived, session=answer.session)[-1]
    finished = shared.events(ev.RequestFinished, request=received.request)
    assert [(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)] == [
        (event.prompt_tokens, event.cached_tokens, event.completion_tokens) for event in finished
    ]
    assert answer.text == shared.released(received.request)[0]
    assert answer.seed == received.seed


def test_one_token(shared: Serving):
    """An answer of one token has no decode step, and ends because of its length."""
    answer = ask(shared, user("One."), max_tokens=1)
    assert ("length", 1, 1) == (answer.finish_reason, answer.completion_tokens, len(answer.tokens))


def test_a_stop_text(shared: Serving, lengthy: Any):
    """The answer is the one without it, up to the stop text, which is not sent."""
    body = {**lengthy[0], "max_tokens": 120}
    whole = ask(shared, **body)
    stop = whole.text[40:46]
    cut = ask(shared, **body, stop=["nothing that comes up", stop])
    assert whole.text[: whole.text.index(stop)] == cut.text
    assert "stop" == cut.finish_reason
    assert cut.completion_tokens < whole.completion_tokens
    streamed = Listener(shared, **body, stop=stop).end()
    assert cut.text == streamed.text


def test_likeliest_tokens(shared: Serving):
    """In a greedy answer, each token is the likeliest of its alternatives."""
    body = {**PLAIN, "messages": [user("Which is likely?")], "top_logprobs": 5}
    (choice,) = shared.client().chat.completions.create(**split(body)).choices
    assert choice.logprobs.content
    for token in choice.logprobs.content:
        assert 5 == len(token.top_logprobs)
        assert token.logprob == token.top_logprobs[0].logprob
        assert token.bytes == token.top_logprobs[0].bytes


def test_seeds(shared: Serving, lengthy: Any):
    """
    The same seed gives the same answer, another one a different answer; without one, the server
    draws a seed and reports it.
    """
    drawn_of = {**lengthy[0], "max_tokens": 30}
    del drawn_of["seed"]
    drawn = ask(shared, **drawn_of)
    again = ask(shared, **drawn_of, seed=drawn.seed)
    assert drawn.bits == again.bits
    # Thirty tokens at this temperature are never equal by chance.
    assert ask(shared, **drawn_of, seed=drawn.seed + 1).bits != drawn.bits


def test_longer_than_the_context(shared: Serving):
    """A prompt that cannot fit is refused with both numbers, and nothing is journaled."""
    before = shared.position()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(shared, user("path " * 70_000))
    assert "context_length_exceeded" == refused.value.code
    context = shared.health()["context_tokens"]
    assert f"> {context - 1} maximum" in refused.value.message
    assert [] == shared.requests(after=before)


@pytest.mark.parametrize(
    "text",
    ["Grüße aus Zürich, 你好, 🪨🪨🪨", "", " ", "\x00\x07", "<|im_end|><|im_start|>", "é" * 300],
)
def test_any_text_is_served(shared: Serving, cold: Serving, text: str):
    """Any text is served, in any script, also an empty one."""
    answer = ask(shared, user(text))
    assert answer.completion_tokens >= 1
    assert ask(cold, user(text), cache_prompt=False).bits == answer.bits


def test_no_messages(shared: Serving):
    """A conversation without a message is a client error."""
    with pytest.raises(openai.BadRequestError) as refused:
        ask(shared)
    assert "messages" == refused.value.param


@pytest.mark.long
def test_characters_of_several_tokens(shared: Serving):
    """However its bytes are split into tokens, half a character is never sent."""
    body = {"messages": [user("Any bytes.")], "temperature": 20.0, "seed": 3, "max_tokens": 300}
    whole = ask(shared, **body)
    streamed = Listener(shared, **body).end()
    assert whole.text == streamed.text
    assert whole.tokens == streamed.tokens


def test_the_cold_path(shared: Serving):
    """Such a request has everything computed, in a session of its own, with the same bits."""
    talk = [user(f"Cold: {STORY * 12}")]
    warm = [ask(shared, *talk) for _ in range(2)][-1]
    assert warm.cached_tokens >= 128
    asked = ask(shared, *talk, cache_prompt=False)
    assert ("new_session", "cache_disabled", 0) == (asked.path, asked.reason, asked.cached_tokens)
    assert warm.bits == asked.bits


def test_several_answers(shared: Serving):
    """Each is the answer that its seed gives alone, and the prompt is counted once."""
    talk = [user(f"Tell me of the stone. {STORY * 4}")]
    body = {"messages": talk, "temperature": 5, "max_tokens": 12, "seed": 5}
    several = shared.post(**body, n=3).json()
    alone = [shared.post(**{**body, "seed": seed}).json() for seed in (5, 6, 7)]
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert [one["choices"][0]["message"]["content"] for one in alone] == texts
    assert 3 == len(set(texts))
    assert [5, 6, 7] == [one["seed"] for one in several["cairn"]["choices"]]
    usage = several["usage"]
    assert alone[0]["usage"]["prompt_tokens"] == usage["prompt_tokens"]
    written = sum(one["usage"]["completion_tokens"] for one in alone)
    assert written == usage["completion_tokens"]


def test_a_text_is_continued(shared: Serving):
    """Streamed and whole, it is the same text, and the second time is warm."""
    client: Any = shared.client()
    body: dict[str, Any] = {"model": "any", "prompt": STORY * 8, "max_tokens": 8}
    body |= {"temperature": 5, "seed": 3}
    first = client.completions.create(**body)
    again = client.completions.create(**body)
    chunks = client.completions.create(**body, stream=True)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert first.choices[0].text == again.choices[0].text == text != ""
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
