"""
What the journals of a fleet's nodes say of each other, beyond what each says by itself.

1. A block key has one digest, also over nodes (INV-3). The fingerprint and the tenant are in the
   key, so that two that differ share none. It is on record if a node quarantined the block.
2. What a row names of another node's journal, a head that was seen, a block, an agent or a turn
   that was adopted, is there with that hash (INV-8). So rows that were removed from the end of a
   journal are missing.
   A loss that the node's operator accepted excuses what others saw before they saw that.
3. An agent that was adopted was released there, to that node and tenant, and no release was adopted
   twice (INV-9). A release that none adopted yet is no violation: a handover was cut short.
4. A journal has one lease, its own, whose token is not below one that was taken over (INV-6).

First give ``FleetAudit`` the ``references`` of each node, which are read before any journal is
verified, because servers may be adding rows. Then ``begin`` each node, ``feed`` it all its rows,
and ``end`` it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import msgspec

from cairn.journal import events as ev
from cairn.journal.nodes import schema_of
from cairn.journal.replay import Finding
from cairn.journal.rows.base import Base, histories_of, state_of
from cairn.journal.rows.codec import Row
from cairn.journal.rows.heads import Head
from cairn.journal.rows.verification import Verification
from cairn.journal.tenants import agent_session, session_tenant

_NAMESPACE = uuid.UUID("3a0b1f7e-5f7f-5b3e-9a53-6f0c9b2a7d11")
_NAMES_A_ROW = {"node", "position", "row_hash"}

NAMING = tuple(
    kind.kind
    for kind in ev.ALL_EVENTS
    if kind is ev.HeadsSeen or {field.name for field in attrs.fields(kind)} >= _NAMES_A_ROW
)
"""The kinds of events that name rows of other nodes' journals."""

_SEALING = (ev.BlockSealed.kind, ev.BlockAdopted.kind)
_STARTING = {ev.ServerLost.kind, ev.NodeTakenOver.kind, ev.ServerStarted.kind}


@attrs.frozen
class Reference:
    """
    A row of another node's journal that a row names.

    Attributes:
        by: the node that names it, and ``row`` that does.
        kind: of the event that names it.
        node: whose row it is.
        key: of the block that is sealed there; None if it is not named for a block.
        agent: the session of the agent that was adopted by it; None if it is not named for one.
        of_base: whether it is in a base, and not in a row.
    """

    by: str
    row: int
    kind: str
    node: str
    head: Head
    key: str | None = None
    agent: str | None = None
    of_base: bool = False


@attrs.frozen
class Unadopted:
    """
    A release of an agent that no node has adopted.

    Attributes:
        node: that released it, by ``row``.
        session: of the agent there.
        to: its next name.
        to_node: the node that may adopt it.
    """

    node: str
    row: int
    session: str
    to: str
    to_node: str


def references(node: str, base: Base | None, rows: Iterable[Row]) -> Iterator[Reference]:
    """
    What the journal of a node names of others. A row that cannot be read names nothing; that it was
    changed is a finding of its own journal.

    Args:
        rows: those of the kinds of ``NAMING``, at least.
    """
    if base is not None:
        with contextlib.suppress(ValueError):  # a damaged one is a violation of its own
            held = state_of(base)
            # First what is older than heads that were seen, which tell what was there by then.
            yield from _named(node, _turns_of(base))
            for release, session in held.adopted.items():
                other, _, text = release.partition(":")
                head, kind = Head.parse(text), ev.SessionAdopted.kind
                yield Reference(node, base.position, kind, other, head, None, session, of_base=True)
            for other, (at, row_hash) in held.heads_seen.items():
                head = Head(at, row_hash)
                kind = ev.HeadsSeen.kind
                yield Reference(node, base.position, kind, other, head, of_base=True)
    yield from _named(node, rows)


def _turns_of(base: Base) -> Iterator[Row]:
    """The rows of a base by which turns were adopted. Its state has which agents were."""
    return (row for row in histories_of(base).rows if row.kind == ev.TurnAdopted.kind)


def _named(node: str, rows: Iterable[Row]) -> Iterator[Reference]:
    """What rows name."""
    for row in rows:
        fields = _fields(row)
        with contextlib.suppress(LookupError, TypeError, ValueError):
            if row.kind == ev.HeadsSeen.kind:
                for other, at, row_hash in fields["heads"]:
                    head = Head(int(at), str(row_hash))
                    yield Reference(node, row.position, row.kind, str(other), head)
            elif row.kind in NAMING:
                head = Head(int(fields["position"]), str(fields["row_hash"]))
                of = str(fields["node"])
                agent: str | None = None
                if row.kind == ev.SessionAdopted.kind:
                    agent = agent_session(str(fields["tenant"]), str(fields["agent"]))
                key = fields.get("key")
                yield Reference(node, row.position, row.kind, of, head, key, agent)
                if row.kind == ev.TurnAdopted.kind:
                    end = Head(int(fields["end_position"]), str(fields["end_hash"]))
                    yield Reference(node, row.position, row.kind, of, end)


