"""A start that is given up before the server serves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from cairn.actors import boot
from cairn.actors.boot import BootRefused, StartGivenUp, Starting, booted, booted_models
from cairn.actors.models.choice import Choice
from cairn.actors.models.load import StartEngine
from cairn.actors.models.model_server import ModelServer
from cairn.engine.model.models_file import ModelEntry, ModelMetadata
from cairn.engine.sampling import Sampling
from cairn.journal.replay import replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.support import fake_engine, journals
from tests.support.in_process_server import SECRET, settings

pytestmark = pytest.mark.trio


def server_over(
    store: MemoryStore,
    starting: Starting,
    *,
    several: bool,
    start_engine: StartEngine = fake_engine.started,
) -> AbstractAsyncContextManager[Any]:
    """A server that starts, over one model or over a table of models."""
    of_it = settings(fake_engine.NO_MODEL, blocks_folder=Path("none"))
    if not several:
        return booted(of_it, store, SECRET, starting=starting, start_engine=start_engine)
    entry = ModelEntry(name="one", directory=str(fake_engine.NO_MODEL))
    metadata = ModelMetadata(
        defaults=Sampling(),
        template={},
        switches=frozenset(),
        vocabulary_tokens=128,
        context_tokens=8192,
    )
    choice = Choice(entry=entry, settings=of_it, metadata=metadata)
    return booted_models(
        [choice], "one", store, SECRET, starting=starting, start_engine=start_engine
    )


def kinds(store: MemoryStore) -> list[str]:
    """The kinds of recorded events. The journal must verify."""
    assert () == replay(store.read()).findings
    return [decode(row).event.kind for row in store.rows]


@contextlib.contextmanager
def slow_load() -> Iterator[tuple[StartEngine, threading.Event]]:
    """
    A load that cannot be interrupted and lasts as long as the context, and the event that it sets
    when it begins.
    """
    begun, go = threading.Event(), threading.Event()

    def started(*given: Any) -> Any:
        begun.set()
        assert go.wait(120)
        return fake_engine.started(*given)

    try:
        yield started, begun
    finally:
        go.set()


@pytest.mark.parametrize("several", [False, True])
async def test_a_start_given_up_while_the_model_is_loaded(several: bool) -> None:
    """The start does not wait for the load, and the journal records the stop."""
    store, starting = MemoryStore(), Starting()
    with slow_load() as (slow, begun), trio.fail_after(60):

        async def give_up() -> None:
            assert await trio.to_thread.run_sync(begun.wait, 60)
            starting.give_up()

        with pytest.RaisesGroup(StartGivenUp, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_up)
                async with server_over(store, starting, several=several, start_engine=slow):
                    pytest.fail("it served")
    assert ["server_started", "server_stopped"] == kinds(store)


async def test_a_start_given_up_before_anything_is_recorded() -> None:
    """Nothing is recorded, because nothing has begun."""
    store, starting = MemoryStore(), Starting()
    starting.give_up()
    with pytest.RaisesGroup(StartGivenUp, flatten_subgroups=True):
        async with server_over(store, starting, several=False):
            pytest.fail("it served")
    assert [] == kinds(store)


class HeldStore(MemoryStore):
    """A store whose second row is not read before the test allows it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, after: int | None = None, *, stream: str | None = None) -> Iterator[Row]:
        """See ``Store.read``."""
        for place, row in enumerate(super().read(after, stream=stream)):
            if place == 1:
                self.reading.set()
                assert self.go.wait(60)
            yield row


async def test_a_start_given_up_while_the_journal_is_read() -> None:
    """
    The journal is read on a thread of its own, so a signal is heeded meanwhile; the next row is not
    folded, and nothing is recorded.
    """
    rows = journals.healthy()
    store, starting = HeldStore(rows), Starting()

    async def give_up() -> None:
        assert await trio.to_thread.run_sync(store.reading.wait, 60)
        starting.give_up()
        store.go.set()

    with trio.fail_after(60), pytest.RaisesGroup(StartGivenUp, flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_up)
            async with server_over(store, starting, several=False):
                pytest.fail("it served")
    assert rows == store.rows


async def test_a_start_given_up_after_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between load and service nothing is abandoned: the server starts, and stops as usual."""
    store, starting = MemoryStore(), Starting()

    async def found(*_: Any, **__: Any) -> None:
        starting.give_up()

    monkeypatch.setattr(ModelServer, "find_blocks", found)
    async with server_over(store, starting, several=False):
        pass
    assert ["server_started", "model_loaded", "server_stopped"] == kinds(store)


class EndlessTemplate(fake_engine.FakeTokenizer):
    """A tokenizer whose template never ends, until the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        self.begun.set()
        assert self.go.wait(120)
        return ""


def with_tokenizer(tokenizer: Any, directory: Path) -> StartEngine:
    """The fake engine with another tokenizer."""

    def started(*given: Any) -> Any:
        return attrs.evolve(fake_engine.started(*given), tokenizer=tokenizer, directory=directory)

    return started


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
async def test_a_template_that_never_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The start ends with a sentence that names the file, and the journal has the stop."""
    (tmp_path / file).write_text("{}")
    monkeypatch.setattr(boot, "LIMIT_S", 0.05)
    store, tokenizer = MemoryStore(), EndlessTemplate()
    try:
        with pytest.raises(BaseExceptionGroup) as failed:
            async with server_over(
                store,
                Starting(),
                several=False,
                start_engine=with_tokenizer(tokenizer, tmp_path),
            ):
                raise AssertionError("it must not serve")
    finally:
        tokenizer.go.set()
    assert failed.group_contains(
        BootRefused, match=rf"the chat template of .*{file} did not end within 0.05 seconds"
    )
    assert ["server_started", "model_loaded", "server_stopped"] == kinds(store)


@pytest.mark.parametrize("several", [False, True])
async def test_a_start_is_given_up_while_a_template_renders(tmp_path: Path, several: bool) -> None:
    """The signal is heeded meanwhile."""
    store, tokenizer, starting = MemoryStore(), EndlessTemplate(), Starting()
    start_engine = with_tokenizer(tokenizer, tmp_path)

    async def stop() -> None:
        assert await trio.to_thread.run_sync(tokenizer.begun.wait, 60)
        starting.give_up()

    try:
        with pytest.RaisesGroup(StartGivenUp, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stop)
                async with server_over(store, starting, several=several, start_engine=start_engine):
                    pytest.fail("it served")
    finally:
        tokenizer.go.set()
    assert ["server_started", "model_loaded", "server_stopped"] == kinds(store)
