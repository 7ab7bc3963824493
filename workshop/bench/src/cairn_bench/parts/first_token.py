"""
The first token of a continuation compared with the passes that it needs, and the tokens computed
again although they were available.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

from cairn.actors.journal_keys import KeyFile
from cairn.journal import paths
from cairn.journal.errors import StoreError
from cairn.journal.events import PathSelected
from cairn.journal.replay import Replay
from cairn.journal.rows.database.urls import journal_url
from cairn.journal.rows.store import Store
from cairn.journal.rows.store_sql import SqlStore
from cairn.journal.state import OpenRequest, Session, State
from cairn_bench.parts.given_up import GIVEN_UP
from cairn_bench.parts.stage import (
    Measure,
    Part,
    Stage,
    ask,
    checked,
    median_s,
    milliseconds,
    require_hits,
    span,
    words_of,
)
from cairn_bench.rows import Row
from cairn_bench.scenarios import Talk
from cairn_bench.servers.asking import NoResult, Sample
from cairn_bench.servers.processes import Running

# Each is below a slab size class, so that no conversation changes its slab while it is measured.
SHORT, LONG = 560, 7600
_ANSWER_TOKENS = 8
_WORDS = 6
_MOSTLY = 0.75


def continuations(stage: Stage) -> list[Row]:
    """Conversations of two lengths that continue, each time after the server is idle."""
    server = stage.ours()
    words = words_of(server, stage.drawn("lengths"))
    short, long = SHORT, stage.length(LONG)
    held = {
        history: _continued(stage, server, history, words(history)) for history in (short, long)
    }
    compared = sum(
        len(checked(f"continuations at {history} tokens", samples, server))
        for history, samples in held.items()
    )
    samples = [sample for found in held.values() for sample in found]
    bare = stage.alone(stage.own, stage.model, spans=[span(sample) for sample in samples])
    passes_s = iter(bare.spans_s)
    raw = {history: [next(passes_s) for _ in found] for history, found in held.items()}
    ratios = {
        history: statistics.median(
            sample.first_s / passes for sample, passes in zip(found, raw[history], strict=True)
        )
        for history, found in held.items()
    }
    left = {
        history: statistics.median(
            sample.first_s - passes for sample, passes in zip(found, raw[history], strict=True)
        )
        for history, found in held.items()
    }
    if min(left.values()) <= 0:
        raise NoResult(
            "the passes alone took as long as the first tokens that they are part of: "
            f"{milliseconds(left[short])} and {milliseconds(left[long])} are left over"
        )
    figures = {
        str(history): {
            "first_s": [sample.first_s for sample in found],
            "passes_s": raw[history],
            "spans": [span(sample) for sample in found],
        }
        for history, found in held.items()
    }
    worst = max(held, key=lambda history: ratios[history])
    return [
        Row(
            name="first token of a continuation / its passes alone",
            value=ratios[worst],
            goal=1.15,
            of=", ".join(
                f"{milliseconds(median_s(held[history]))} / "
                f"{milliseconds(statistics.median(raw[history]))} at {history} tokens"
                for history in held
            ),
            checked=compared,
            figures=figures,
        ),
        Row(
            name=f"first token less its passes, at {long} tokens / at {short}",
            value=left[long] / left[short],
            goal=1.2,
            of=f"{milliseconds(left[long])} / {milliseconds(left[short])}",
            checked=compared,
            figures={str(history): left[history] for history in held},
        ),
    ]


def _continued(stage: Stage, server: Running, history: int, words: int) -> Sequence[Sample]:
    """
    Turns of a conversation of this many tokens, without its first one.

    Raises:
        NoAnswer: the server did not answer.
        NoResult: one of them reused little.
    """
    talk = Talk(stage.drawn(f"history of {history}"), system_words=words)
    samples = []
    for _ in range(1 + stage.count(5, 15)):
        samples.append(ask(server, talk.ask(_WORDS, answer_tokens=_ANSWER_TOKENS)))
        talk.hear(samples[-1].answer.text)
        server.wait_at_rest()
    require_hits(f"continuations at {history} tokens", samples[1:], _MOSTLY)
    return samples[1:]


# --- prefilled again -----------------------------------------------------------------------------


def again(stage: Stage) -> list[Row]:
    """
    What the journal shows about all requests to our server in this run.

    Raises:
        NoResult: it has nothing that could be reused.
    """
    return [again_row(stage.ours(), "tokens prefilled again that were there, at most in a request")]


def again_row(server: Running, name: str, *, after: int = 0) -> Row:
    """
    What the journal of a server shows about its requests.

    Args:
        after: a position in it, as of ``journal_end``: the requests from there on.

    Raises:
        NoResult: it has nothing that could be reused.
    """
    with journal_of(server) as store:
        found, grain = computed_again(store, after=after)
    if not found:
        raise NoResult("no recorded request had a cached part of its prompt")
    return Row(
        name=name,
        value=max(found),
        goal=max(1, grain - 1),
        shown="count",
        of=f"{len(found)} requests, {statistics.mean(found):.1f} in the mean; grain {grain}",
        figures={"requests": len(found), "mean": statistics.mean(found), "grain": grain},
    )


def journal_end(server: Running) -> int:
    """
    The last position in the journal of a server.

    Raises:
        NoResult: it cannot be read.
    """
    with journal_of(server) as store:
        position, _ = store.head()
    return position


@contextlib.contextmanager
def journal_of(server: Running) -> Iterator[Store]:
    """
    The journal of a server, to read.

    Raises:
        NoResult: it cannot be read.
    """
    if server.data is None:
        raise NoResult("the journal cannot be read from here")
    with contextlib.ExitStack() as opened:
        try:
            keys = KeyFile.read(server.data / "keys.db")
            if keys is not None:
                opened.callback(keys.close)
            store = SqlStore.open(journal_url(server.data), read_only=True, keys=keys)
        except StoreError as error:
            raise NoResult(f"the journal cannot be read from here: {error}") from error
        opened.callback(store.close)
        yield store


def computed_again(store: Store, *, after: int = 0) -> tuple[list[int], int]:
    """
    For each request with canonical KV available, how many of those tokens were not reused; and the
    grain.

    The last token of a prompt is always computed, because the answer follows from it.

    Args:
        after: a position: only the requests from there on count.
    """
    fold = Replay(store.base())
    found, grain = [], 0
    for row in store.read():
        before = fold.state
        recorded = fold.feed(row)
        if recorded is None or not isinstance(recorded.event, PathSelected):
            continue
        event = recorded.event
        session = before.session(event.session)
        request = session.request
        if request is None or not request.ask.cache_prompt or row.position <= after:
            continue
        assert before.model is not None
        grain = before.model.grain
        there = canonical(before.model.block_tokens, before, session, request)
        if there:
            found.append(max(0, there - event.reused_tokens))
    return found, grain


def canonical(chunk: int, state: State, session: Session, request: OpenRequest) -> int:
    """
    How much of a prompt, from its beginning, canonical passes have computed.

    That is the chunks that were ever sealed, and the tail of the prompt before it.
    """
    sealed = 0
    for key in request.prompt_keys:
        if key not in state.blocks:
            break
        sealed += chunk
    last, tail = session.last, 0
    if last is not None and last.answered:
        tail = paths.common_length(last.prompt_ids, request.prompt_ids)
    return min(max(sealed, tail), len(request.prompt_ids) - 1)


FIRST_TOKEN = Part(
    "first-token",
    "a continuation beside the passes that it needs",
    (
        Measure("the first token of a continuation", continuations),
        Measure("tokens prefilled again", again),
        *GIVEN_UP,
    ),
)
