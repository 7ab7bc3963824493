"""
The JSON objects of sessions, the cache and bugs, as they are sent. Times are microseconds since
1970.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from cairn.actors.looking import BugView, CacheView, SessionView, TurnView, Where
from cairn.actors.requests.messages import ForgottenSession
from cairn.http.health import BlocksObject, PoolObject
from cairn.http.wire.sent import Sent
from cairn.journal.explanations import Habit
from cairn.journal.tenants import session_name, session_tenant


class ClosedSession(Sent, kw_only=True):
    """The name of a session that is closed."""

    id: str
    object: Literal["cairn.session.closed"] = "cairn.session.closed"
    closed: Literal[True] = True


class ForgottenSessionObject(Sent, kw_only=True):
    """
    A session whose texts cannot be read any more.

    Attributes:
        rows: how many rows of the journal had its texts; 0 if it was forgotten before.
        blocks_removed: how many blocks only it had.
        same_text: the other sessions that have the same beginning, or quote a few words of it, and
            keep that.
        still_readable: where texts or token ids of it can be read all the same, a phrase each.
    """

    id: str
    object: Literal["cairn.session.forgotten"] = "cairn.session.forgotten"
    forgotten: Literal[True] = True
    rows: int
    blocks_removed: int
    same_text: list[str]
    still_readable: list[str]


class KvObject(Sent):
    """
    Where the KV of a session is that could be used now.

    Attributes:
        where: where most of it is.
        slab_tokens: in the session's slab.
        memory_tokens: in sealed blocks in memory.
        disk_tokens: in files alone.
    """

    where: Where
    slab_tokens: int
    memory_tokens: int
    disk_tokens: int


class SessionObject(Sent, kw_only=True):
    """
    A session.

    Attributes:
        client: the program that sent its last request, by its own word; null if it gave no name.
        words: the first words of the conversation; absent if the caller may not see texts.
        state: a state of the life of a session, or ``closed``.
        context_tokens: of its last prompt and answer.
        context_max: the most that its model can hold, if that is loaded.
        went_on: the session in which its conversation went on, if a later request that was to
            continue this one got a session of its own.
        position: the row of its last request, by which pages continue.
    """

    id: str
    object: Literal["cairn.session"] = "cairn.session"
    tenant: str
    group: str | None
    named: bool
    model: str
    protocol: str
    client: str | None
    words: str | UnsetType = UNSET
    state: str
    turns: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    context_tokens: int
    context_max: int | None
    kv: KvObject
    went_on: str | None
    opened_us: int
    used_us: int
    expires_us: int | None
    closed: str | None
    forgotten: bool
    bugs: list[str]
    quarantined_by: str | None
    position: int


class SessionPage(Sent, kw_only=True):
    """Sessions, the most recently used first. ``before`` asks for the next page."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    has_more: bool
    before: int | None


class BarObject(Sent):
    """The tokens of a turn: a prompt is what was reused, by where it was, and what was computed."""

    prompt: int
    from_slab: int
    from_blocks: int
    from_partial: int
    prewarmed: int
    computed: int
    generated: int


class TurnRows(Sent):
    """The rows of a turn in the journal; 0 if there is none."""

    received: int
    selected: int
    ended: int


class TurnObject(Sent, kw_only=True):
    """
    A turn of a session.

    Attributes:
        words: the first words of what was asked; absent if the caller may not see texts.
        first_token_us: when its first token was drawn.
        end: how it ended; null while it goes on.
        explanation: what was reused and why not more, in words.
        nearest: the session that it was compared with, if that is another one.
        habit: the habit of the client that was recognised.
        was, now: the text that differs, in the nearest conversation and in this prompt.
        gone_row: if blocks that it could have reused were gone: the last row that took blocks away
            since then; null if none is known.
        damaged: why its rows cannot be read.
    """

    number: int
    request: str | None
    words: str | UnsetType = UNSET
    received_us: int
    first_token_us: int | None
    ended_us: int | None
    tokens: BarObject
    path: Literal["continuation", "new_session"] | None
    reason: str | None
    diverged_part: str | None
    explanation: str | None
    nearest: str | None
    habit: Habit | None
    was: str | None
    now: str | None
    end: str | None
    gone_row: int | None
    rows: TurnRows
    damaged: str | UnsetType = UNSET


class SessionDetails(Sent, kw_only=True):
    """A session and its last turns, the last one first. ``before`` asks for the next page."""

    session: SessionObject
    turns: list[TurnObject]
    has_more: bool
    before: int | None


class EventObject(Sent, kw_only=True):
    """
    A row of the journal.

    Attributes:
        payload: the public fields of its event.
        private: its texts and token ids; absent unless they were asked for, null if it has none or
            they cannot be read.
    """

    position: int
    seq: int
    kind: str
    version: int
    time_us: int
    event_id: str
    previous_hash: str
    hash: str
    payload: dict[str, Any]
    private: dict[str, Any] | UnsetType | None = UNSET


class EventPage(Sent, kw_only=True):
    """Rows of a session in order. ``after`` asks for the next page."""

    object: Literal["list"] = "list"
    data: list[EventObject]
    has_more: bool
    after: int | None


class SessionCache(Sent):
    """
    What a session has in the cache, in bytes.

    Attributes:
        shared_bytes: of its blocks in memory, those that another listed session has, too.
    """

    session: str
    slab_bytes: int
    memory_bytes: int
    disk_bytes: int
    shared_bytes: int


