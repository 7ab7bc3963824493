"""Reuse to the token: what a session keeps and continues from where the grain is 1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
from immutables import Map

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.keys import ids_hash
from cairn.journal.paths import RULES_VERSION, Reuse
from cairn.journal.retention import NeededIds
from cairn.journal.rows.base import base_of, forgotten, state_of
from cairn.journal.state import Session
from tests.journal.model import CHUNKS, FP_A, LAYERS, Driver, Talk, Violated, rendered

C = CHUNKS[FP_A]
HELLO = ("user", tuple(range(10, 10 + 2 * C)))
SAID = ("assistant", (50, 51, 52))
MORE = ("user", (60, 61))


def driver_of(**changes: Any) -> Driver:
    """A server with room for four slabs, and a grain of 1."""
    settings = {"pool_slabs": 4, "blocks_kept": 40, "spare_tokens": 60, "any_cut": True, **changes}
    driver = Driver(**settings)
    driver.start()
    return driver


def talk(*parts: tuple[str, tuple[int, ...]], **of: Any) -> Talk:
    """A conversation of tenant t1."""
    return Talk(**{"tenant": "t1", "group": None, "name": None, "parts": parts, **of})


def served(driver: Driver, **how: Any) -> Session:
    """The session after its first answer."""
    driver.serve(talk(HELLO), answer=SAID[1], **how)
    return driver.state.session("s1")


def last_path(driver: Driver) -> ev.PathSelected:
    """The last decision."""
    return [r.event for r in driver.recorded if isinstance(r.event, ev.PathSelected)][-1]


def reused(driver: Driver) -> tuple[int, int, int]:
    """(tokens from the slab, blocks from the slab, blocks from the pool) of the last decision."""
    path = last_path(driver)
    whole = path.tokens_from_slab + C * path.blocks_from_pool
    assert whole + path.tokens_from_partial == path.reused_tokens
    return path.tokens_from_slab, path.blocks_from_slab, path.blocks_from_pool


def partly(driver: Driver) -> tuple[str | None, int]:
    """The block that the last decision matches in part, and how many tokens of it."""
    path = last_path(driver)
    return path.partial_key, path.tokens_from_partial


def asked(driver: Driver, *parts: tuple[str, tuple[int, ...]], **how: Any) -> tuple[int, int, int]:
    """What a request reuses; it is served to its end."""
    driver.serve(talk(*parts), **how)
    return reused(driver)


def test_a_session_keeps_prompt_and_answer():
    """It settles to the last token, and the next turn computes what is new."""
    driver = driver_of()
    sequence = (*rendered((HELLO,)), *SAID[1])
    session = served(driver)
    assert 0 < len(sequence) % C
    assert (len(sequence), len(sequence)) == (session.cached_tokens, session.canonical_tokens)
    assert len(sequence) // C == len(session.slab_keys)

    assert (len(sequence), len(sequence) // C, 0) == asked(driver, HELLO, SAID, MORE)
    last = [r.event for r in driver.recorded if isinstance(r.event, ev.CacheExtended)]
    first = next(event for event in last if event.request == "r2")
    assert len(sequence) == first.start


def test_the_grain_c_keeps_full_blocks():
    """The control: with the grain C, rows of a block that is not full are computed again."""
    driver = driver_of(any_cut=False)
    session = served(driver)
    blocks = (len(rendered((HELLO,))) + 3) // C
    assert (blocks * C, blocks) == (session.cached_tokens, len(session.slab_keys))
    assert (blocks * C, blocks, 0) == asked(driver, HELLO, SAID, MORE)


def test_a_short_chat_reuses_what_there_is():
    """A prompt that fills no block is reused as far as it goes."""
    driver = driver_of()
    driver.serve(talk(("user", ())), answer=(50,))
    assert (C - 1, 0, 0) == asked(driver, ("user", ()), ("assistant", (50,)), MORE)
    assert None is last_path(driver).reason


def test_the_same_again_computes_its_last_token():
    """Its logits are needed."""
    driver = driver_of()
    driver.ask(talk(HELLO))
    while driver.state.session("s1").state != "decoding":
        driver.step("s1")
    driver.cancelled.add("s1")
    driver.finish("s1")
    prompt = len(rendered((HELLO,)))
    assert (prompt - 1, (prompt - 1) // C, 0) == asked(driver, HELLO)


@pytest.mark.parametrize("same", range(1, 2 * C))
def test_a_prompt_that_differs_within_a_block_keeps_its_first_rows(same: int):
    """All rows before the first token that differs are kept, in whatever block that is."""
    driver = driver_of()
    served(driver)
    other = ("user", (*HELLO[1][:same], 99, *HELLO[1][same + 1 :]))
    asked(driver, HELLO, SAID, MORE)
    driver.serve(talk(other, name="s1x"))  # another session: of the last block, its first rows
    assert (0, 0, (1 + same) // C) == reused(driver)
    assert (1 + same) % C == partly(driver)[1] or (1 + same) % C == 1

    driver = driver_of()
    driver.serve(talk(HELLO, name="n"), answer=SAID[1])
    driver.serve(talk(other, name="n"))
    assert (1 + same, (1 + same) // C, 0) == reused(driver)

    driver = driver_of(any_cut=False)
    driver.serve(talk(HELLO, name="n"), answer=SAID[1])
    driver.serve(talk(other, name="n"))
    assert ((1 + same) // C * C, (1 + same) // C, 0) == reused(driver)


def test_blocks_from_the_pool_take_the_place_of_rows():
    """A slab has a few rows of a block that the pool has whole: the block is copied."""
    driver = driver_of()
    served(driver)
    short = ("user", HELLO[1][: C + 1])
    driver.serve(talk(short, name="n"), answer=(7,))
    assert len(rendered((short,))) + 1 == driver.state.session("n").cached_tokens
    driver.serve(talk(HELLO, SAID, MORE, name="n"))
    assert (C, 1) == reused(driver)[:2]
    assert 0 < reused(driver)[2]


def test_nothing_of_a_quarantined_block():
    """Neither the rows of a full block that is quarantined, nor what comes after it."""
    driver = driver_of()
    session = served(driver)
    blocks = driver.state.blocks
    for place, tokens in ((0, 0), (1, C), (len(session.slab_keys) - 1, 2 * C)):
        key = session.slab_keys[place]
        bad = blocks.set(key, attrs.evolve(blocks[key], bug_id="b"))
        state = attrs.evolve(driver.state, blocks=bad)
        ids = (*rendered((HELLO,)), 99)
        reuse = paths.reusable_prewarm(state, session, ids, driver.keys("t1", ids))
        assert tokens == reuse.tokens


def test_a_full_block_that_was_not_sealed_is_not_kept():
    """It is quarantined, or too short to be cached."""
    driver = driver_of()
    session = attrs.evolve(served(driver), slab_keys=())
    assert 2 * C < session.canonical_tokens
    assert 0 == paths.canonical_end(driver.state, session)
    ids = rendered((HELLO,))
    keys = driver.keys("t1", ids)
    third = driver.state.session("s1").slab_keys[2]
    assert Reuse(0, 0, 2, third, 2) == paths.reusable_prewarm(driver.state, session, ids, keys)
    assert Reuse(0, 0, 0, keys[0], C - 1) == paths.reusable_prewarm(driver.state, session, ids, ())

    driver = driver_of(min_cache_tokens=100)
    session = served(driver)
    assert ((), 0, 0) == (session.slab_keys, session.cached_tokens, session.canonical_tokens)
    assert (0, 0, 0) == asked(driver, HELLO, SAID, MORE)


def test_too_short_to_be_cached_is_not_reused():
    """
    A sequence below the minimum reuses no row of its slab; of a block that a longer one cached, it
    does.
    """
    driver = driver_of()
    session = served(driver)
    ids = rendered((HELLO,))[: C - 1]
    kept = Reuse(C - 1)
    for least, due in ((0, kept), (C - 1, kept), (C, Reuse(0, 0, 0, session.slab_keys[0], C - 1))):
        assert driver.state.model is not None
        model = attrs.evolve(driver.state.model, min_cache_tokens=least)
        state = attrs.evolve(driver.state, model=model)
        assert due == paths.reusable_prewarm(state, session, ids, ())
        nothing = attrs.evolve(state, children=Map())
        assert Reuse(due.tokens) == paths.reusable_prewarm(nothing, session, ids, ())


def test_a_slab_that_is_too_small_is_not_reused():
    """It will be replaced."""
    driver = driver_of(spare_tokens=0)
    session = served(driver)
    assert session.slab is not None
    request = driver.ask(talk(HELLO, SAID, MORE), room=session.slab.capacity_tokens)
    assert request is not None
    assert 0 == reused(driver)[0]


def test_prewarmed_rows_count_once():
    """The rows that a prewarm computed count as prewarmed when a request reuses them first."""
    driver = driver_of()
    driver.foresees = True
    driver.serve(talk(HELLO), answer=(90, 50, 51))  # the thought is left out of the next prompt
    computed = [r.event for r in driver.recorded if isinstance(r.event, ev.PrewarmFinished)]
    session = driver.state.session("s1")
    due = session.cached_tokens - len(rendered((HELLO,)))
    assert [due] == [event.computed_tokens for event in computed]
    assert 0 < session.prewarmed_rows < C

    driver.ask(talk(HELLO, ("assistant", (90, 50, 51)), MORE))
    assert due == last_path(driver).prewarmed_tokens
    assert session.cached_tokens == last_path(driver).tokens_from_slab
    assert 0 == driver.state.session("s1").prewarmed_rows
    assert {0} == {block.prewarmed for block in driver.state.blocks.values()}
    driver.finish("s1")


def test_a_base_keeps_no_ids_of_a_slab():
    """Without them a session reuses whole blocks."""
    driver = driver_of()
    session = served(driver)
    kept = state_of(base_of(forgotten(driver.state, NeededIds()), "h")).session("s1")
    assert (session.slab_keys, session.canonical_tokens) == (kept.slab_keys, kept.canonical_tokens)
    assert ((), ()) != (session.slab_ids, kept.slab_ids)
    assert () == kept.slab_ids
    ids = (*rendered((HELLO,)), *SAID[1])
    for held, tokens in ((session, len(ids)), (kept, len(ids) // C * C)):
        reuse = paths.reusable_prewarm(driver.state, held, ids, driver.keys("t1", ids))
        assert Reuse(tokens, len(ids) // C) == reuse


# --- what is found ------------------------------------------------------------------------------


def broken(driver: Driver, step: Callable[[], object]) -> tuple[str, str]:
    """The invariant that a step breaks, and the message."""
    with pytest.raises(Violated) as caught:
        step()
    bug = caught.value.outcome.bug
    assert bug is not None
    return bug.invariant, bug.message


def settled_to(driver: Driver, ids: tuple[int, ...], start: int, end: int) -> ev.CacheExtended:
    """A settling pass over tokens of a sequence."""
    return ev.CacheExtended(
        session="s1",
        request=None,
        step="settle",
        start=start,
        end=end,
        input_hash=ids_hash(ids[start:end]),
        coverage=((LAYERS, 0, end),),
        sampled=(),
        logprobs=(),
        duration_us=1,
    )


def settling(driver: Driver) -> tuple[int, ...]:
    """Bring a session to the end of an answer, and its slab to the prompt. Returns the sequence."""
    driver.ask(talk(HELLO), answer=SAID[1])
    while driver.state.session("s1").state != "settling":
        driver.step("s1")
    prompt = rendered((HELLO,))
    driver.trim("s1", len(prompt), "provisional")
    return (*prompt, *SAID[1])


def prefilled(driver: Driver, start: int, end: int) -> ev.CacheExtended:
    """A prefill pass over tokens of the current prompt."""
    held = driver.state.session("s1").request
    assert held is not None
    return attrs.evolve(
        settled_to(driver, held.prompt_ids, start, end),
        request="r1",
        step="prefill",
        sampled=(5,) if end == len(held.prompt_ids) else (),
        logprobs=(-0.5,) if end == len(held.prompt_ids) else (),
    )


@pytest.mark.parametrize(
    ("any_cut", "end", "fine"),
    [
        (True, C, True),
        (True, 2 * C, True),
        (True, 2 * C + 2, True),  # the whole prompt
        (True, C - 1, False),
        (True, C + 1, False),
        (True, 3 * C, False),
        (False, C, True),
        (False, 2 * C, False),
        (False, 2 * C + 2, False),
    ],
)
def test_a_prefill_pass_ends_with_a_block_or_the_prompt(any_cut: bool, end: int, fine: bool):
    """With the grain 1 it may compute several blocks; with the grain C it has one."""
    driver = driver_of(any_cut=any_cut)
    driver.ask(talk(HELLO))
    while driver.state.session("s1").slab is None:
        driver.step("s1")
    assert 2 * C + 2 == len(rendered((HELLO,)))
    event = prefilled(driver, 0, end)
    if fine:
        driver.propose(event)
    else:
        assert "INV-1" == broken(driver, lambda: driver.propose(event))[0]


def test_a_block_that_the_slab_does_not_have_is_not_sealed():
    """With the grain 1 a block may end before the slab does, but not after it."""
    driver = driver_of()
    served(driver)
    sealed = [r.event for r in driver.recorded if isinstance(r.event, ev.BlockSealed)][-1]
    driver = driver_of()
    settling(driver)
    event = attrs.evolve(sealed, start=sealed.start + C, end=sealed.end + C, key="k" * 64)
    words = "a sealed block that the slab does not have, or has no longer as its last"
    assert ("INV-1", words) == broken(driver, lambda: driver.propose(event))


def test_a_settling_pass_ends_with_the_block_or_the_tokens():
    """A pass that stops before, or crosses the end of a block, breaks INV-1."""
    for end in (-1, 1):
        driver = driver_of()
        ids = settling(driver)
        start = driver.state.session("s1").cached_tokens
        due = min(start - start % C + C, len(ids))
        event = settled_to(driver, (*ids, 1), start, due + end)
        words = "a pass of another shape than the schedule's"
        found = broken(driver, partial(driver.propose, event))
        assert ("INV-1", words) == found or "past the tokens" in found[1]


def test_a_pass_continues_rows_of_its_own_tokens():
    """The slab was not cut back to what the prewarm reuses of a block: INV-1."""
    driver = driver_of()
    ids = settling(driver)
    prompt = len(rendered((HELLO,)))
    other = (*ids[: prompt - 1], 98, 99, 99)
    held = driver.state.session("s1")
    reuse = paths.reusable_prewarm(driver.state, held, other, driver.keys("t1", other))
    assert Reuse(prompt - 1, (prompt - 1) // C) == reuse
    driver.propose(
        ev.PrewarmStarted(
            session="s1",
            next_role="user",
            rules_version=RULES_VERSION,
            tokens=len(other),
            base_tokens=prompt - 1,
            new_ids=other[prompt - 1 :],
            base_keys=reuse.blocks,
            new_keys=driver.keys("t1", other)[reuse.blocks :],
            tokens_from_slab=reuse.tokens,
            blocks_from_slab=reuse.blocks,
            blocks_from_pool=0,
            partial_key=None,
            tokens_from_partial=0,
        )
    )
    end = min(prompt - prompt % C + C, len(other))
    event = settled_to(driver, other, prompt, end)
    assert ("INV-1", "a pass on rows of other tokens") == broken(
        driver, lambda: driver.propose(event)
    )


@pytest.mark.parametrize("more", [-1, 1])
def test_other_reuse_than_the_rules_give(more: int):
    """A decision with a token more or less from the slab breaks INV-4."""
    driver = driver_of()
    served(driver)
    driver.damage = lambda event: (
        attrs.evolve(
            event,
            tokens_from_slab=event.tokens_from_slab + more,
            reused_tokens=event.reused_tokens + more,
        )
        if isinstance(event, ev.PathSelected)
        else event
    )
    found = broken(driver, lambda: driver.serve(talk(HELLO, SAID, MORE)))
    assert ("INV-4", "another decision") == found


def test_a_session_settles_at_its_canonical_rows():
    """Rows that decoding added are not canonical: INV-1."""
    driver = driver_of()
    driver.ask(talk(HELLO), answer=SAID[1])
    while driver.state.session("s1").canonical_tokens == driver.state.session("s1").cached_tokens:
        driver.step("s1")
    driver.propose(ev.RequestCancelled(session="s1", request="r1", stage="decode"))
    held = driver.state.session("s1")
    event = ev.SessionSettled(session="s1", canonical_tokens=held.cached_tokens, complete=True)
    assert ("INV-1", "settled with KV that is not canonical") == broken(
        driver, lambda: driver.propose(event)
    )


def checked(**changes: Any) -> Callable[[ev.Event], ev.Event]:
    """Changes the event of a row that was computed again."""
    return lambda event: (
        attrs.evolve(event, **changes) if isinstance(event, ev.RowChecked) else event
    )


def test_the_last_row_of_a_slab_is_computed_again():
    """The first pass of a continuation does that, once, and no other pass does."""
    driver = driver_of()
    session = served(driver)
    driver.serve(talk(HELLO, SAID, MORE))
    rows = [r.event for r in driver.recorded if isinstance(r.event, ev.RowChecked)]
    assert [("r2", session.cached_tokens - 1)] == [(one.request, one.row) for one in rows]


def test_a_row_that_is_another_now_quarantines_the_session():
    """INV-3: what the slab has cannot be trusted. Blocks in the pool have digests of their own."""
    driver = driver_of()
    keys = served(driver).slab_keys
    driver.damage = checked(digest="0" * 16)
    found = broken(driver, lambda: driver.serve(talk(HELLO, SAID, MORE)))
    row = driver.state.session("s1").cached_tokens - 1
    assert ("INV-3", f"row {row} of the slab computed again is another") == found
    assert "quarantined" == driver.state.session("s1").state
    assert all(driver.state.blocks[key].usable for key in keys)
    driver.damage = lambda event: event
    driver.serve(talk(HELLO, SAID, MORE))
    assert ("new_session", "quarantined") == (last_path(driver).path, last_path(driver).reason)
    assert len(keys) == last_path(driver).blocks_from_pool


def test_another_row_than_was_due():
    """INV-1."""
    driver = driver_of()
    served(driver)
    driver.damage = checked(row=1)
    assert ("INV-1", "another row was computed again than was due") == broken(
        driver, lambda: driver.serve(talk(HELLO, SAID, MORE))
    )


def test_a_continuation_without_the_check():
    """INV-1: its first pass has to compute the row."""
    driver = driver_of()
    served(driver)
    driver.check_row = lambda *_: None  # type: ignore[method-assign]  # left out
    assert ("INV-1", "the last row was not computed again, or was") == broken(
        driver, lambda: driver.serve(talk(HELLO, SAID, MORE))
    )


def test_a_row_is_checked_once():
    """A second check before the first pass is not due."""
    driver = driver_of()
    served(driver)
    check_row = driver.check_row

    def twice(*how: Any) -> None:
        check_row(*how)
        check_row(*how)

    driver.check_row = twice  # type: ignore[method-assign,assignment]  # done twice
    assert ("INV-1", "another row was computed again than was due") == broken(
        driver, lambda: driver.serve(talk(HELLO, SAID, MORE))
    )


LONG = range(10, 10 + 3 * C)


@pytest.mark.parametrize(
    "other",
    [(*LONG[: C - 1], *range(70, 70 + 2 * C + 1)), (*LONG[: C + 1], 70, *LONG[C + 2 :])],
    ids=["from the second block on", "only in the second block"],
)
@pytest.mark.parametrize("any_cut", [True, False])
def test_a_pass_continues_blocks_of_its_own_tokens(any_cut: bool, other: tuple[int, ...]):
    """
    A slab is cut back to all that a request reuses, and the blocks from the pool are not copied: it
    ends where it should, with a block of other tokens. INV-1 finds that; nothing is sealed on it.
    """
    driver = driver_of(any_cut=any_cut)
    mine = ("user", tuple(LONG))
    driver.serve(talk(mine))
    driver.serve(talk(("user", other), name="n"))
    cut_back = driver.trim

    def too_little(session: str, end: int, reason: str) -> None:
        cut_back(session, last_path(driver).reused_tokens, reason)

    driver.trim = too_little  # type: ignore[method-assign]  # the fault
    driver.share = lambda *_: None  # type: ignore[method-assign]  # likewise
    found = broken(driver, lambda: driver.serve(talk(mine, SAID, MORE, name="n")))
    assert C == last_path(driver).tokens_from_slab
    assert last_path(driver).blocks_from_pool > 1
    assert ("INV-1", "a pass on rows of other tokens") == found
