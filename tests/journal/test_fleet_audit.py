"""What the journals of a fleet say of each other, and each way in which that can be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec

from cairn.journal import events as ev
from cairn.journal.agents import Agents
from cairn.journal.fleet_audit import NAMING, FleetAudit, Reference, references
from cairn.journal.rows.base import Base, base_of
from cairn.journal.rows.codec import Row, decode, row_hash
from cairn.journal.rows.heads import Head
from cairn.journal.rows.histories import histories_at
from cairn.journal.rows.verification import Verification
from cairn.journal.state import EMPTY, Block
from cairn.journal.turns import Turns
from tests.support.journals import TENANT, Builder, agent_created, handed_over, healthy

LEASES: Mapping[str, Sequence[tuple[str, int]]] = {
    "n1": [("node_n1", 1)],
    "n2": [("node_n2", 1)],
}


def audited(
    journals: Mapping[str, Sequence[Row]],
    leases: Mapping[str, Sequence[tuple[str, int]]] = LEASES,
    bases: Mapping[str, Base] | None = None,
    more: Sequence[Reference] = (),
) -> FleetAudit:
    """An audit of these journals."""
    bases = bases or {}
    named = [
        one for node, rows in journals.items() for one in references(node, bases.get(node), rows)
    ]
    audit = FleetAudit([*named, *more])
    for node, rows in journals.items():
        base = bases.get(node)
        audit.begin(node, base)
        checked = Verification(may_be_excerpt=False, saved=audit.heads_of(node), base=base)
        for row in rows:
            checked.feed(row)
            audit.feed(row)
        audit.end(checked, leases.get(node, ()))
    audit.end_all(journals)
    return audit


def found(audit: FleetAudit) -> list[tuple[str, str | None]]:
    """The invariants that are broken, and where."""
    return [(finding.invariant, finding.place) for finding in audit.findings]


def seeing(*heads: tuple[str, int, str]) -> list[Row]:
    """A journal of a node that saw heads, from its sixth row on."""
    made = Builder()
    made.start()
    for head in heads:
        made.propose(ev.HeadsSeen(heads=(head,)))
    return made.rows


def head_of(rows: Sequence[Row], node: str = "n2") -> tuple[str, int, str]:
    """The head of rows, as a node sees it."""
    return node, rows[-1].position, rows[-1].hash


def rechained(rows: Sequence[Row], at: int, **changes: Any) -> list[Row]:
    """Rows of which one is changed, with the chain written again over it."""
    made: list[Row] = []
    for row in rows:
        if row.position == at:
            row = attrs.evolve(row, **changes)
        if made:
            row = attrs.evolve(row, previous_hash=made[-1].hash)
        made.append(attrs.evolve(row, hash=row_hash(row)))
    return made


# --- heads ----------------------------------------------------------------------------------------


def test_a_fleet_that_agrees():
    """Each head that was seen is in its chain, and the last one says up to where others vouch."""
    rows = healthy()
    audit = audited({"n1": seeing(head_of(rows[:20]), head_of(rows[:30])), "n2": rows})
    assert [] == found(audit)
    assert (2, 0, 0) == (audit.present, audit.pruned, audit.accepted)
    assert {"n2": 30} == audit.seen


def test_rows_that_were_removed_from_the_end():
    """The chain that is left is valid; the other node's names the row that is missing."""
    rows = healthy()
    seen = seeing(head_of(rows))
    audit = audited({"n1": seen, "n2": rows[:25]})
    assert [("INV-8", f"n1 row {seen[-1].position}")] == found(audit)
    assert "row 31 of n2 (heads_seen) was removed" in audit.findings[0].message
    assert ["INV-8"] == [one for one, _ in found(audited({"n1": seen, "n2": []}))]


def test_a_chain_that_was_written_again():
    """It is valid in itself, and has another hash where the other node looked."""
    rows = healthy()
    again = rechained(rows, 30, time_us=rows[29].time_us + 1)
    audit = audited({"n1": seeing(head_of(rows[:29]), head_of(rows)), "n2": again})
    assert [("INV-8", "n1 row 4")] == found(audit)
    assert "row 31 of n2 (heads_seen) has another hash" in audit.findings[0].message
    assert {"n2": 29} == audit.seen


def test_a_journal_that_is_gone():
    """A node that was seen, and of which there is no journal any more."""
    audit = audited({"n1": seeing(("n9", 3, "ab" * 32), ("n9", 5, "cd" * 32))})
    assert [("INV-8", "n1 row 4")] == found(audit)
    assert "row 5 of n9 is named, whose journal is not there" == audit.findings[0].message


