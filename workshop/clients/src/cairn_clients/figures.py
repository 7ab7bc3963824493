"""
How a client's requests were served, from the journal.

Which request continues which is determined by the tokens of their prompts alone, not by what the
server decided: a request continues the earlier one whose prompt it begins with, except for that
prompt's last chunk. A request that continues none is an opening, and a client has no more openings
than conversations. If a client changes the beginning of a prompt, that would also show as an extra
opening.

Old tokens are those of the previous prompt and, once the server was idle, of its answer, both as
the model wrote it and as it was settled. All whole chunks of these are reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from cairn.journal import events as ev


@attrs.frozen(kw_only=True)
class Request:
    """
    A request, and the path that was chosen for it.

    Attributes:
        ids: the prompt's token ids.
        path: ``continuation`` or ``new_session``.
        reused: tokens of the prompt that were not computed again.
        answered: whether the answer is complete.
        diverged: what had changed, if the path reports it.
        place: the row in which it was received.
        later: what a next prompt may begin with: the prompt with its answer as the model wrote it,
            and as it was settled.
        rested: the row in which its session became idle after it; None if another request came
            before that.
        unsettled: whether its session is idle without all of that.
    """

    name: str
    protocol: str
    ids: tuple[int, ...] = attrs.field(repr=False)
    path: str
    reason: str | None
    reused: int
    answered: bool
    diverged: str | None = None
    place: int = 0
    later: tuple[tuple[int, ...], ...] = attrs.field(default=(), repr=False)
    rested: int | None = None
    unsettled: bool = False


@attrs.frozen(kw_only=True)
class Turn:
    """
    A request, and the one that it continues.

    Attributes:
        same: the length of the common beginning of the prompts, in tokens; 0 for an opening.
        old: the tokens of the prompt that the server could have; 0 for an opening.
    """

    request: Request
    before: Request | None
    same: int
    old: int


def requests_of(recorded: Iterable[ev.Recorded]) -> list[Request]:
    """The requests of a journal, in order."""
    prompts: dict[str, tuple[int, ...]] = {}
    received: list[ev.RequestReceived] = []
    paths: dict[str, ev.PathSelected] = {}
    ended: set[str] = set()
    places: dict[str, int] = {}
    answers: dict[str, tuple[int, ...]] = {}
    waiting: dict[str, tuple[int, ...]] = {}  # tokens that were made and not released
    later: dict[str, tuple[tuple[int, ...], ...]] = {}
    rests: dict[str, tuple[int, bool]] = {}
    last: dict[str, str] = {}  # by session, the last request that it took
    for place in recorded:
        event = place.event
        match event:
            case ev.RequestReceived():
                base = prompts[event.base_request] if event.base_request else ()
                prompts[event.request] = base[: event.base_tokens] + event.new_ids
                received.append(event)
                places[event.request] = place.position
                last[event.session] = event.request
            case ev.TokensEmitted():
                answers[event.request] = answers.get(event.request, ()) + event.ids
                waiting[event.request] = waiting[event.request][len(event.ids) :]
            case ev.CacheExtended(request=str() as request):
                made = waiting.get(request, ()) + event.sampled
                answers[request] = answers.get(request, ()) + made[: event.emitted]
                waiting[request] = made[event.emitted :]
            case ev.PrewarmStarted() if event.session in last:
                request = last[event.session]
                said = prompts[request] + answers.get(request, ())
                if event.base_tokens <= len(said):
                    later[request] = (said[: event.base_tokens] + event.new_ids,)
            case ev.SessionSettled() if event.session in last:
                rests[last[event.session]] = place.position, event.complete
            case ev.PathSelected():
                paths[event.request] = event
            case ev.RequestFinished():
                ended.add(event.request)
            case _:
                pass
    return [
        Request(
            name=event.request,
            protocol=event.protocol,
            ids=prompts[event.request],
            path=paths[event.request].path,
            reason=paths[event.request].reason,
            reused=paths[event.request].reused_tokens,
            answered=event.request in ended,
            diverged=paths[event.request].diverged_text,
            place=places[event.request],
            later=(
                prompts[event.request] + answers.get(event.request, ()),
                *later.get(event.request, ()),
            ),
            rested=rests.get(event.request, (None, True))[0],
            unsettled=not rests.get(event.request, (None, True))[1],
        )
        for event in received
        if event.request in paths
    ]


def turns_of(requests: Sequence[Request], chunk: int) -> list[Turn]:
    """
    Each request with the one that it continues.

    Args:
        chunk: the tokens of a canonical pass.
    """
    turns = []
    for index, request in enumerate(requests):
        found: tuple[int, Request] | None = None
        for earlier in requests[:index]:
            same = common(earlier.ids, request.ids)
            goes_on = same > len(earlier.ids) - chunk and len(request.ids) > len(earlier.ids)
            if goes_on and (found is None or same >= found[0]):
                found = (same, earlier)
        same, before = found or (0, None)
        old = same
        if before is not None and before.rested is not None and before.rested < request.place:
            old = max([same, *(common(one, request.ids) for one in before.later)])
        turns.append(Turn(request=request, before=before, same=same, old=old))
    return turns


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the common beginning of two prompts, in tokens."""
    # Bisect, because slices are compared at the speed of C and prompts are long.
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def faults(turns: Sequence[Turn], openings: int, chunk: int) -> list[str]:
    """
    What is wrong, one sentence each.

    Args:
        openings: how many conversations the client began.
    """
    found = []
    began = [turn.request for turn in turns if turn.before is None]
    if len(began) != openings:
        texts = "; ".join(f"{one.path}, {one.reason}, {one.diverged!r}" for one in began)
        found.append(f"{len(began)} requests continue none, not {openings}: {texts}")
    if len(began) == len(turns):
        found.append("no request continues another")
    for turn in turns:
        request, before = turn.request, turn.before
        where = f"a prompt of {len(request.ids)} tokens"
        if not request.answered:
            found.append(f"{where} was not answered to the end")
        if before is None:
            continue
        if request.path != "continuation":
            found.append(f"{where} is a {request.path} ({request.reason})")
        # At least one token of a prompt is always run, for the first token of the answer.
        due = min(turn.old, len(request.ids) - 1) // chunk * chunk
        if request.reused < due:
            found.append(f"{where} reuses {request.reused}, and {due} were there")
    found += [
        f"a prompt of {len(turn.request.ids)} tokens and its answer were not settled at rest"
        for turn in turns
        if turn.request.unsettled and not _goes_on(turn.request, turns)
    ]
    return found


def _goes_on(request: Request, turns: Sequence[Turn]) -> bool:
    """Whether another request came after it, for which the server interrupted its settling."""
    return any(turn.request.place > request.place for turn in turns)
