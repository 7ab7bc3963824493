"""The answer of ``/health``: whether the server is well, and how full it is."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from cairn.actors.errors import StillStarting
from cairn.actors.requests.messages import Statistics
from cairn.http.service import Server, Service
from cairn.http.wire.sent import Sent
from cairn.journal.events import StallReason

_CONTEXTS_MAX = 10

Status = Literal["ok", "degraded", "admission_closed", "journal_stalled"]


class ContextUseObject(Sent):
    """How much of the context a conversation has filled."""

    session: str
    tokens: int
    left: int


class ServedModel(Sent):
    """A model, and how many requests wait for it."""

    name: str
    state: Literal["loaded", "loading", "not_loaded"]
    waiting: int | UnsetType = UNSET


class QueueObject(Sent):
    """The requests that wait and those that run."""

    queued: int
    running: int


class PoolObject(Sent):
    """The slabs in use, and the room for slabs."""

    slabs: int
    slabs_total: int
    bytes: int
    bytes_total: int


class BlocksObject(Sent):
    """The sealed blocks in memory and on disk."""

    count: int
    bytes: int
    bytes_total: int
    disk_count: int
    disk_bytes: int
    disk_bytes_total: int


class MemoryObject(Sent):
    """Bytes of memory, by use."""

    kv_live_bytes: int
    kv_expected_bytes: int
    weights_bytes: int
    active_bytes: int
    cache_bytes: int


class Health(Sent, kw_only=True):
    """
    The state of the server. What other tenants have a part in is left out for a caller that may not
    know of them.
    """

    status: Status
    model: str
    fingerprint: str
    node: str | UnsetType = UNSET
    context_tokens: int
    block_tokens: int
    contexts: list[ContextUseObject]
    models: list[ServedModel]
    started: int
    sessions: dict[str, int] | UnsetType = UNSET
    queue: QueueObject | UnsetType = UNSET
    pool: PoolObject | UnsetType = UNSET
    blocks: BlocksObject | UnsetType = UNSET
    memory: MemoryObject | UnsetType = UNSET
    journal_position: int | UnsetType = UNSET
    journal_head: str | UnsetType = UNSET
    journal_checkpoint: str | UnsetType = UNSET
    journal_stall: StallReason | None
    bugs: int | UnsetType = UNSET
    degraded: dict[str, str] | UnsetType = UNSET
    admission_bug: str | None


class StartingHealth(Sent):
    """
    How far the start of the server has come.

    Attributes:
        step: what it does now.
        done, total: how much of that it has done, in units of its own; 0 of 0 if that is not known.
    """

    status: Literal["starting"]
    step: str
    done: int
    total: int


class HealthWithoutKey(Sent, kw_only=True):
    """All that a caller without an API key is shown."""

    status: Status | Literal["starting"]
    api_key: Literal["required"] = "required"


def health(
    server: Server, service: Service | None, *, of_all: bool = True
) -> Health | HealthWithoutKey:
    """
    Args:
        service: as the caller sees the server; None for a caller without a key, who is shown the
            status alone.
        of_all: whether the caller may see figures in which other tenants have a part.
    """
    facts, now = server.facts, server.statistics()
    status = _status(now)
    if service is None:
        return HealthWithoutKey(status=status)
    found = Health(
        status=status,
        model=facts.model,
        fingerprint=facts.fingerprint,
        node=UNSET if facts.node is None else facts.node,
        context_tokens=facts.context_tokens,
        block_tokens=facts.block_tokens,
        contexts=[
            ContextUseObject(session=one.session, tokens=one.tokens, left=one.left)
            for one in service.contexts(_CONTEXTS_MAX)
        ],
        models=[
            ServedModel(
                name=model.facts.model,
                state=model.state,
                waiting=model.waiting if of_all else UNSET,
            )
            for model in server.models
        ],
        started=facts.started_s,
        journal_stall=now.journal_stall,
        admission_bug=now.admission_bug,
    )
    if of_all:
        _add_shared(found, now)
    return found


def shared_objects(now: Statistics) -> tuple[PoolObject, BlocksObject]:
    """The slabs and blocks of all tenants."""
    pool = PoolObject(
        slabs=now.slabs,
        slabs_total=now.slabs_total,
        bytes=now.slab_bytes,
        bytes_total=now.slab_bytes_total,
    )
    blocks = BlocksObject(
        count=now.blocks,
        bytes=now.block_bytes,
        bytes_total=now.block_bytes_total,
        disk_count=now.disk_blocks,
        disk_bytes=now.disk_bytes,
        disk_bytes_total=now.disk_bytes_total,
    )
    return pool, blocks


def _add_shared(found: Health, now: Statistics) -> None:
    """Add what all tenants have a part in."""
    found.sessions = dict(now.sessions)
    found.queue = QueueObject(queued=now.queued, running=now.running)
    found.pool, found.blocks = shared_objects(now)
    found.memory = MemoryObject(
        kv_live_bytes=now.kv_live_bytes,
        kv_expected_bytes=now.kv_expected_bytes,
        weights_bytes=now.weights_bytes,
        active_bytes=now.active_bytes,
        cache_bytes=now.cache_bytes,
    )
    found.journal_position = now.journal_position
    found.journal_head = now.journal_head
    found.journal_checkpoint = now.journal_checkpoint
    found.bugs = now.bugs
    found.degraded = dict(now.degraded)


def starting_health(start: StillStarting, *, has_key: bool) -> StartingHealth | HealthWithoutKey:
    """
    The health of a server that starts.

    Args:
        has_key: whether the caller may see more than the status.
    """
    if not has_key:
        return HealthWithoutKey(status="starting")
    return StartingHealth(status="starting", step=start.step, done=start.done, total=start.total)


def _status(now: Statistics) -> Status:
    if now.admission_bug is not None:
        return "admission_closed"
    if now.journal_stall is not None:
        return "journal_stalled"
    return "degraded" if now.degraded else "ok"
