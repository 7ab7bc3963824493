"""INV-4: requests, decisions and prewarms."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from cairn.journal import events as ev
from cairn.journal import paths
from cairn.journal.cache.adoption import may_adopt
from cairn.journal.invariants.sentences import Violation, broken
from cairn.journal.lifecycle import SessionState
from cairn.journal.state import State, opened_request, prewarmed


def opened(state: State, event: ev.SessionOpened) -> Iterator[Violation]:
    model = state.model
    if model is not None and event.fingerprint != model.fingerprint:
        due = model.fingerprint
        yield broken("INV-4", "a session for another model", due, event.fingerprint)


def declined(state: State, event: ev.AdoptionDeclined) -> Iterator[Violation]:
    rates = state.rates
    due = (rates.prefill_tokens, rates.prefill_us, rates.adopted_tokens, rates.adopted_us)
    said = (event.prefill_tokens, event.prefill_us, event.adopted_tokens, event.adopted_us)
    if said != due:
        yield broken("INV-4", "other rates than were measured", due, said)
    if may_adopt(rates) or not event.blocks:
        yield broken("INV-4", "blocks declined that were to be adopted", due, event.blocks)


def received(state: State, event: ev.RequestReceived) -> Iterator[Violation]:
    session = state.session(event.session)
    last = session.last
    model = state.model
    if model is None or model.fingerprint != event.fingerprint:
        loaded = model.fingerprint if model is not None else None
        yield broken("INV-4", "a request for another model", loaded, event.fingerprint)
        return
    if event.tenant != session.tenant:
        yield broken("INV-4", "another tenant's session", session.tenant, event.tenant)
    base = last.request if last is not None else None
    if event.base_request not in (None, base):
        yield broken("INV-4", "a prompt built on another request", base, event.base_request)
    if event.base_request is None and (event.base_tokens or event.base_parts or event.base_keys):
        yield broken("INV-4", "a prompt built on nothing", 0, event.base_tokens)
    if last is not None and event.base_parts > len(last.chain):
        yield broken(
            "INV-4", "more base parts than the last request had", len(last.chain), event.base_parts
        )
    same_model = last is not None and last.fingerprint == event.fingerprint
    keepable = event.base_tokens // model.block_tokens if same_model else 0
    if event.base_keys > keepable:
        yield broken(
            "INV-4", "base keys of tokens that are not base tokens", keepable, event.base_keys
        )
    if last is not None and event.base_tokens > len(last.prompt_ids):
        most = len(last.prompt_ids)
        yield broken("INV-4", "more base tokens than the prompt had", most, event.base_tokens)
    request = opened_request(session, event)
    if len(request.prompt_ids) != event.prompt_tokens:
        yield broken("INV-4", "another prompt", len(request.prompt_ids), event.prompt_tokens)
    keys = event.prompt_tokens // model.block_tokens
    if len(request.prompt_keys) != keys:
        yield broken(
            "INV-4",
            "the number of keys is not the number of blocks",
            keys,
            len(request.prompt_keys),
        )
    if state.admission_bug is not None:
        yield broken("INV-5", "admission is closed", state.admission_bug, event.request)
    chosen = paths.choose_session(state, paths.ask_of(event, request.chain))
    unnamed = event.session_name is None  # a session that is named exists by then
    if unnamed and session.named:
        yield broken("INV-4", "a named session serves a request of no name", session.id, None)
    fresh = unnamed and session.last is None and session.state is SessionState.COLD
    if chosen != session.id and not (chosen is None and fresh):
        yield broken("INV-4", "another session serves than the rules choose", chosen, session.id)


def decided(state: State, event: ev.PrefixJoined | ev.PathSelected) -> Iterator[Violation]:
    session = state.session(event.session)
    assert session.request is not None
    if event.rules_version != paths.RULES_VERSION:
        yield broken("INV-4", "unknown rules", paths.RULES_VERSION, event.rules_version)
        return
    if event.decided_at != state.position:
        yield broken("INV-4", "decided on another state", state.position, event.decided_at)
    if paths.waits(state, session):
        joined = session.request.joined
        yield broken("INV-4", "decided during a wait for another request", joined, event.kind)
        return
    decided = paths.decide(state, session, session.request)
    of = paths.Join if isinstance(event, ev.PrefixJoined) else paths.Decision
    recorded = {field.name: getattr(event, field.name) for field in attrs.fields(of)}
    if not isinstance(decided, of) or attrs.asdict(decided) != recorded:
        yield broken("INV-4", "another decision", attrs.asdict(decided), recorded)


def prewarm_started(state: State, event: ev.PrewarmStarted) -> Iterator[Violation]:
    session = state.session(event.session)
    last, chunk = session.last, state.model.block_tokens if state.model else 1
    if last is None or not last.answered or session.slab is None or session.request is not None:
        yield broken(
            "INV-4", "a prewarm without an answer and a slab", "answer and slab", session.state
        )
        return
    if event.rules_version != paths.RULES_VERSION:
        yield broken("INV-4", "unknown rules", paths.RULES_VERSION, event.rules_version)
        return
    prewarm = prewarmed(last, event)
    grain = state.model.grain if state.model else 1
    made, due = (len(prewarm.ids), len(prewarm.keys)), (event.tokens, event.tokens // chunk)
    if made != due or event.tokens % grain:
        yield broken("INV-4", "a prewarm of other tokens than recorded", due, made)
    if event.base_tokens > len(last.sequence):
        most = len(last.sequence)
        yield broken("INV-4", "more base tokens than the turn had", most, event.base_tokens)
    # Base keys must cover base tokens only, and those of the prompt only.
    keepable = min(event.base_tokens, len(last.prompt_ids)) // chunk
    if event.base_keys > keepable:
        yield broken(
            "INV-4", "base keys of tokens that are not base tokens", keepable, event.base_keys
        )
    if event.tokens > session.slab.capacity_tokens:
        room = session.slab.capacity_tokens
        yield broken("INV-4", "a prewarm longer than the slab", room, event.tokens)
    decided = paths.reusable_prewarm(state, session, prewarm.ids, prewarm.keys)
    recorded = paths.Reuse(
        event.tokens_from_slab,
        event.blocks_from_slab,
        event.blocks_from_pool,
        event.partial_key,
        event.tokens_from_partial,
    )
    if decided != recorded:
        yield broken("INV-4", "other reuse for a prewarm than the rules give", decided, recorded)


def prewarm_ended(
    state: State, event: ev.PrewarmFinished | ev.PrewarmAbandoned
) -> Iterator[Violation]:
    session = state.session(event.session)
    prewarm, cached = session.prewarm, session.cached_tokens
    computed = prewarm.computed_tokens if prewarm is not None else 0
    if event.computed_tokens != computed:
        yield broken("INV-1", "other prewarm passes than recorded", computed, event.computed_tokens)
    if isinstance(event, ev.PrewarmFinished) and prewarm is not None:
        due, found = len(prewarm.ids), (event.tokens, cached)
        if found != (due, due):
            yield broken("INV-1", "a prewarm finished before all of it was computed", due, found)