def restarted(lost: Sequence[str]) -> list[Row]:
    """A journal of two starts, at the second of which an operator accepted that heads are lost."""
    made = Builder()
    made.start()
    made.propose(
        ev.ServerLost(boot="boot-1"),
        ev.NodeTakenOver(token=2, by="jo"),
        ev.ServerStarted(boot="boot-2", cairn_version="0", settings={}),
        ev.LossAccepted(fact="rows are lost", heads=tuple(lost)),
    )
    return made.rows


def test_a_loss_that_was_accepted():
    """
    What an operator accepted as lost is none; what was lost besides is, before it and after it, and
    also if a damaged record named no head.
    """
    made = Builder()
    made.start()
    after = len(made.rows)
    made.propose(*(ev.OperatorActed(action="note", detail=str(n)) for n in range(20)))
    rows = made.rows
    accepted = restarted([str(Head(rows[-1].position, rows[-1].hash))])
    leases = {**LEASES, "n2": [("node_n2", 2)]}
    last = head_of(rows)
    for seen, excused, broken in (
        ([last], 1, 0),
        ([head_of(rows[: after + 1]), last], 2, 0),
        ([("n2", after, "ab" * 32), last], 1, 1),
        ([last, ("n2", rows[-1].position + 1, "ab" * 32)], 1, 1),
        # None named the head that the acceptance names, so it says nothing of this one.
        ([head_of(rows[: after + 1])], 0, 1),
    ):
        audit = audited({"n1": seeing(*seen), "n2": accepted}, leases)
        assert (excused, ["INV-8"] * broken) == (audit.accepted, [one for one, _ in found(audit)])
    for lost in ([], ["damaged"]):
        nothing = restarted(lost)
        assert ["INV-8"] == [
            one for one, _ in found(audited({"n1": seeing(head_of(rows)), "n2": nothing}, leases))
        ]


def test_a_cut_after_an_accepted_loss():
    """
    An acceptance excuses what was seen before it was, and not what the node had after it. Cutting
    the acceptance off, too, is found.
    """
    old = healthy()
    rows = restarted([str(Head(31, old[-1].hash))])
    accepted = rows[-1]
    noted = Builder()
    for event in (decode(row).event for row in rows):
        noted.propose(event)
    noted.propose(*(ev.OperatorActed(action="note", detail=str(n)) for n in range(15)))
    again = noted.rows
    accepted = again[accepted.position - 1]
    made = Builder()
    made.start()
    loss = ev.LossSeen(
        node="n2",
        lost=f"31:{old[-1].hash}",
        position=accepted.position,
        row_hash=accepted.hash,
    )
    seen = [ev.HeadsSeen(heads=(head_of(some),)) for some in (old[:25], old, again)]
    made.propose(seen[0], seen[1], loss, seen[2])
    leases = {**LEASES, "n2": [("node_n2", 2)]}
    after = accepted.position
    for left, excused, broken in (
        (len(again), 2, []),
        (after + 1, 2, ["INV-8"]),
        (after, 2, ["INV-8"]),
        (after - 1, 0, ["INV-8"] * 4),
    ):
        audit = audited({"n1": made.rows, "n2": again[:left]}, leases)
        assert (excused, broken) == (audit.accepted, [one for one, _ in found(audit)]), left
    damaged = FleetAudit([])
    damaged.begin("n2", None)
    for public in (b'{"heads":[1]}', b'{"heads":1}', b"{}"):
        damaged.feed(attrs.evolve(rows[-1], public=public))
    assert () == damaged.findings
    forged = restarted([f"999999999:{'ab' * 32}"])
    audit = audited({"n1": seeing(("n2", 500_000, "cd" * 32)), "n2": forged}, leases)
    assert ["INV-8"] == [one for one, _ in found(audit)]


