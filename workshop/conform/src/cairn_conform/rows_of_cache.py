"""
The rows about the cache: a prompt always gets the same answer, however the server computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from cairn_conform.case import TOKENS, Case, Row, cached
from cairn_conform.client import Left
from cairn_conform.client_answers import Answer, count
from cairn_conform.client_texts import user

_OTHERS = 3
_ROUNDS = 4
_TURNS = 3
_CUTS = (0.3, 0.7)


def hit_equals_miss(case: Case) -> None:
    """
    The same long prompt twice, then bypassing the cache if the server allows it, then once more.
    """
    prompt = case.long()
    first = case.spoken(case.ask(prompt))
    again = case.ask(prompt)
    case.same(first, again, "asked again")
    answers = [first, again]
    past = case.subject.client.ask(case.subject.body(prompt, cache_prompt=False))
    if not past.refused:
        case.same(first, case.complete(past, "cache_prompt false"), "with cache_prompt false")
        answers.append(past)
    answers.append(case.ask(prompt))
    case.same(first, answers[-1], "asked once more")
    case.compared(first)
    order = "first, again, with cache_prompt false, once more"
    if past.refused:
        order = "first, again, once more; cache_prompt is refused"
    case.note(f"{cached(answers)} ({order})")
    hits = {case.hit(answer) for answer in answers}
    if hits == {False}:
        case.untested(
            "no request reused much of the prompt, so there is no hit to compare with a miss: the "
            "server has no cache, or the prompt is too short for it (raise --words)"
        )
    elif hits == {True}:
        case.untested(
            "each request reused much of the prompt, so there is no miss to compare with a hit: it "
            "was sent before (choose another --salt)"
        )


def shared_beginning(case: Case) -> None:
    """Two long prompts that differ in their last words, the second compared with a miss."""
    one, other = (
        [user(f"{message['content']} {ending}")]
        for message in case.long()
        for ending in ("Say the first word again.", "Then count the words that you have read.")
    )
    answers = [case.ask(one), case.spoken(case.ask(other))]
    case.equals_a_miss(other, answers[1], "a prompt whose beginning was cached")
    case.compared(answers[1])
    case.note(f"{cached(answers)} (one prompt, another with its beginning)")
    if case.hit(answers[1]) is False:
        case.untested("hardly any of the beginning was reused, so there is no hit")


def other_traffic(case: Case) -> None:
    """A prompt alone, after others, and among others; and a new prompt among others."""
    prompt, fresh = case.long(), case.long("new")
    others = [case.long(f"other {number}") for number in range(_OTHERS)]
    alone = case.spoken(case.ask(prompt))
    for number, other in enumerate(others):
        case.ask(other, max_tokens=TOKENS // (number + 1))
    case.same(alone, case.ask(prompt), "after other conversations")
    among, overlaps = _among(case, prompt, others, rounds=_ROUNDS)
    case.same(alone, among, "among other conversations")
    first, overlaps_first = _among(case, fresh, others)
    case.same(case.ask(fresh), first, "a new prompt among others, compared with it alone after")
    case.compared(alone)
    case.note(
        f"others in progress at the same time: {overlaps}, and {overlaps_first} of {_OTHERS} (some "
        "may have waited for others)"
    )
    if not (overlaps and overlaps_first):
        case.untested("no other request was in progress at the same time")


def turn_by_turn(case: Case) -> None:
    """A conversation turn by turn, and then its last request bypassing the cache."""
    messages = case.long()
    answers = [case.spoken(case.ask(messages))]
    for turn in range(2, _TURNS + 1):
        messages = case.onward(messages, answers[-1], f"turn {turn}")
        answers.append(case.ask(messages, f"turn {turn}"))
    case.equals_a_miss(messages, answers[-1], f"turn {_TURNS}, compared with all at once")
    case.compared(answers[-1])
    case.note(f"{cached(answers)} (turn by turn)")


def exact_repeat(case: Case) -> None:
    """
    A prompt, then the prompt with its answer as the last turn, twice; then the prompt alone again.

    The cache then holds all of the prompt, or more than it, and nothing is left to compute.
    """
    prompt = case.long()
    first = case.spoken(case.ask(prompt))
    repeat = case.onward(prompt, first)
    what = "a prompt that ends with the assistant's turn"
    answers = [first, case.ask(repeat, what), case.ask(repeat, what)]
    case.same(answers[1], answers[2], "the prompt with its answer, asked again")
    answers.append(case.ask(prompt))
    case.same(first, answers[-1], "the prompt alone, asked again after it")
    case.note(f"{cached(answers)} (prompt, with its answer, again, prompt alone)")
    if not answers[1].empty:
        case.equals_a_miss(repeat, answers[2], "the prompt with its answer, compared with a miss")
        case.compared(answers[1])


def after_a_restart(case: Case) -> None:
    """A prompt before and after a restart of the server."""
    if case.subject.restart is None:
        raise case.stop("no --restart was given")
    prompt = case.long()
    before = [case.spoken(case.ask(prompt)), case.ask(prompt)]
    case.same(before[0], before[1], "asked again before the restart")
    case.restart()
    after = [case.ask(prompt), case.ask(prompt)]
    case.same(before[0], after[0], "asked after the restart")
    case.same(before[0], after[1], "asked again after the restart")
    case.compared(before[0])
    case.note(f"{cached([*before, *after])} (twice before, twice after)")


def disconnect(case: Case) -> None:
    """Clients disconnect at several moments, and each time a known request is sent afterwards."""
    known, decoding = case.long(), case.long("decode")
    before = case.warm(known)
    before_decoding = case.warm(decoding)
    first_s = _first_s(case)
    leave = partial(case.leave, pieces=3)
    moments: Sequence[tuple[str, Callable[[], Left]]] = (
        ("at once", lambda: leave(case.long("at once"), after_s=0.0)),
        ("in prefill", lambda: leave(case.long("prefill"), after_s=first_s / 2)),
        (
            "in prefill, not streaming",
            lambda: leave(case.long("whole"), after_s=first_s / 2, stream=False),
        ),
        ("in decode", lambda: leave(decoding)),
    )
    for name, go in moments:
        left = go()
        case.note(f"disconnected {name}: {_left(left)}")
        if left.ended and name == "in decode":
            case.untested("the answer had ended before its client could disconnect in decode")
        elif name.startswith("in prefill") and (left.pieces or left.ended):
            case.untested(
                f"the answer began before its client could disconnect {name}; raise --words"
            )
        after = case.ask(known, f"the next request after a client disconnected {name}")
        case.same(before, after, f"after a client disconnected {name}")
    case.same(before_decoding, case.ask(decoding), "the request abandoned in decode, asked again")
    case.compared(before)


def cut_off_prefill(case: Case) -> None:
    """Clients disconnect while new prompts are in prefill; each prompt is then sent twice more."""
    first_s = _first_s(case)
    in_time = 0
    for part in _CUTS:
        prompt = case.long(f"cut at {part}")
        left = case.leave(prompt, after_s=first_s * part)
        in_time += not left.pieces and not left.ended
        case.note(f"disconnected at {part:.0%} of the time to first token: {_left(left)}")
        again = case.spoken(case.ask(prompt, "an abandoned prompt"))
        case.same(again, case.ask(prompt), "the abandoned prompt, asked a second time")
        case.note(f"{cached([again])} (asked again)")
        case.equals_a_miss(prompt, again, "the abandoned prompt, compared with a miss")
    case.note(f"first token of such a prompt after {first_s * 1000:.0f} ms")
    if not in_time:
        case.untested("the answer began before its client could disconnect; raise --words")


def _among(
    case: Case,
    prompt: list[dict[str, str]],
    others: list[list[dict[str, str]]],
    *,
    rounds: int = 1,
) -> tuple[Answer, int]:
    """
    An answer among others, and how many of them were in progress at the same time.

    A server may have answered known requests before the next is sent. If no two overlapped, they
    are sent again, and each round's answer is compared with that of the round before.
    """
    calls = [partial(case.ask, one, "one of several requests at once") for one in (prompt, *others)]
    earlier = None
    for _ in range(rounds):
        answer, *rest = case.together(calls)
        if earlier is not None:
            case.same(earlier, answer, "among other conversations, asked again")
        earlier = answer
        overlaps = sum(
            one.began_s < answer.ended_s and answer.began_s < one.ended_s for one in rest
        )
        if overlaps:
            break
    return answer, overlaps


def _first_s(case: Case) -> float:
    """The time to first token for a new long prompt."""
    # The first may have had to wait for work that earlier clients abandoned.
    answers = [case.stream(case.long(f"how long {number}")) for number in range(2)]
    return min((answer.first_s or answer.ended_s) - answer.began_s for answer in answers)


def _left(left: Left) -> str:
    if left.ended:
        return f"the answer had ended, after {left.after_s * 1000:.0f} ms"
    return f"after {left.after_s * 1000:.0f} ms, {count(left.pieces)} pieces of the answer"


CACHE_ROWS = (
    Row("hit-equals-miss", "Does a cache hit give the same answer as a miss?", hit_equals_miss),
    Row(
        "shared-beginning",
        "Is the answer the same if only the beginning of a prompt is cached?",
        shared_beginning,
    ),
    Row("other-traffic", "Is an answer the same after and among other requests?", other_traffic),
    Row(
        "turn-by-turn",
        "Is a conversation the same turn by turn and all at once?",
        turn_by_turn,
    ),
    Row("exact-repeat", "Is the answer the same if all of a prompt is cached?", exact_repeat),
)
"""The rows that do no harm."""

HARD_ROWS = (
    Row("restart", "Is an answer the same after a restart?", after_a_restart),
    Row(
        "disconnect",
        "Is the next answer the same after a client disconnected?",
        disconnect,
    ),
    Row(
        "cut-off-prefill",
        "Is an answer the same after an abandoned prefill?",
        cut_off_prefill,
    ),
)
"""The rows that may change the state of a server."""
