"""
``ops verify --fleet``: the journals of all nodes, one after the other, and what they say of each
other (``journal.fleet_audit``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import click
import msgspec

from cairn.journal.errors import JournalError
from cairn.journal.fleet_audit import NAMING, FleetAudit, Reference, references
from cairn.journal.replay import Finding
from cairn.journal.rows.base import Base
from cairn.journal.rows.verification import Verification, consequences
from cairn.journal.tenants import agent_of
from cairn.journal.unread import NotChecked
from cairn.ops.common.heads import HeadFiles
from cairn.ops.common.locations import Source
from cairn.ops.common.output import counted
from cairn.ops.journal.known_heads import KnownHeads, known_heads
from cairn.ops.journal.verify import line_of, verification_of

_SOUND, _BROKEN, _UNREADABLE, _UNREAD = 0, 1, 2, 4
_WORDS = {
    _SOUND: "sound",
    _BROKEN: "broken",
    _UNREADABLE: "cannot be read",
    _UNREAD: "sound, as far as its texts can be read here",
}


@attrs.define
class _Node:
    """
    A node's journal.

    Attributes:
        fault: why it cannot be read; empty if it can.
        lost: heads that were recorded of it outside, and are not in it.
    """

    name: str
    source: Source
    base: Base | None = None
    known: KnownHeads = attrs.field(factory=KnownHeads)
    checked: Verification | None = None
    leases: list[tuple[str, int]] = attrs.field(factory=list)
    fault: str = ""
    lost: list[str] = attrs.field(factory=list)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.checked.findings() if self.checked is not None else ()

    @property
    def code(self) -> int:
        """The exit code that its journal alone would give."""
        if self.fault or self.checked is None:
            return _UNREADABLE
        if self.findings or self.lost:
            return _BROKEN
        return _UNREAD if self.checked.not_checked else _SOUND


def verify_fleet(url: str, data_dir: Path) -> int:
    """
    Verify all nodes of a fleet, and print the verdicts. A journal without rows, which a refused
    start leaves, counts as none.

    Args:
        url: the database of the fleet.
        data_dir: has the keys, and the recorded heads, of the nodes that were served from it.

    Returns:
        The exit code, as of ``ops verify``. A finding that is on record does not count by itself:
        the node whose journal has it is broken by that.

    Raises:
        JournalError: the database cannot be reached.
        click.UsageError: it has no node.
    """
    from cairn.journal.rows.database.fleet import nodes_of
    from cairn.journal.rows.database.urls import node_url, place_of
    from cairn.journal.rows.store_sql import is_empty

    names = nodes_of(url)
    nodes, named = [], list[Reference]()
    for name in names:
        own = node_url(url, name)
        node = _Node(name, Source.of(data_dir, own))
        with _noting_fault(node):
            # Before any rows are verified, which servers may be adding to.
            node.known = known_heads(
                node.source, HeadFiles.of(data_dir, own), None, None, public_key=None
            )
            with contextlib.closing(node.source.open()) as store:
                node.base, node.leases = store.base(), store.leases()
                if is_empty(store) and not (node.known.heads or node.known.faults):
                    continue
                named.extend(references(name, node.base, store.read(kinds=NAMING)))
        nodes.append(node)
    if not nodes:
        raise click.UsageError(
            f"{place_of(url)} has no journal of a node. Check the URL; `ops serve --node n1` makes "
            "the first one."
        )
    audit = FleetAudit(named)
    for node in nodes:
        audit.begin(node.name, node.base)
        if not node.fault:
            with _noting_fault(node):
                _verify(node, audit)
        _print_node(node, audit)
    audit.end_all(node.name for node in nodes)
    return _print_fleet(nodes, audit)


@contextlib.contextmanager
def _noting_fault(node: _Node) -> Iterator[None]:
    """What is wrong with one journal does not keep the others from being checked."""
    try:
        yield
    except JournalError as error:
        node.fault = str(error)


def _verify(node: _Node, audit: FleetAudit) -> None:
    saved = [*audit.heads_of(node.name), *node.known.heads]
    node.checked = checked = verification_of(
        node.source, node.base, saved, label=f"verify {node.name}", watched=audit.feed
    )
    audit.end(checked, node.leases)
    node.lost = [
        *node.known.faults,
        *(
            f"{one.name}: row {one.head.position} is not in the chain"
            for one in node.known.found
            if checked.standing(one.head) in ("replaced", "missing")
        ),
    ]


def _print_node(node: _Node, audit: FleetAudit) -> None:
    checked, findings = node.checked, node.findings
    seen = audit.seen.get(node.name)
    follow = consequences(findings)
    unread = checked.not_checked if checked is not None else NotChecked()
    if is_piped():
        _print_object(
            node=node.name,
            verdict=_WORDS[node.code],
            fault=node.fault or None,
            rows=checked.rows if checked is not None else None,
            head=str(checked.head) if checked is not None else None,
            seen_by_others=seen,
            lease=node.leases[0][1] if node.leases else None,
            broken=len(findings) - len(follow),
            consequences=len(follow),
            findings=list(map(_object, findings)),
            not_in_the_chain=node.lost,
            not_checked=attrs.asdict(unread),
        )
        return
    if checked is None or node.fault:
        click.echo(f"{node.name}: {_WORDS[_UNREADABLE]}: {node.fault}")
        return
    for finding in findings:
        click.echo(line_of(finding, follows=finding.bug_id in follow))
    for words in node.lost:
        click.echo(words)
    facts = [counted(checked.rows, "row"), f"head {checked.head}"]
    facts += [f"lease {token}" for _, token in node.leases]
    facts += [f"others saw row {seen}" if seen else "no other node saw it"]
    click.echo(f"{node.name}: {_WORDS[node.code]}; {', '.join(facts)}")
    if findings:
        click.echo(f"  for more: ops verify --node {node.name} --journal URL")


def _print_fleet(nodes: list[_Node], audit: FleetAudit) -> int:
    findings = audit.findings
    news = [one for one in findings if not one.recorded]
    codes = [_BROKEN for _ in news] + [node.code for node in nodes]
    code = next((one for one in (_BROKEN, _UNREADABLE, _UNREAD) if one in codes), _SOUND)
    if is_piped():
        _print_object(
            fleet=[node.name for node in nodes],
            verdict=_WORDS[code],
            rows=sum(node.checked.rows for node in nodes if node.checked is not None),
            shared_blocks=audit.blocks,
            named_rows={
                "present": audit.present,
                "pruned": audit.pruned,
                "accepted_as_lost": audit.accepted,
            },
            not_adopted=[attrs.asdict(one) for one in audit.unadopted],
            broken=len(news),
            on_record=len(findings) - len(news),
            findings=list(map(_object, findings)),
        )
        return code
    for finding in findings:
        click.echo(line_of(finding))
    click.echo(f"blocks on record at several nodes: {audit.blocks}, " + _digests_words(findings))
    click.echo(
        f"rows that nodes name of each other: {audit.present} present, {audit.pruned} pruned, "
        f"{audit.accepted} accepted as lost"
    )
    if audit.unadopted:
        click.echo(f"agents released, and adopted by no node: {len(audit.unadopted)}")
    for one in audit.unadopted:
        click.echo(
            f"  {one.node} row {one.row}: {one.session}, to {one.to_node} as {one.to}. To finish: "
            f"ops agents move {agent_of(one.session)} --to {one.to_node}"
        )
    click.echo(f"fleet of {counted(len(nodes), 'node')}: {_WORDS[code]}")
    return code


def is_piped() -> bool:
    """Whether another program reads the output."""
    return not sys.stdout.isatty()


def _digests_words(findings: tuple[Finding, ...]) -> str:
    of_blocks = [finding for finding in findings if finding.invariant == "INV-3"]
    if not of_blocks:
        return "each with one digest"
    is_known = all(finding.recorded for finding in of_blocks)
    return "some with two digests" + (", all of them quarantined" if is_known else "")


def _object(finding: Finding) -> dict[str, Any]:
    return {
        "bug_id": finding.bug_id,
        "invariant": finding.invariant,
        "where": finding.where,
        "session": finding.session,
        "message": finding.message,
        "expected": finding.expected,
        "actual": finding.actual,
        "recorded": finding.recorded,
    }


def _print_object(**fields: object) -> None:
    click.echo(msgspec.json.encode(fields).decode())