def test_after_a_prune():
    """
    A base has the heads that its node saw, its lease, its digests, and the losses that were
    accepted. A head of a row that was pruned cannot be compared.
    """
    rows = healthy()
    state = attrs.evolve(
        EMPTY,
        position=4,
        lease=3,
        heads_seen=EMPTY.heads_seen.update({"n2": (31, rows[-1].hash)}),
        lost=EMPTY.lost.update({f"{9}:{'ab' * 32}": 4}),
    )
    base = base_of(state, "ef" * 32)
    audit = audited(
        {"n1": [], "n2": rows[:25]},
        {"n1": [("node_n1", 3)]},
        {"n1": base},
        [
            Reference("n2", 3, "heads_seen", "n1", Head(9, "ab" * 32)),
            Reference("n2", 3, "heads_seen", "n1", Head(8, "01" * 32)),
            Reference("n2", 3, "heads_seen", "n1", Head(2, "ab" * 32)),
            Reference("n2", 3, "heads_seen", "n1", Head(4, "ef" * 32)),
        ],
    )
    assert [("INV-8", "n1 row 4")] == found(audit)
    assert (1, 1, 2) == (audit.present, audit.pruned, audit.accepted)
    # A base has the last head alone, which an acceptance names itself.
    last = attrs.evolve(state, heads_seen=EMPTY.heads_seen.set("n2", (20, "cd" * 32)))
    accepted = restarted([str(Head(31, rows[-1].hash))])
    audit = audited(
        {"n1": seeing(head_of(rows))[2:], "n2": accepted},
        {"n2": [("node_n2", 2)]},
        {"n1": base_of(last, "ef" * 32)},
    )
    assert 1 == audit.accepted
    assert ("INV-8", "n1 row 4") in found(audit)
    lower = audited({"n1": []}, {"n1": [("node_n1", 2)]}, {"n1": base})
    assert ("INV-6", "n1 lease") in found(lower)
    damaged = attrs.evolve(base, state=b"{}")
    assert [] == found(audited({"n1": []}, {}, {"n1": damaged}))


# --- blocks ---------------------------------------------------------------------------------------


def test_one_digest_of_a_key():
    """A block that two nodes sealed has one digest; another one is found, with both rows."""
    rows = healthy()
    audit = audited({"n1": rows, "n2": rows})
    assert [] == found(audit)
    assert audit.blocks > 0
    sealed = next(row for row in rows if row.kind == "block_sealed")
    other = sealed.public.replace(b'"digest":"', b'"digest":"0')
    audit = audited({"n1": rows, "n2": rechained(rows, sealed.position, public=other)})
    assert ("INV-3", f"n2 row {sealed.position}") in found(audit)
    assert f"another digest at row {sealed.position} of n1" in audit.findings[0].message


def test_a_digest_in_a_base():
    """The digests of blocks whose rows were pruned count, too."""
    rows = healthy()
    sealed = next(row for row in rows if row.kind == "block_sealed")
    key = msgspec.json.decode(sealed.public)["key"]
    block = Block(key=key, parent=None, digest="another", start=0, bytes=1, present=False, tokens=4)
    state = attrs.evolve(EMPTY, position=4, blocks=EMPTY.blocks.set(key, block))
    audit = audited({"n1": [], "n2": rows}, {}, {"n1": base_of(state, "ef" * 32)})
    assert [("INV-3", f"n2 row {sealed.position}")] == found(audit)