@attrs.frozen(kw_only=True)
class _Window:
    """
    Rows that an operator accepted as lost: from ``first`` to ``last``, by row ``accepted``.
    """

    accepted: int
    first: int
    last: int


class FleetAudit:
    """
    Compares the journals of nodes.

    Attributes:
        blocks: how many keys are on record at more than one node, each with one digest.
        present: how many references name a row that is there.
        pruned: how many name a row that was pruned since, which cannot be compared.
        accepted: how many name a row whose loss the operator of its node accepted.
        seen: node to the last of its rows that another node saw and that is there.
        unadopted: the releases that no node has adopted, of agents whose histories are there.
    """

    def __init__(self, references: Iterable[Reference]) -> None:
        self.present = self.pruned = self.accepted = 0
        self.seen: dict[str, int] = {}
        self.unadopted: list[Unadopted] = []
        self._to: dict[str, list[Reference]] = {}
        for one in references:
            self._to.setdefault(one.node, []).append(one)
        self._digests: dict[str, tuple[str, str, int]] = {}
        self._shared: set[str] = set()
        self._found: list[Finding] = []
        self._quarantined: set[str] = set()
        self._conflicts: dict[str, str] = {}  # bug id to key
        self._releases: dict[int, tuple[str, str]] = {}  # row to the node and tenant of the target
        self._open: dict[int, Unadopted] = {}
        self._kept: dict[int, str] = {}  # rows that the base has, to their hashes
        self._node = ""

    @property
    def blocks(self) -> int:
        """How many keys are on record at more than one node."""
        return len(self._shared)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """
        All that does not agree, so far. Digests that differ are ``recorded`` if a node quarantined
        the block: that node's journal has the violation, and says so by itself.
        """
        return tuple(
            attrs.evolve(one, recorded=self._conflicts.get(one.bug_id) in self._quarantined)
            for one in self._found
        )

    def heads_of(self, node: str) -> list[Head]:
        """The heads that others name of a node's journal, for ``Verification``."""
        return [one.head for one in self._to.get(node, ())]

    def begin(self, node: str, base: Base | None) -> None:
        """The rows that follow are of this node."""
        self._node = node
        self._begins = self._at = 0
        self._lease = 1
        self._releases, self._open = {}, {}
        self._windows: list[_Window] = []
        self._heads = {one.head for one in self._to.get(node, ())}
        self._keys = {one.head.position: "" for one in self._to.get(node, ()) if one.key}
        with contextlib.suppress(ValueError):  # as above
            state = state_of(base) if base is not None else None
            if base is not None and state is not None:
                for key, block in state.blocks.items():
                    self._sealed(key, block.digest, base.position)
                self._quarantined.update(key for key, block in state.blocks.items() if block.bug_id)
                self._lease = state.lease
                for head, at in state.lost.items():
                    self._accept(at, at - 1, [head])
        kept = histories_of(base).rows
        self._kept = {row.position: row.hash for row in kept}
        for row in kept:
            self.feed(row)

    def feed(self, row: Row) -> None:
        """Take in the next row of the node."""
        if row.kind in _SEALING:
            fields = _fields(row)
            key = fields.get("key")
            self._sealed(str(key), str(fields.get("digest")), row.position)
            if row.position in self._keys:
                self._keys[row.position] = str(key)
        elif row.kind == ev.SessionReleased.kind:
            with contextlib.suppress(LookupError):
                fields = _fields(row)
                to_node, tenant = str(fields["to_node"]), str(fields["tenant"])
                session = agent_session(tenant, str(fields["agent"]))
                self._open[row.position] = Unadopted(
                    self._node, row.position, session, str(fields["to"]), to_node
                )
                self._releases[row.position] = to_node, tenant
        elif row.kind == ev.AgentDeleted.kind:
            with contextlib.suppress(LookupError):
                fields = _fields(row)
                gone = agent_session(str(fields["tenant"]), str(fields["agent"]))
                self._open = {at: one for at, one in self._open.items() if one.session != gone}
        elif row.kind == ev.InvariantViolated.kind:
            fields = _fields(row)
            at = fields.get("at_position")
            if fields.get("invariant") == "INV-9" and type(at) is int:
                # What broke it has no effect.
                self._open.pop(at, None)
                self._releases.pop(at, None)
        elif row.kind == ev.BlocksQuarantined.kind:
            with contextlib.suppress(LookupError, TypeError):
                self._quarantined.update(map(str, _fields(row)["keys"]))
        elif row.kind in _STARTING:
            # A start may be several rows: of the run that was lost, and of a takeover.
            self._begins = self._begins if self._at == row.position - 1 else row.position
            self._at = row.position
            if type(token := _fields(row).get("token")) is int:
                self._lease = token
        elif row.kind == ev.LossAccepted.kind:
            with contextlib.suppress(LookupError, TypeError, ValueError):
                self._accept(row.position, self._begins, _fields(row)["heads"])

    def end(self, checked: Verification, leases: Sequence[tuple[str, int]]) -> None:
        """
        Compare what others name of the node with what was fed.

        Args:
            checked: the same rows, with ``heads_of``.
            leases: the rows of its lease: schema and token each; one, once it was served.
        """
        node = self._node
        reached: dict[str, int] = {}
        adopted: dict[Head, Reference] = {}
        for one in self._to.get(node, ()):
            if one.agent is not None and (first := adopted.setdefault(one.head, one)) != one:
                words = f"row {one.head.position} of {node} was adopted by {first.by} before"
                self._add("INV-9", one.by, one.row, words, first.agent, one.agent)
            if one.agent is not None:
                self._open.pop(one.head.position, None)
            self._compare(one, checked, reached.get(one.by, 0))
            if checked.standing(one.head) == "present":
                reached[one.by] = max(one.head.position, reached.get(one.by, 0))
        self.unadopted.extend(self._open.values())
        for schema, token in leases:
            if schema != schema_of(node):
                self._add("INV-6", node, 0, "a lease of another journal", schema_of(node), schema)
            if token < self._lease:
                self._add("INV-6", node, 0, "a lease that was set back", self._lease, token)
        if len(leases) > 1:
            self._add("INV-6", node, 0, "leases that overlap", "one row", len(leases))

    def end_all(self, nodes: Iterable[str]) -> None:
        """
        Find what is named of nodes that are not there.

        Args:
            nodes: those that are, also if their journal cannot be read.
        """
        for node in sorted({*self._to} - {*nodes}):
            last = max(self._to[node], key=lambda one: one.head.position)
            words = f"row {last.head.position} of {node} is named, whose journal is not there"
            self._add("INV-8", last.by, last.row, words, str(last.head), "none")

    def _accept(self, row: int, first: int, heads: Iterable[str]) -> None:
        """
        Note what a loss that an operator accepted excuses: the rows up to the last of these heads
        that another node names. A head that none names says nothing of what others saw.
        """
        lost = [head for head in map(Head.parse, map(str, heads)) if head in self._heads]
        if lost:
            last = max(head.position for head in lost)
            self._windows.append(_Window(accepted=row, first=first, last=last))

    def _excuses(self, one: Reference, reached: int) -> bool:
        """
        Whether an operator accepted that the row is lost, among others.

        Args:
            reached: up to which row of the chain, as it is now, the node had seen it before. What
                it names after it saw an acceptance was there after that. So was what a base has of
                heads; when a base's agents were adopted is not known.
        """
        seen_since = one.of_base and one.agent is None
        return not seen_since and any(
            window.accepted > reached and window.first <= one.head.position <= window.last
            for window in self._windows
        )

    def _compare(self, one: Reference, checked: Verification, reached: int) -> None:
        node, at = one.node, one.head.position
        named = f"row {at} of {node} ({one.kind})"
        kept = self._kept.get(at) == one.head.hash
        match "present" if kept else checked.standing(one.head):
            case "present":
                self.present += 1
                self.seen[node] = max(at, self.seen.get(node, 0))
                if one.key is not None and self._keys[at] != one.key:
                    words = f"{named} does not seal the block that was adopted"
                    self._add("INV-3", one.by, one.row, words, one.key, self._keys[at] or "none")
                # The target may choose another name than that of the release.
                to = (one.by, session_tenant(one.agent)) if one.agent is not None else None
                if to is not None and self._releases.get(at) != to:
                    words = f"{named} does not release the agent that was adopted"
                    found = ", ".join(self._releases.get(at, ("none",)))
                    self._add("INV-9", one.by, one.row, words, ", ".join(to), found)
            case "pruned" if at not in self._kept:
                self.pruned += 1
            case "accepted":
                self.accepted += 1
            case _ if self._excuses(one, reached):
                self.accepted += 1
            case "missing":
                words = f"{named} was removed: the journal of {node} ends before it"
                self._add("INV-8", one.by, one.row, words, str(one.head), str(checked.head))
            case _:
                words = f"{named} has another hash, so it was rewritten"
                self._add("INV-8", one.by, one.row, words, str(one.head), "another")

    def _sealed(self, key: str, digest: str, position: int) -> None:
        known = self._digests.setdefault(key, (digest, self._node, position))
        if known[1] == self._node:
            return  # by itself, a journal is checked by its own invariants
        self._shared.add(key)
        if known[0] != digest:
            words = f"the block {key} has another digest at row {known[2]} of {known[1]}"
            bug_id = self._add("INV-3", self._node, position, words, known[0], digest)
            self._conflicts[bug_id] = key

    def _add(
        self, invariant: str, node: str, row: int, message: str, expected: object, actual: object
    ) -> str:
        place = f"{node} row {row}" if row else f"{node} lease"
        name = f"{place}/{invariant}/{message}/{actual}"
        bug_id = str(uuid.uuid5(_NAMESPACE, name))
        self._found.append(
            Finding(
                bug_id=bug_id,
                invariant=invariant,
                position=row,
                session=None,
                message=message,
                expected=str(expected),
                actual=str(actual),
                recorded=False,
                reproduced=True,
                place=place,
            )
        )
        return bug_id


def _fields(row: Row) -> Mapping[str, Any]:
    """The public fields of a row; none if they cannot be read."""
    try:
        return msgspec.json.decode(row.public, type=dict[str, Any])
    except (msgspec.MsgspecError, TypeError):
        return {}
