"""
The server under seeds: actors, journal and the fake engine, with simulated threads, disk and time.

``make simulate`` runs as many as one likes, and ``make mutants`` shows that faults are found.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cairn.actors.requests.replies import Replies
from cairn.actors.threads.writer import JournalWriter
from tests.simulation.clients import Wrong
from tests.simulation.mutants import MUTANTS, Mutant, place_of
from tests.simulation.simulation import simulate

pytestmark = pytest.mark.unmeasured

_A_TEST = 8


@pytest.mark.long_but("1")
@pytest.mark.parametrize("first", range(1, 1 + 12 * _A_TEST, _A_TEST))
def test_nothing_is_wrong(first: int) -> None:
    """No invariant breaks, no commit is lost, nothing is sent before it is committed, or left."""
    ran = [simulate(seed) for seed in range(first, first + _A_TEST)]
    assert any(one.answers for one in ran)


def test_the_seeds_have_all_kinds_of_runs() -> None:
    """Control: among a few seeds are answers, refusals, crashes, and faults of the device."""
    ran = [simulate(seed) for seed in range(1, 6)]
    kinds = ("answers", "refused", "crashes", "bugs")
    assert all(sum(getattr(one, kind) for one in ran) for kind in kinds)


@pytest.mark.parametrize("hashes", [["1"], pytest.param(["2", "3"], marks=pytest.mark.long)])
def test_a_seed_gives_the_same_journal_in_every_process(hashes: list[str]) -> None:
    """Row for row, although sets are in another order there."""
    code = "from tests.simulation.simulation import simulate; print(simulate(2).head)"
    heads = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in hashes
    }
    assert 1 == len(heads)
    here = simulate(2).head
    assert here == heads.pop().strip()
    assert simulate(3).head != here


def test_a_reply_that_is_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the clients notice a server that does not wait for its commits."""

    async def at_once(self: JournalWriter, position: int) -> None:
        pass

    monkeypatch.setattr(JournalWriter, "wait_committed", at_once)
    with pytest.raises(BaseExceptionGroup) as failed:
        simulate(2)
    assert failed.group_contains(Wrong, match="before it was committed")


def test_a_lost_reply_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an answer whose first piece is missing is not the answer that was expected."""
    take = Replies.__anext__

    async def skips_one(self: Replies) -> object:
        await take(self)
        return await take(self)

    monkeypatch.setattr(Replies, "__anext__", skips_one)
    with pytest.raises(BaseExceptionGroup):
        simulate(2)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_each_mutant_has_its_place(mutant: Mutant) -> None:
    """Otherwise ``make mutants`` would try nothing."""
    assert place_of(mutant) is not None