def conflicting(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """The rows with another digest of the first block that they seal, and its key."""
    sealed = next(row for row in rows if row.kind == "block_sealed")
    other = sealed.public.replace(b'"digest":"', b'"digest":"0')
    key = msgspec.json.decode(sealed.public)["key"]
    return rechained(rows, sealed.position, public=other), key


def quarantining(rows: Sequence[Row], **fields: Any) -> list[Row]:
    """The rows, and one by which blocks are quarantined."""
    at = rows[-1].position + 1
    public = msgspec.json.encode({"bug_id": "bug", "session": None} | fields)
    row = attrs.evolve(rows[-1], position=at, kind="blocks_quarantined", public=public)
    return rechained([*rows, row], at)


def test_a_conflict_that_is_on_record():
    """Two digests of a block are on record if a node quarantined it, in a row or in its base."""
    rows = healthy()
    other, key = conflicting(rows)
    for keys, is_recorded in (([key], True), (["another"], False)):
        for first, second in (
            (rows, quarantining(other, keys=keys)),
            (quarantining(rows, keys=keys), other),
        ):
            (finding,) = audited({"n1": first, "n2": second}).findings
            assert ("INV-3", is_recorded) == (finding.invariant, finding.recorded)
    for damaged in (quarantining(rows, keys=1), quarantining(rows)):
        audit = FleetAudit([])
        audit.begin("n1", None)
        audit.feed(damaged[-1])
        assert () == audit.findings
    block = Block(key=key, parent=None, digest="another", start=0, bytes=1, present=False, tokens=4)
    for bug_id in ("bug", None):
        kept = EMPTY.blocks.set(key, attrs.evolve(block, bug_id=bug_id))
        base = base_of(attrs.evolve(EMPTY, position=4, blocks=kept), "ef" * 32)
        (finding,) = audited({"n1": [], "n2": rows}, {}, {"n1": base}).findings
        assert (bug_id is not None) == finding.recorded


def adopting(rows: Sequence[Row], sealed: Row, **changes: Any) -> list[Reference]:
    """What a node names that adopted the block of a row."""
    fields = msgspec.json.decode(sealed.public)
    named = {
        "digest": fields["digest"],
        "key": fields["key"],
        "node": "n2",
        "position": sealed.position,
        "row_hash": sealed.hash,
    } | changes
    public = msgspec.json.encode(named)
    row = attrs.evolve(rows[-1], kind="block_adopted", public=public)
    return list(references("n1", None, [row]))


def test_a_block_that_was_adopted():
    """The row that an adoption names is there, with its hash, and seals that block."""
    assert {"heads_seen", "loss_seen", "block_adopted", "session_adopted"} <= set(NAMING)
    rows = healthy()
    sealed = next(row for row in rows if row.kind == "block_sealed")
    for changes, broken in (
        ({}, []),
        ({"position": sealed.position + 1}, ["INV-8"]),
        ({"row_hash": "ab" * 32}, ["INV-8"]),
        ({"key": "another"}, ["INV-3"]),
        ({"node": "n9"}, ["INV-8"]),
        ({"position": 2, "row_hash": rows[1].hash}, ["INV-3"]),
    ):
        more = adopting(rows, sealed, **changes)
        audit = audited({"n1": seeing(), "n2": rows}, more=more)
        assert broken == [one for one, _ in found(audit)], changes


def test_a_row_that_cannot_be_read():
    """It names nothing. That it was changed is a finding of its own journal."""
    row = seeing(("n2", 3, "ab" * 32))[-1]
    for public in (b"", b"{}", b"[]", b'{"heads":[1]}', b'{"heads":[["n2","x","y"]]}'):
        assert [] == list(references("n1", None, [attrs.evolve(row, public=public)]))


# --- leases ---------------------------------------------------------------------------------------


def test_leases():
    """A journal has one lease, its own, that was not set back."""
    made = Builder()
    made.start()
    made.stop()
    made.propose(ev.NodeTakenOver(token=4, by="jo"))
    for leases, broken in (
        ([("node_n1", 4)], 0),
        ([("node_n1", 5)], 0),  # raised by a takeover that is not finished
        ([("node_n1", 3)], 1),
        ([("node_n2", 4)], 1),
        ([("node_n1", 4), ("node_n1", 5)], 1),
    ):
        audit = audited({"n1": made.rows}, {"n1": leases})
        assert [("INV-6", "n1 lease")] * broken == found(audit), leases


# --- agents that are handed over ------------------------------------------------------------------


def released(**fields: Any) -> list[Row]:
    """The journal of a node that releases the agent ``n1.notes``, and of what it does besides."""
    made = Builder()
    made.start()
    made.propose(agent_created("n1.notes", tenant=fields.get("tenant", TENANT)))
    out = ev.SessionReleased(agent="n1.notes", tenant=TENANT, to="n2.come", to_node="n2")
    made.propose(attrs.evolve(out, **fields))
    assert made.bug is None
    return made.rows


def taking(rows: Sequence[Row], *, name: str = "n2.come", turn: Row | None = None) -> Builder:
    """The journal of a node that adopts what the last of these rows releases."""
    adopted, came, _ = handed_over(agent=name)
    row = {"position": rows[-1].position, "row_hash": rows[-1].hash}
    made = Builder()
    made.start()
    made.propose(attrs.evolve(adopted, turns=0 if turn is None else 1, **row))  # type: ignore[call-arg]
    if turn is not None:
        row = {"position": turn.position, "row_hash": turn.hash}
        end = {"end_position": rows[-1].position, "end_hash": "ab" * 32}
        made.propose(attrs.evolve(came, **row, **end))
    assert made.bug is None
    return made


def test_an_agent_that_was_handed_over():
    """The row that it names releases it to this agent of this node; also once that is in a base."""
    rows = released()
    made = taking(rows)
    audit = audited({"n1": rows, "n2": made.rows})
    assert [] == found(audit)
    assert 1 == audit.present
    base = base_of(made.ledger.state, made.ledger.head)
    audit = audited({"n1": rows, "n2": []}, bases={"n2": base})
    assert [] == found(audit)
    assert 1 == audit.present


def test_a_release_to_another():
    """To another node, agent or tenant; and a row that releases nothing."""
    rows = released(to="n2.other")  # of which the target may choose another name
    assert [] == found(audited({"n1": rows, "n2": taking(rows).rows}))
    for fields in ({"to_node": "n3"}, {"tenant": "bob"}):
        rows = released(**fields)
        audit = audited({"n1": rows, "n2": taking(rows).rows})
        assert ["INV-9"] == [one for one, _ in found(audit)]
        assert "does not release the agent that was adopted" in audit.findings[0].message
    rows = released()[:-1]
    assert ["INV-9"] == [one for one, _ in found(audited({"n1": rows, "n2": taking(rows).rows}))]
    rows = released()
    made = taking(rows)
    base = base_of(made.ledger.state, made.ledger.head)
    assert ["INV-8"] == [
        one for one, _ in found(audited({"n1": rows[:-1], "n2": []}, bases={"n2": base}))
    ]


def test_a_release_that_was_adopted_twice():
    """By two nodes: the second one is a finding, as is that it was not released to that."""
    rows = released()
    two = taking(rows).rows
    audit = audited({"n1": rows, "n2": two, "n3": two})
    words = [one.message for one in audit.findings]
    assert [("INV-9", f"n3 row {two[-1].position}")] * 2 == found(audit)
    assert f"row {rows[-1].position} of n1 was adopted by n2 before" == words[0]


def test_a_turn_that_was_handed_over():
    """Both of its rows are looked up in the other journal."""
    rows = released()
    audit = audited({"n1": rows, "n2": taking(rows, turn=rows[0]).rows})
    assert ["INV-8"] == [one for one, _ in found(audit)]
    assert 2 == audit.present


def test_a_release_that_cannot_be_read():
    """A row without these fields releases nothing; its own journal has the finding."""
    audit = FleetAudit([])
    audit.begin("n1", None)
    audit.feed(attrs.evolve(released()[-1], public=b"{}"))
    assert () == audit.findings


def pruned(made: Builder) -> Base:
    """The base of a journal whose rows were all pruned."""
    agents = Agents(Turns())
    for row in made.rows:
        agents.see(decode(row))
    rows = {row.position: row for row in made.rows}
    histories = histories_at(agents, agents.needed(), rows)
    return base_of(made.ledger.state, made.ledger.head, histories=histories)


def releasing(**fields: Any) -> Builder:
    """As ``released``."""
    made = Builder()
    for row in released(**fields):
        made.propose(decode(row).event)
    return made


def test_a_base_has_the_release_and_the_turns():
    """After a prune of both journals, all is compared as it was before."""
    for fields, broken in (({}, []), ({"to_node": "n3"}, ["INV-9"])):
        source = releasing(**fields)
        created = next(row for row in source.rows if row.kind == "agent_created")
        target = taking(source.rows, turn=created)
        bases = {"n1": pruned(source), "n2": pruned(target)}
        audit = audited({"n1": [], "n2": []}, bases=bases)
        # The end of the turn that is named is another row.
        assert [*broken, "INV-8"] == sorted((one for one, _ in found(audit)), reverse=True)
        assert (2, 0) == (audit.present, audit.pruned)
    changed = attrs.evolve(source.rows[-1], hash="ab" * 32)
    audit = audited({"n1": [], "n2": taking([changed]).rows}, bases={"n1": pruned(source)})
    assert ["INV-8"] == [one for one, _ in found(audit)]
    assert "was rewritten" in audit.findings[0].message


def test_a_release_that_none_adopted():
    """It is named, in rows and in a base, until the history is deleted."""
    source = releasing()
    for rows, base in ((source.rows, None), ([], pruned(source))):
        audit = audited({"n1": rows, "n2": []}, bases={"n1": base} if base is not None else {})
        assert [] == found(audit)
        (one,) = audit.unadopted
        session = f"@{TENANT}/agent/n1.notes"
        at = source.rows[-1].position
        assert ("n1", at, session, "n2.come", "n2") == attrs.astuple(one)
    assert [] == audited({"n1": source.rows, "n2": taking(source.rows).rows}).unadopted
    source.propose(ev.AgentDeleted(agent="n1.notes", tenant=TENANT))
    assert [] == audited({"n1": source.rows}).unadopted
    again = releasing()
    again.propose(ev.SessionReleased(agent="n1.notes", tenant=TENANT, to="n3.x", to_node="n3"))
    assert again.bug is not None
    assert ["n2"] == [one.to_node for one in audited({"n1": again.rows}).unadopted]
    audit = FleetAudit([])
    audit.begin("n1", None)
    for kind in ("agent_deleted", "session_released", "invariant_violated"):
        audit.feed(attrs.evolve(source.rows[-1], kind=kind, public=b"{}"))
    assert [] == audit.unadopted