class RemovedBlock(Sent):
    """A block that left memory (``block_evicted``) or the disk (``block_file_removed``)."""

    position: int
    time_us: int
    kind: str
    reason: str
    bytes: int


class CacheObject(Sent, kw_only=True):
    """
    The cache. What all tenants have a part in is left out for a caller that may not know of them.
    """

    object: Literal["cairn.cache"] = "cairn.cache"
    sessions: list[SessionCache]
    pool: PoolObject | UnsetType = UNSET
    blocks: BlocksObject | UnsetType = UNSET
    removed: list[RemovedBlock] | UnsetType = UNSET


class BugObject(Sent, kw_only=True):
    """
    A violation on record.

    Attributes:
        expected, actual: absent if the caller may not see texts.
        position: the row that recorded it; ``at_position`` is the row that broke the invariant.
        replay: the command that shows it again.
        meaning: the page that says what it means.
    """

    id: str
    object: Literal["cairn.bug"] = "cairn.bug"
    invariant: str
    message: str
    session: str | None
    request: str | None
    position: int
    at_position: int
    time_us: int | None
    expected: str | UnsetType = UNSET
    actual: str | UnsetType = UNSET
    replay: str
    meaning: str


class BugPage(Sent, kw_only=True):
    """Bugs, the last one first. ``before`` asks for the next page."""

    object: Literal["list"] = "list"
    data: list[BugObject]
    has_more: bool
    before: int | None


def shown_name(session: str, tenant: str, caller: str) -> str:
    """The id of a session as the caller names it: within its own tenant by its name."""
    return session_name(session) if tenant == caller else session


def forgotten_object(found: ForgottenSession, caller: str) -> ForgottenSessionObject:
    """The result of forgetting a session, with names as the caller has them."""
    tenant = session_tenant(found.session)
    return ForgottenSessionObject(
        id=shown_name(found.session, tenant, caller),
        rows=found.rows,
        blocks_removed=found.blocks,
        same_text=[shown_name(one, session_tenant(one), caller) for one in found.same_text],
        still_readable=list(found.still_readable),
    )


def session_object(view: SessionView, caller: str, *, words: bool) -> SessionObject:
    """
    Args:
        words: whether the caller is shown texts.
    """
    of = view.summary
    return SessionObject(
        id=shown_name(of.id, of.tenant, caller),
        tenant=of.tenant,
        group=of.group,
        named=of.named,
        model=of.model,
        protocol=of.protocol,
        client=of.client,
        words=of.words if words else UNSET,
        state=view.state,
        turns=view.turns,
        prompt_tokens=of.prompt,
        reused_tokens=of.reused,
        generated_tokens=of.generated,
        context_tokens=of.context,
        context_max=view.context_tokens,
        kv=KvObject(view.where, view.slab_tokens, view.memory_tokens, view.disk_tokens),
        went_on=view.went_on and shown_name(view.went_on, of.tenant, caller),
        opened_us=of.opened_us,
        used_us=of.used_us,
        expires_us=view.expires_us,
        closed=of.closed,
        forgotten=of.forgotten,
        bugs=list(of.bugs),
        quarantined_by=view.bug_id,
        position=of.used,
    )


def turn_object(view: TurnView, caller: str) -> TurnObject:
    of, why, nearest = view.counts, view.explanation, view.nearest
    return TurnObject(
        number=view.number,
        request=view.request,
        words=UNSET if view.words is None else view.words,
        received_us=of.received_us,
        first_token_us=of.first_us or None,
        ended_us=of.ended_us or None,
        tokens=BarObject(
            prompt=of.prompt,
            from_slab=of.from_slab,
            from_blocks=of.from_blocks,
            from_partial=of.from_partial,
            prewarmed=of.prewarmed,
            computed=of.computed,
            generated=of.generated,
        ),
        path=view.path,
        reason=view.reason,
        diverged_part=view.diverged_part,
        explanation=why.text if why is not None else None,
        nearest=nearest and shown_name(nearest, session_tenant(nearest), caller),
        habit=why.habit if why is not None else None,
        was=why.was if why is not None else None,
        now=why.now if why is not None else None,
        end=view.end,
        gone_row=(of.expired if view.reason == "expired" else max(of.evicted, of.lost)) or None,
        rows=TurnRows(of.received, of.selected, of.ended),
        damaged=UNSET if view.damaged is None else view.damaged,
    )


def cache_object(view: CacheView, names: dict[str, str]) -> CacheObject:
    """
    Args:
        names: the ids of sessions, as the caller names them.
    """
    found = CacheObject(
        sessions=[
            SessionCache(
                session=names[one.session],
                slab_bytes=one.slab_bytes,
                memory_bytes=one.memory_bytes,
                disk_bytes=one.disk_bytes,
                shared_bytes=one.shared_bytes,
            )
            for one in view.sessions
        ]
    )
    if view.removed is not None:
        found.removed = [
            RemovedBlock(one.row, one.time_us, one.kind, one.reason, one.bytes)
            for one in view.removed
        ]
    return found


def bug_object(view: BugView, session: str | None) -> BugObject:
    """
    Args:
        session: the session, as the caller names it.
    """
    event = view.fault.event
    return BugObject(
        id=view.bug_id,
        invariant=event.invariant,
        message=event.message,
        session=session,
        request=event.request,
        position=view.fault.position,
        at_position=event.at_position,
        time_us=view.time_us,
        expected=UNSET if view.expected is None else view.expected,
        actual=UNSET if view.actual is None else view.actual,
        replay=f"ops replay {view.bug_id}",
        meaning=f"docs/bugs/{event.invariant}.md",
    )
