"""
The gate over an adapter: low-rank layers on top of the model's change the answers, and P1 holds as
without them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from cairn.ops.journal.replay_engine import OTHER_FINGERPRINT, SAME, rerun
from tests.gate.conversation import words
from tests.gate.test_gate import same_bits
from tests.support.in_process_server import Said, ask, generate, serving
from tests.support.models.lora_adapters import make_adapter

pytestmark = pytest.mark.gate

TURNS = 4


def commands(answers: list[Said], turn: int, *, sampling: Sampling | None = None):
    """The next turn of a conversation."""
    messages = [Message(role="user", content=words(0, 20))]
    for place, said in enumerate(answers[:turn], start=1):
        messages.append(Message(role="assistant", content=said.text))
        messages.append(Message(role="user", content=words(place, 20)))
    sampling = sampling or Sampling(temperature=0.8)
    return generate(Conversation(messages=tuple(messages)), sampling=sampling, seed=turn)


def loaded(rows: list[Row]) -> ev.ModelLoaded:
    """The journal's event for the loaded model."""
    (event,) = (decode(row).event for row in rows if row.kind == ev.ModelLoaded.kind)
    assert isinstance(event, ev.ModelLoaded)
    return event


@pytest.fixture(scope="module")
def adapter(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter."""
    return make_adapter(model_directory, tmp_path_factory.mktemp("adapters") / "one", seed=1)


def test_warm_equals_cold_over_an_adapter(model_directory: Path, adapter: Path) -> None:
    """
    Four turns on a warm server give the bits of a cold server. The passes can be replayed from the
    journal alone.
    """
    store = MemoryStore()
    answers: list[Said] = []

    async def main() -> None:
        async with serving(model_directory, store, adapter=str(adapter), decode_rows=4) as warm:
            for turn in range(TURNS):
                answers.append(await ask(warm, commands(answers, turn)))
        empty = [row for row in store.rows if row.position <= 3]
        assert ev.SelfTestFinished.kind in {row.kind for row in empty}
        for turn in range(TURNS):
            cold = MemoryStore()
            async with serving(
                model_directory, cold, adapter=str(adapter), decode_rows=4
            ) as server:
                missed = await ask(server, commands(answers, turn))
            assert 0 == missed.accepted.cached_tokens
            same_bits(answers[turn], missed)

    trio.run(main)

    assert 0 < answers[-1].accepted.cached_tokens
    assert (4, str(adapter)) == (loaded(store.rows).decode_rows, loaded(store.rows).adapter)
    tests = [decode(row).event for row in store.rows if row.kind == ev.SelfTestFinished.kind]
    assert [True] == [test.passed for test in tests if isinstance(test, ev.SelfTestFinished)]
    assert SAME == rerun(store.rows, answers[0].accepted.session, None)


def test_alone_equals_among_others_over_an_adapter(model_directory: Path, adapter: Path) -> None:
    """Four conversations at once have the bits that each has alone."""
    together: dict[int, Said] = {}

    async def main() -> None:
        async with serving(model_directory, adapter=str(adapter), decode_rows=4) as server:

            async def one(place: int) -> None:
                together[place] = await ask(server, commands([], place))

            async with trio.open_nursery() as nursery:
                for place in range(4):
                    nursery.start_soon(one, place)
        async with serving(model_directory, adapter=str(adapter), decode_rows=4) as server:
            for place in range(4):
                same_bits(together[place], await ask(server, commands([], place)))

    trio.run(main)


@pytest.mark.long
def test_an_adapter_has_a_say_and_a_fingerprint(
    model_directory: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    With the adapter, without it and with a different one, greedy answers and fingerprints differ. A
    session is not replayed with the wrong adapter.
    """
    other = make_adapter(model_directory, tmp_path / "other", seed=2)
    greedy = Sampling(temperature=0.0)
    stores = [MemoryStore() for _ in range(3)]
    said: list[Said] = []

    async def main() -> None:
        for store, over in zip(stores, (None, str(adapter), str(other)), strict=True):
            async with serving(model_directory, store, adapter=over) as server:
                said.append(await ask(server, commands([], 0, sampling=greedy)))

    trio.run(main)

    assert 3 == len({one.text for one in said})
    assert 3 == len({loaded(store.rows).fingerprint for store in stores})
    assert ["adapter" in loaded(store.rows).fields for store in stores] == [False, True, True]
    session = said[1].accepted.session
    assert OTHER_FINGERPRINT == rerun(stores[1].rows, session, None, str(other))
    assert "adapter: " in capsys.readouterr().out
