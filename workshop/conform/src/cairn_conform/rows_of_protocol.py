"""The rows about the protocol: reported numbers add up, and requests are served or refused."""

from __future__ import annotations

import json
import math
from typing import Any

from cairn_conform.case import TOKENS, Case, Row, cached
from cairn_conform.client_answers import Answer, compared, count, shown
from cairn_conform.client_texts import Message, listed, user
from cairn_conform.prompts import bad_bodies, odd_prompts

_SEED = 7
_OTHER_SEEDS = (8, 9, 10)
_CHANCE_MIN = 1e-3
_LIMITS = (1, 5)
_STOP_CHARACTERS = 3
_WORDS_MAX = 2_000_000
_LOST = "\N{REPLACEMENT CHARACTER}"


def streaming(case: Case) -> None:
    """The same request whole and as a stream, plain and with a stop text."""
    prompt = case.long()
    plain = case.warm(prompt)
    requests: list[tuple[str, dict[str, Any]]] = [("plain", {})]
    if stops := _stops(plain.text):
        requests.append(("with a stop text", {"stop": [stops[0]]}))
    for name, more in requests:
        whole = case.ask(prompt, **more)
        stream = case.stream(prompt, **more)
        if not stream.streamed:
            case.fail(f"{name}: a stream was requested, and the answer was not streamed")
            continue
        case.same(whole, stream, f"{name}: streamed, compared with whole")
        if not stream.done:
            case.fail(f"{name}: the stream ended without [DONE]")
        both = whole if stream.tokens is not None else stream
        case.note(f"{name}: compared: {compared(both)}")


def seeds(case: Case) -> None:
    """A seed twice, and different seeds, at temperature 1."""
    prompt = case.short()
    sampled: dict[str, Any] = {"temperature": 1, "top_p": 1}
    first = case.spoken(case.ask(prompt, "a request with a seed", seed=_SEED, **sampled))
    again = case.ask(prompt, seed=_SEED, **sampled)
    # Only the drawn tokens are compared; their probabilities are left to the rows of the cache.
    case.same(first, again, f"seed {_SEED} again", logprobs=False)
    others = [case.ask(prompt, seed=seed, **sampled) for seed in _OTHER_SEEDS]
    apart = sum((one.text, one.reasoning) != (first.text, first.reasoning) for one in others)
    if not apart:
        found = f"at temperature 1, {len(others)} other seeds give the same answer"
        chance = _chance(first, len(others))
        if chance is not None and chance > _CHANCE_MIN:
            case.untested(f"{found}; the model is so certain of it that this is likely")
        elif chance is None and first.finish_reason != "length":
            case.untested(f"{found}; log-probabilities are not reported, and the answer is short")
        else:
            case.fail(found)
    case.note(f"other seeds with other answers: {apart} of {len(others)}")


def _chance(answer: Answer, others: int) -> float | None:
    """
    How likely it is that this many different seeds give one answer; None if it is not reported.
    """
    total = 0.0
    for token in answer.tokens or ():
        if token.logprob is None:
            return None
        total += min(token.logprob, 0.0)
    return math.exp(others * total) if answer.tokens else None


def limits(case: Case) -> None:
    """Fewer tokens, and stop texts taken from the server's own answer."""
    prompt = case.short()
    full = case.warm(prompt)
    for limit in (*_LIMITS, TOKENS):
        _check_limit(case, full, case.ask(prompt, max_tokens=limit), limit)
    stops = _stops(full.text)
    if not stops:
        case.note("stop texts: not tested, since the answer has no text to stop at")
    for place, stop in enumerate(stops):
        answer = _ask_stop(case, prompt, stop, alone=not place)
        _check_stop(case, full, answer, stop)
    case.note(f"max_tokens: {', '.join(map(str, (*_LIMITS, TOKENS)))}")
    case.note(f"stop texts: {', '.join(map(shown, stops)) or 'none'} in {shown(full.text)}")


def _check_limit(case: Case, full: Answer, answer: Answer, limit: int) -> None:
    what = f"max_tokens {limit}"
    tokens, all_tokens = _length(answer), _length(full)
    if tokens is not None and tokens > limit:
        case.fail(f"{what}: {tokens} tokens")
    # A cut character at the end becomes a replacement sign, which the longer answer does not have.
    beginning = answer.text.rstrip(_LOST).rstrip()
    if not full.text.startswith(beginning):
        case.fail(
            f"{what}: {shown(answer.text)} is not the beginning of the longer answer "
            f"{shown(full.text)}"
        )
    if tokens is None and limit < TOKENS and len(answer.text) >= len(full.text) > 0:
        case.fail(f"{what}: as much text as with max_tokens {TOKENS}")
    if tokens is None or all_tokens is None:
        is_cut = len(answer.text) < len(full.text)
    else:
        is_cut = tokens == limit and (tokens < all_tokens or full.finish_reason == "length")
    if is_cut and answer.finish_reason != "length":
        case.fail(f"{what}: finish_reason is {answer.finish_reason}, not length")


def _length(answer: Answer) -> int | None:
    """How many tokens an answer has, if that is reported."""
    if answer.completion_tokens is None and answer.tokens is not None:
        return len(answer.tokens)
    return answer.completion_tokens


def _ask_stop(case: Case, prompt: list[Message], stop: str, *, alone: bool) -> Answer:
    """
    An answer that should end at a stop text.

    The text is sent alone if the server accepts that, otherwise in a list whose first text does not
    occur.
    """
    if alone:
        answer = case.subject.client.ask(case.subject.body(prompt, stop=stop))
        if not case.refuses(answer):
            return case.complete(answer, "a request with a stop text")
        case.note(f"a single stop text is refused ({answer.outcome}), so it was sent in a list")
    given = ["\x00never\x00", stop]
    return case.ask(prompt, "a request with a list of stop texts", stop=given)


def _check_stop(case: Case, full: Answer, answer: Answer, stop: str) -> None:
    what = f"stop {shown(stop)}"
    expected = full.text[: full.text.index(stop)]
    if stop in answer.text:
        case.fail(f"{what}: it is in the answer {shown(answer.text)}")
    elif answer.text.rstrip() != expected.rstrip():
        case.fail(f"{what}: the answer is {shown(answer.text)}, not {shown(expected)}")
    elif answer.finish_reason != "stop":
        case.fail(f"{what}: finish_reason is {answer.finish_reason}, not stop")


def _stops(text: str) -> list[str]:
    """Texts from the middle of an answer: characters at any place, and a word."""
    middle = len(text) // 2
    found = [text[middle : middle + _STOP_CHARACTERS]]
    found += text[middle:].split()[1:2]
    usable = (stop for stop in found if stop.strip() and _LOST not in stop and stop in text)
    return list(dict.fromkeys(usable))


def token_accounts(case: Case) -> None:
    """The usage of one prompt: as a miss, as a hit, as a stream, and cut short by its limit."""
    prompt = case.long()
    answers = {
        "first": case.spoken(case.ask(prompt)),
        "again": case.ask(prompt),
        "streamed": case.stream(prompt),
        "with max_tokens 5": case.ask(prompt, max_tokens=5),
    }
    reported = {name: one for name, one in answers.items() if one.prompt_tokens is not None}
    if not reported:
        raise case.stop("usage is not reported")
    for name, one in reported.items():
        _check_account(case, name, one)
    numbers = {one.prompt_tokens for one in reported.values()}
    if len(numbers) > 1:
        each = ", ".join(f"{name} {one.prompt_tokens}" for name, one in reported.items())
        case.fail(f"the same prompt has different numbers of tokens: {each}")
    if "streamed" not in reported:
        case.note("usage of streams: not reported")
    case.note(f"prompt_tokens: {', '.join(map(str, sorted(filter(None, numbers))))}")
    case.note(
        "completion_tokens: "
        + ", ".join(f"{name} {count(one.completion_tokens)}" for name, one in answers.items())
    )
    case.note(cached(list(answers.values())))


def _check_account(case: Case, name: str, answer: Answer) -> None:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    total, reused = answer.total_tokens, answer.cached_tokens
    if prompt is not None and completion is not None and total not in (None, prompt + completion):
        case.fail(f"{name}: total_tokens is {total}, not {prompt} + {completion}")
    if reused is not None and prompt is not None and not 0 <= reused <= prompt:
        case.fail(f"{name}: cached_tokens is {reused}, of {prompt} prompt tokens")
    if answer.tokens is None or completion is None:
        return
    logprobs = len(answer.tokens)
    if completion == logprobs + 1 and answer.finish_reason == "stop":
        # No rule says whether the token that ends an answer has a log-probability.
        case.note(f"{name}: the token that ended the answer is counted, and not in logprobs")
    elif completion != logprobs:
        case.fail(f"{name}: completion_tokens is {completion}, and logprobs has {logprobs}")


def odd(case: Case) -> None:
    """Contents never sent on purpose: each is answered or refused, and the server survives."""
    known = case.short()
    before = case.warm(known)
    answered, refused = [], []
    for name, content in odd_prompts(case.subject.salt).items():
        body = case.subject.body([user(content)], max_tokens=8)
        answer = case.subject.client.ask(body)
        if answer.complete:
            answered.append(name)
        elif answer.refused and answer.error:
            refused.append(f"{name} ({answer.status})")
        else:
            case.fail(f"{name}: {answer.outcome}")
        if not _lives_on(case, name) or _hung(case, answer):
            break
    case.note(f"answered: {', '.join(answered) or 'none'}")
    case.note(f"refused: {', '.join(refused) or 'none'}")
    case.same(before, case.ask(known, "a good request"), "a good request after these")


def bad(case: Case) -> None:
    """Invalid bodies: each is refused in OpenAI's envelope, and the server survives."""
    known = case.short()
    before = case.warm(known)
    logprobs = before.tokens is not None
    bodies = dict(bad_bodies(case.subject.body(known), logprobs=logprobs))
    if not logprobs:
        case.note("logprobs that is a text: not tested, since log-probabilities are not reported")
    context = case.subject.context_tokens
    if context is None or context > _WORDS_MAX:
        case.note(
            "a prompt that is too long: not tested, since the context is not reported (--context)"
        )
    else:
        # Each word has at least one token.
        too_long = listed(case.subject.salt, "too long", context + 1)
        bodies["a prompt that is too long"] = json.dumps(
            case.subject.body([user(too_long)])
        ).encode()
    unnamed, refused = [], 0
    for name, body in bodies.items():
        answer = case.subject.client.send(body)
        if not answer.refused:
            case.fail(f"{name}: {_taken(answer)}")
        else:
            refused += 1
            if not answer.enveloped:
                unnamed.append((name, answer))
        if not _lives_on(case, name) or _hung(case, answer):
            break
    if unnamed:
        name, answer = unnamed[0]
        case.fail(
            f"{len(unnamed)} of {refused} refusals are not OpenAI's "
            f'{{"error": {{"message": ...}}}}, such as {name}: {answer.outcome}'
        )
    case.note(f"refused: {refused} of {len(bodies)}")
    if not case.subject.alive():
        return
    case.same(before, case.ask(known, "a good request"), "a good request after these")


def _taken(answer: Answer) -> str:
    if answer.complete:
        return f"answered, with {shown(answer.text, 40)}"
    return answer.outcome


def _lives_on(case: Case, name: str) -> bool:
    """Check that the server still answers after a request; otherwise the row fails."""
    alive = case.subject.alive()
    if not alive:
        case.fail(f"{name}: the server stopped answering after it")
    return alive


def _hung(case: Case, answer: Answer) -> bool:
    """Whether the row should end: a request that hangs takes all of its time, each time."""
    if answer.hung:
        case.note("the rest of the row was not tested")
    return answer.hung


PROTOCOL_ROWS = (
    Row("streaming", "Does a stream give the same answer?", streaming),
    Row("seeds", "Does a seed repeat an answer, and another seed change it?", seeds),
    Row("limits", "Do stop texts and max_tokens work?", limits),
    Row("token-accounts", "Does the usage add up?", token_accounts),
)
"""The rows that do no harm."""

HOSTILE_ROWS = (
    Row("odd-prompts", "Are odd prompts answered or refused?", odd),
    Row("bad-bodies", "Are invalid bodies refused, with OpenAI's error format?", bad),
)
"""The rows that a server may not survive."""
