"""
Several models in one server: which model answers, when a model is loaded and unloaded, and what
outlasts a swap.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio
import trio.testing

from cairn.actors.agents.messages import NewAgent
from cairn.actors.boot import booted_models
from cairn.actors.errors import (
    AgentBusy,
    CannotRecord,
    ModelNotLoaded,
    PromptRefused,
    QueueFull,
    Stopping,
    TimedOut,
    TooManyAnswers,
)
from cairn.actors.idle.activity import Activity
from cairn.actors.memory import Memory
from cairn.actors.models import load as loading
from cairn.actors.models import swap as models_module
from cairn.actors.models import token_count
from cairn.actors.models.choice import Choice
from cairn.actors.models.load import StartEngine, start_on_mlx
from cairn.actors.models.model_server import ModelServer
from cairn.actors.models.token_count import TokenCounter
from cairn.actors.requests.context import RequestContext
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Generate, Keep, Waiting
from cairn.actors.server import Server
from cairn.actors.settings import Settings
from cairn.actors.threads.prompts import PromptThreads
from cairn.engine.mlx import start as mlx_start
from cairn.engine.mlx import tokenizer as mlx_tokenizer
from cairn.engine.mlx.tokenizer import load_tokenizer
from cairn.engine.model.models_file import ModelEntry, read_metadata
from cairn.engine.prompt.template import Conversation, Message
from cairn.engine.reports import SelfTestReport
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.agents import session_of
from cairn.journal.replay import replay
from cairn.journal.rows.codec import decode
from cairn.ops.journal.replay_engine import OTHER_FINGERPRINT, SAME, rerun
from tests.gate.conversation import words
from tests.support.full_disk import FullDisk
from tests.support.in_process_server import MIB, SECRET, ask, generate, local, settings

pytestmark = pytest.mark.trio

CHUNK = 16


@attrs.define
class Setup:
    """A journal, a folder of block files, and two models, ``one`` and ``other``."""

    one: Path
    other: Path
    folder: Path
    store: FullDisk = attrs.field(factory=FullDisk)
    start_engine: StartEngine = start_on_mlx

    def choices(self, **changes: Any) -> list[Choice]:
        """The two models."""
        usual = {
            "blocks_folder": self.folder,
            "disk_bytes": 64 * MIB,
            "block_tokens": CHUNK,
            "decode_rows": 2,
        }
        choices = []
        for name in ("one", "other"):
            directory = getattr(self, name)
            entry = ModelEntry(name=name, directory=str(directory), aliases=(f"{name}-alias",))
            of_it = settings(directory, model_name=name, **{**usual, **changes})
            choices.append(Choice(entry=entry, settings=of_it, metadata=read_metadata(entry)))
        return choices

    @contextlib.asynccontextmanager
    async def serving(self, **changes: Any) -> AsyncIterator[Server]:
        """A server over both models, of which ``one`` is loaded."""
        choices, start = self.choices(**changes), self.start_engine
        async with booted_models(choices, "one", self.store, SECRET, start_engine=start) as server:
            yield server

    def events(self, *kinds: type[ev.Event]) -> list[Any]:
        """The journal's events of some kinds."""
        found = (decode(row).event for row in self.store.rows)
        return [event for event in found if isinstance(event, kinds)]

    def swaps(self) -> list[str]:
        """The models that were loaded, in order."""
        return [event.name for event in self.events(ev.ModelLoaded)]

    def verify(self) -> None:
        """Verify the whole journal."""
        assert () == replay(self.store.read()).findings


@pytest.fixture
def setup(
    model_directory: Path,
    other_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Setup:
    """A setup over the two models of all tests. The self-test is covered elsewhere."""
    passed = SelfTestReport(findings={"nothing": True}, error_max=0.0, duration_us=0)
    monkeypatch.setattr(mlx_start, "run_self_test", lambda *_: passed)
    return Setup(model_directory, other_directory, tmp_path / "blocks")


def to(model: str, *said: str, **changes: Any) -> Generate:
    """A request for a model. The texts are of user and model by turns."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[n % 2], content=text) for n, text in enumerate(said))
    usual = {"max_tokens": 4, "requested_model": model}
    return generate(Conversation(messages=messages), **{**usual, **changes})


OPENING = words(1, 12)


@contextlib.asynccontextmanager
async def engine_held(server: Server) -> AsyncIterator[threading.Event]:
    """Hold the engine until the event is set, at the latest until the context ends."""
    go_on, began = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()

    def hold(_: Any) -> None:
        token.run_sync_soon(began.set)
        go_on.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.loaded.engine.call, hold, lambda _: None)
        await began.wait()
        try:
            yield go_on
        finally:
            go_on.set()


async def wait_in_flight(server: Server, requests: int) -> None:
    """Wait until a number of requests are running or in the queue."""
    with trio.fail_after(60):
        while (now := server.statistics()).queued + now.running < requests:
            await trio.testing.wait_all_tasks_blocked()


async def until(server: Server, *, journal_stalled: bool) -> None:
    """Wait until the journal's disk is full, or has room again."""
    with trio.fail_after(60):
        while (server.statistics().journal_stall is not None) != journal_stalled:
            await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_model_that_is_loaded_again_finds_its_sessions(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A request for one model, then the other, then the first again: the last one continues its own
    session, from files, with the bits of a cold answer, even if no file was written before. Each
    swap is on record.
    """

    async def not_now(*_: Any) -> bool:
        return False

    monkeypatch.setattr(Memory, "write_through", not_now)
    async with setup.serving() as server:
        first = await ask(server, to("one", OPENING))
        onward = (OPENING, first.text, "And then?")
        beside = await ask(server, to("other-alias", *onward))
        again = await ask(server, to("one-alias", *onward))
        cold = await ask(server, to("one", *onward, cache_prompt=False))

    assert beside.tokens != again.tokens
    assert ("new_session", "fingerprint_changed") == (beside.accepted.path, beside.accepted.reason)
    assert ("continuation", None) == (again.accepted.path, again.accepted.reason)
    assert first.accepted.session == again.accepted.session != beside.accepted.session
    assert again.accepted.cached_tokens >= CHUNK
    assert again.accepted.cached_tokens == CHUNK * len(setup.events(ev.BlockLoaded))
    assert cold.tokens == again.tokens
    assert ["one", "other", "one"] == setup.swaps()
    loaded = [event.fingerprint for event in setup.events(ev.ModelLoaded)]
    assert loaded[:2] == [event.fingerprint for event in setup.events(ev.ModelUnloaded)]
    assert ["one", "other", "one", "one"] == [
        said.accepted.model for said in (first, beside, again, cold)
    ]
    assert [*loaded, loaded[0]] == [
        said.accepted.fingerprint for said in (first, beside, again, cold)
    ]
    setup.verify()


async def test_the_memory_of_a_model_that_left_is_free(setup: Setup) -> None:
    """
    By MLX's own count, which is on record: none of the model's weights and none of its KV remain.
    """
    async with setup.serving() as server:
        before = server.statistics()
        for model in ("other", "one", "other"):
            await ask(server, to(model, OPENING))
            assert server.statistics().active_bytes >= server.statistics().weights_bytes

    left = [event.active_bytes for event in setup.events(ev.ModelUnloaded)]
    assert 3 == len(left)
    assert before.weights_bytes > 0
    assert max(left) - min(left) < before.weights_bytes // 100
    assert max(left) <= before.active_bytes - before.weights_bytes


async def disconnect(server: Server, command: Generate) -> None:
    """A client that sends a request and disconnects at once."""
    async with local(server).generate(command):
        pass


async def test_the_queue_is_fair(setup: Setup) -> None:
    """
    Requests for the loaded model that came before the first one for the other model go first. Then
    all that wait for the other model are admitted, ahead of later ones for the first: two swaps for
    four requests.
    """
    async with setup.serving() as server, contextlib.AsyncExitStack() as clients:
        entered = []
        for model, seed in (("one", 1), ("other", 2), ("one", 3), ("other", 4)):
            context = local(server).generate(to(model, OPENING, seed=seed))
            entered.append(await clients.enter_async_context(context))
        listed = {one.facts.model: one.waiting for one in server.models}
        assert {"one": 1, "other": 2} == listed
        for replies in entered:
            assert [reply async for reply in replies]

    assert [1, 2, 4, 3] == [event.seed for event in setup.events(ev.RequestReceived)]
    assert ["one", "other", "one"] == setup.swaps()
    ends = [event.kind for event in setup.events(ev.RequestFinished, ev.ModelUnloaded)]
    assert ["request_finished", "model_unloaded"] == ends[:2]
    setup.verify()


async def test_a_client_that_disconnects_causes_no_swap(setup: Setup) -> None:
    """
    A client that waits for the other model disconnects before its turn: no model is loaded, the
    cancellation is on record, and the requests after it for the loaded model are served.
    """
    async with (
        setup.serving() as server,
        engine_held(server) as go_on,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask, server, to("one", OPENING, seed=1))
        await wait_in_flight(server, 1)
        async with local(server).generate(to("other", OPENING)):
            nursery.start_soon(ask, server, to("one", OPENING, seed=2))
            await wait_in_flight(server, 3)
        go_on.set()

    assert ["one"] == setup.swaps()
    assert [] == setup.events(ev.ModelUnloaded)
    (rejected,) = setup.events(ev.RequestRejected)
    assert (499, "client_gone") == (rejected.status, rejected.code)
    assert [1, 2] == [event.seed for event in setup.events(ev.RequestReceived)]
    setup.verify()


async def test_a_count_times_out_and_has_a_queue(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A count times out like a request. If too many wait, the next one is refused and may be retried.
    Nothing is recorded of either.
    """
    loading, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def slow(directory: str) -> Any:
        token.run_sync_soon(loading.set)
        assert go_on.wait(60)
        return load_tokenizer(directory)

    monkeypatch.setattr(mlx_tokenizer, "load_tokenizer", slow)
    count = to("other", OPENING)
    async with setup.serving(limits=Limits(request_s=0.1, queue=1)) as server:

        async def late() -> None:
            with pytest.raises(TimedOut):
                await local(server).count(count)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await loading.wait()
            async with trio.open_nursery() as behind:
                behind.start_soon(late)
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(QueueFull):
                    await local(server).count(count)
            go_on.set()
        await server.drain()
        with pytest.raises(Stopping):
            await local(server).count(to("other", OPENING))
    assert [] == setup.events(ev.RequestRejected)


async def test_a_request_that_waits_for_its_model_gets_keep_alives(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Keep-alives while the other model is not loaded, and then a refusal because of the timeout.
    """
    async with setup.serving(limits=Limits(heartbeat_s=0.01, request_s=30.0)) as server:

        async def late() -> None:
            with pytest.raises(TimedOut):
                await ask(server, to("one", OPENING))

        async with engine_held(server) as go_on, trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await wait_in_flight(server, 1)
            async with local(server).generate(to("other", OPENING)) as replies:
                assert Waiting(queued=True, prefilled_tokens=0) == await anext(replies)
                monkeypatch.setattr(RequestContext, "is_over", True)
                with pytest.raises(TimedOut):
                    await anext(replies)
            go_on.set()
    (rejected,) = setup.events(ev.RequestRejected)
    assert (504, "timed_out") == (rejected.status, rejected.code)
    assert ["one"] == setup.swaps()


async def test_the_queue_is_bounded(setup: Setup) -> None:
    """
    As many answers may wait for a model as the queue allows. The next one is refused with a hint to
    retry, and that is on record.
    """
    serving = setup.serving(limits=Limits(queue=1))  # and two rows
    async with serving as server, contextlib.AsyncExitStack() as clients:
        for choices in (1, 2):
            command = to("other", OPENING, choices=choices)
            await clients.enter_async_context(local(server).generate(command))
        with pytest.raises(QueueFull) as caught:
            await disconnect(server, to("other", OPENING))
        assert caught.value.request is not None
    rejected = setup.events(ev.RequestRejected)
    assert [429, 499, 499] == [event.status for event in rejected]


async def test_more_answers_than_places(setup: Setup) -> None:
    """
    That is the client's mistake, whether the model that it names is loaded or not. If it is not,
    the request does not wait for it.
    """
    async with setup.serving(limits=Limits(queue=1)) as server:  # and two rows
        for name in ("one", "other"):
            with pytest.raises(TooManyAnswers, match="at most 3 answers"):
                await disconnect(server, attrs.evolve(to(name, OPENING), choices=4))
    assert ["one"] == setup.swaps()


async def test_a_model_whose_directory_is_broken(setup: Setup, tmp_path: Path) -> None:
    """
    The fault is found before the loaded model is unloaded: the client gets the error, it is on
    record, and nothing else changes. The model is not tried again for a while.
    """
    setup.other = shutil.copytree(setup.other, tmp_path / "broken")
    async with setup.serving() as server:
        (setup.other / "config.json").unlink()
        for _ in range(2):
            with pytest.raises(ModelNotLoaded) as caught:
                await ask(server, to("other", OPENING))
            assert "'other'" in caught.value.message
            assert str(tmp_path) not in caught.value.message
        assert 0 < caught.value.retry_after_s <= 30
        await ask(server, to("one", OPENING))

    (failed,) = setup.events(ev.ModelLoadFailed)
    assert ("other", True) == (failed.name, "config.json" in failed.reason)
    assert [503, 503] == [event.status for event in setup.events(ev.RequestRejected)]
    assert ["one"] == setup.swaps()
    setup.verify()


async def test_a_model_that_cannot_be_loaded(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    If a fault shows only during the load, the previous model is loaded again and continues with its
    blocks. Once the directory is repaired and the pause is over, the model is served.
    """
    monkeypatch.setattr(models_module, "PAUSE_S", 0.0)
    sound, setup.other = setup.other, shutil.copytree(setup.other, tmp_path / "broken")
    config = (setup.other / "config.json").read_text(encoding="utf-8")
    (setup.other / "config.json").write_text(
        config.replace('"num_hidden_layers": ', '"num_hidden_layers": 1'), encoding="utf-8"
    )
    async with setup.serving() as server:
        first = await ask(server, to("one", OPENING))
        with pytest.raises(ModelNotLoaded):
            await ask(server, to("other", OPENING))
        with trio.fail_after(60):
            while "loaded" != server.models[0].state:
                await trio.testing.wait_all_tasks_blocked()
        again = await ask(server, to("one", OPENING, first.text, "And then?"))
        assert "continuation" == again.accepted.path
        assert again.accepted.cached_tokens > 0
        shutil.copy(sound / "config.json", setup.other)
        await ask(server, to("other", OPENING))

    assert ["one", "one", "other"] == setup.swaps()
    assert 1 == len(setup.events(ev.ModelLoadFailed))
    setup.verify()


async def test_neither_model_can_be_loaded(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    No model is loaded then, and requests are refused with the reason. A repaired model is loaded on
    the next request for it.
    """
    monkeypatch.setattr(models_module, "PAUSE_S", 0.0)
    for name in ("one", "other"):
        setattr(setup, name, shutil.copytree(getattr(setup, name), tmp_path / name))
    async with setup.serving() as server:
        await ask(server, to("one", OPENING))
        configs = {}
        for directory in (setup.one, setup.other):
            configs[directory] = (directory / "config.json").read_text(encoding="utf-8")
            broken = configs[directory].replace('"num_hidden_layers": ', '"num_hidden_layers": 1')
            (directory / "config.json").write_text(broken, encoding="utf-8")
        for model in ("other", "one"):
            with pytest.raises(ModelNotLoaded):
                await ask(server, to(model, OPENING))
        assert ["not_loaded", "not_loaded"] == [model.state for model in server.models]
        assert 0 == server.statistics().weights_bytes
        for directory, config in configs.items():
            (directory / "config.json").write_text(config, encoding="utf-8")
        await ask(server, to("other", OPENING))

    assert ["one", "other"] == setup.swaps()
    assert ["other", "one"] == [event.name for event in setup.events(ev.ModelLoadFailed)]
    setup.verify()


async def test_a_stop_refuses_requests_in_the_queue(setup: Setup) -> None:
    """
    Requests that wait for a model are refused when the server stops; running ones are answered.
    """
    async with setup.serving() as server, trio.open_nursery() as nursery:
        running = trio.Event()

        async def run() -> None:
            await ask(server, to("one", OPENING))
            running.set()

        async with engine_held(server) as go_on:
            nursery.start_soon(run)
            await wait_in_flight(server, 1)
            async with local(server).generate(to("other", OPENING)) as replies:
                nursery.start_soon(server.drain)
                with pytest.raises(Stopping):
                    await anext(replies)
            with pytest.raises(Stopping):
                await disconnect(server, to("other", OPENING))
            go_on.set()
        await running.wait()

    assert ["one"] == setup.swaps()
    assert 1 == len(setup.events(ev.RequestFinished))
    assert isinstance(decode(setup.store.rows[-1]).event, ev.ServerStopped)
    setup.verify()


async def test_a_stop_does_not_wait_for_a_load(setup: Setup) -> None:
    """
    Requests and counts that wait for the model are refused. The journal ends with the result of the
    load and the stop, and nothing is recorded later. The next run continues.
    """
    go_on, began = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()

    def held(settings: Settings, *rest: Any) -> Any:
        if settings.model == str(setup.other):
            token.run_sync_soon(began.set)
            go_on.wait(60.0)
        return start_on_mlx(settings, *rest)

    setup.start_engine = held
    try:
        with trio.fail_after(60):
            async with setup.serving() as server, trio.open_nursery() as nursery:
                first = await ask(server, to("one", OPENING))
                nursery.start_soon(refused, ask, server, to("other", OPENING))
                await began.wait()
                nursery.start_soon(refused, local(server).count, to("other", OPENING))
                await trio.testing.wait_all_tasks_blocked()
                assert "loading" == server.models[1].state
                await server.drain()
        rows = len(setup.store.rows)
        before, threads = setup.swaps(), engines()
        assert 1 == len(threads)
    finally:
        go_on.set()
    for thread in threads:
        await trio.to_thread.run_sync(thread.join, 60.0)
    assert [] == engines()
    await trio.testing.wait_all_tasks_blocked()

    assert (rows, ["one"]) == (len(setup.store.rows), before)
    (failed,) = setup.events(ev.ModelLoadFailed)
    assert ("other", "the server stopped while it was loading") == (failed.name, failed.reason)
    ends = [event.kind for event in setup.events(ev.ModelUnloaded, ev.ModelLoadFailed)]
    assert ["model_unloaded", "model_load_failed"] == ends
    assert isinstance(decode(setup.store.rows[-1]).event, ev.ServerStopped)
    setup.verify()
    async with setup.serving() as server:
        again = await ask(server, to("one", OPENING, first.text, "And then?"))
        assert first.accepted.session == again.accepted.session
        assert again.accepted.cached_tokens > 0


def engines() -> list[threading.Thread]:
    """The engine threads that have not ended."""
    return [thread for thread in threading.enumerate() if thread.name == "cairn-engine"]


async def refused(ask_for: Any, *arguments: Any) -> None:
    """Call something that must be refused because the server stops."""
    with pytest.raises(Stopping):
        await ask_for(*arguments)


@pytest.mark.parametrize("step", ["write_blocks", "unload"])
async def test_a_stop_before_a_load(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A stop while the previous model is being unloaded: the next model is not loaded."""
    holder: Any = ModelServer if step == "write_blocks" else models_module
    before = getattr(holder, step)
    stopped = False

    async with setup.serving() as server, trio.open_nursery() as nursery:

        async def stops_there(*arguments: Any) -> None:
            nonlocal stopped
            await before(*arguments)
            if not stopped:
                stopped = True
                nursery.start_soon(server.drain)
                await trio.testing.wait_all_tasks_blocked()

        monkeypatch.setattr(holder, step, stops_there)
        await refused(ask, server, to("other", OPENING))

    assert stopped
    assert ["one"] == setup.swaps()
    assert [] == setup.events(ev.ModelLoadFailed)
    assert (step == "unload") == bool(setup.events(ev.ModelUnloaded))
    setup.verify()


async def test_a_named_session_outlives_its_model(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    A name that a client gives is the same session under each model, one for each tenant. A model
    reuses only what it computed itself. All of it can be replayed, each part on its model.
    """
    async with setup.serving() as server:
        said = [
            await ask(server, to(model, OPENING, session_name="mine"), tenant)
            for model, tenant in (
                ("one", "alice"),
                ("other", "alice"),
                ("other", "bob"),
                ("one", "alice"),
            )
        ]
    assert [0, 0, 0, 4 * CHUNK] == [one.accepted.cached_tokens for one in said]
    assert said[0].tokens == said[3].tokens
    assert said[1].tokens == said[2].tokens != said[0].tokens
    opened = [event.session for event in setup.events(ev.SessionOpened)]
    assert ["@alice/mine", "@bob/mine"] == opened
    setup.verify()
    capsys.readouterr()
    rows = list(setup.store.read())
    for session, models in (("@alice/mine", ["one", "other"]), ("@bob/mine", ["other"])):
        assert SAME == rerun(rows, session, None)
        prints = {event.name: event.fingerprint for event in setup.events(ev.ModelLoaded)}
        shown = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
        assert [prints[model] for model in models] == shown
    assert OTHER_FINGERPRINT == rerun(rows, "@alice/mine", str(setup.one))


async def test_tokens_are_counted_by_the_model_that_is_named(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    By its own template and tokenizer, which alone is loaded, once: a count swaps no model. After
    the model itself was loaded, its tokenizer is read again.
    """
    loads: list[str] = []

    def counted(directory: str) -> Any:
        loads.append(directory)
        return load_tokenizer(directory)

    monkeypatch.setattr(mlx_tokenizer, "load_tokenizer", counted)
    setup.other = shutil.copytree(setup.other, tmp_path / "other")
    request = to("other", OPENING, "So it is.", "And then?")
    async with setup.serving() as server:
        one = await local(server).count(attrs.evolve(request, requested_model="one"))
        template(setup.other, "{% for m in messages %}{{ m.content + m.content }}{% endfor %}")
        other = await local(server).count(request)
        assert (
            one
            < other
            == await local(server).count(attrs.evolve(request, requested_model="other-alias"))
        )
        assert [str(setup.other)] == loads
        assert "one" == server.facts.model
        assert ["one"] == setup.swaps()
        # A raw prompt, as text and as ids.
        raw = attrs.evolve(request, conversation=None, prompt=OPENING)
        assert await local(server).count(attrs.evolve(raw, requested_model="one")) == await local(
            server
        ).count(raw)
        assert 3 == await local(server).count(attrs.evolve(raw, prompt=(1, 2, 3)))
        bad = Conversation(messages=(Message(role="user", content="x"),), template={"messages": 1})
        with pytest.raises(PromptRefused):
            await local(server).count(attrs.evolve(request, conversation=bad))

        said = await ask(server, request)
        assert other == said.accepted.prompt_tokens == await local(server).count(request)
        assert one == await local(server).count(attrs.evolve(request, requested_model="one"))
        template(setup.other, "{% for m in messages %}{{ m.content }}{% endfor %}")
        await ask(server, to("one", OPENING))
        assert other > await local(server).count(request)

    assert [str(setup.other), str(setup.one), str(setup.other)] == loads
    assert ["one", "other", "one"] == setup.swaps()
    assert 2 == len(setup.events(ev.RequestReceived))
    assert [] == setup.events(ev.RequestRejected)


def template(directory: Path, text: str) -> None:
    """Give a model a different template."""
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings), encoding="utf-8")


async def test_a_few_tokenizers_stay_loaded(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two most recently used ones, whichever was loaded first."""
    loads: list[str] = []

    def counted(directory: str) -> Any:
        loads.append(directory)
        return load_tokenizer(directory)

    monkeypatch.setattr(mlx_tokenizer, "load_tokenizer", counted)
    one, other = setup.choices()
    third = attrs.evolve(other, entry=msgspec.structs.replace(other.entry, name="third"))
    async with setup.serving() as server:
        counter = TokenCounter(server.loaded.engine, Limits(), PromptThreads())
        for choice, is_loaded in ((one, 1), (other, 1), (one, 0), (third, 1), (one, 0), (other, 1)):
            before = len(loads)
            await counter.tokens(choice, to("", OPENING), "local")
            assert is_loaded == len(loads) - before


async def test_a_tokenizer_that_cannot_be_loaded(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The client gets the error, for a while without another try. No other request notices, and
    nothing is recorded. Then it is tried again.
    """
    setup.other = shutil.copytree(setup.other, tmp_path / "broken")
    files = {name: (setup.other / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    unknown = files["config.json"].replace(b'"model_type": "', b'"model_type": "un')
    breaks = {"config.json": unknown, "tokenizer.json": b"{}"}
    for name, broken in breaks.items():
        async with setup.serving() as server:
            (setup.other / name).write_bytes(broken)
            for _ in range(2):
                with pytest.raises(ModelNotLoaded) as caught:
                    await local(server).count(to("other", OPENING))
                assert 0 < caught.value.retry_after_s <= 30
                (setup.other / name).write_bytes(files[name])
    monkeypatch.setattr(token_count, "PAUSE_S", 0.0)
    async with setup.serving() as server:
        (setup.other / "config.json").unlink()
        with pytest.raises(ModelNotLoaded):
            await local(server).count(to("other", OPENING))
        (setup.other / "config.json").write_bytes(files["config.json"])
        assert 0 < await local(server).count(to("other", OPENING))
    assert ["one"] * 3 == setup.swaps()
    assert [] == setup.events(ev.ModelLoadFailed)


async def test_checks_that_wait_when_a_model_leaves_are_skipped(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Each skipped check has a row with the reason, before the model's own row, both when a different
    model is loaded and when the server stops.
    """
    monkeypatch.setattr(Activity, "upkeep_may_begin", False)  # so that none begins
    async with setup.serving(shadow_share=1.0) as server:
        for model in ("one", "one", "other"):
            await ask(server, to(model, OPENING))

    finished = [event.request for event in setup.events(ev.RequestFinished)]
    skipped = setup.events(ev.ShadowSkipped)
    assert [(request, "model_unloaded") for request in finished] == [
        (event.request, event.reason) for event in skipped
    ]
    kinds = (ev.ShadowSkipped, ev.ModelUnloaded, ev.ServerStopped)
    order = [event.kind for event in setup.events(*kinds)]
    skip = "shadow_skipped"
    assert [skip, skip, "model_unloaded", skip, "server_stopped"] == order
    setup.verify()


async def test_a_bias_of_a_token_that_the_model_does_not_know(setup: Setup) -> None:
    """Parameters that were read before the model was loaded are checked once it is."""
    strange = Sampling(temperature=0.0, logit_bias=((1 << 20, 1.0),))
    async with setup.serving() as server:
        with pytest.raises(PromptRefused, match="not a token id of this model"):
            await ask(server, to("other", OPENING, sampling=strange))


async def test_a_request_without_a_model_gets_the_default(setup: Setup) -> None:
    """Whichever model is loaded, a client that names no model always gets the same one."""
    async with setup.serving() as server:
        await ask(server, to("other", OPENING))
        for name in ("", "gpt-4"):
            assert "one" == (await ask(server, to(name, OPENING))).accepted.model


def turn(model: str, *said: str, previous: str | None, **changes: Any) -> Generate:
    """A request for the agent ``notes``; only its last message is new."""
    asked = (Message(role="user", content=said[-1]),)
    keep = Keep(previous=previous, asked=asked, note="", agent="notes")
    return to(model, *said, session_name=session_of("notes"), keep=keep, **changes)


async def test_an_agent_that_waits_for_its_model_is_busy(setup: Setup) -> None:
    """
    A second request for it is refused at once, for any model, without waiting, and the agent cannot
    be deleted. Its own request is served, and then the agent is free.
    """
    async with setup.serving() as server:
        await local(server).agents.create(NewAgent(name="notes", model="other"))
        async with (
            engine_held(server) as go_on,
            local(server).generate(turn("other", OPENING, previous=None)) as replies,
        ):
            for model in ("other", "one"):
                with pytest.raises(AgentBusy, match="answering another request"):
                    await disconnect(server, turn(model, "And?", previous=None))
            with pytest.raises(AgentBusy):
                await local(server).agents.delete("notes")
            assert [1] == [one.waiting for one in server.models if one.waiting]
            go_on.set()
            assert [reply async for reply in replies]
        agent = server.loaded.agents.agents.find("notes", "local")
        assert agent is not None
        await ask(server, turn("one", "And?", previous=agent.head))
        facts = local(server).agents.one("notes")
        assert facts is not None
        assert 2 == facts.turns

    assert ["one", "other", "one"] == setup.swaps()
    assert [] == setup.events(ev.RequestRejected)
    setup.verify()


async def test_an_agent_whose_request_leaves_the_queue_is_free(setup: Setup) -> None:
    """
    However the request ends: its client disconnects, the journal or the queue is full, or what was
    read before the model was loaded does not fit the model.
    """
    async with setup.serving(limits=Limits(queue=0)) as server:  # two rows wait
        await local(server).agents.create(NewAgent(name="notes", model="other"))
        async with engine_held(server), contextlib.AsyncExitStack() as clients:
            setup.store.full = True
            server.loaded.sequencer.append(ev.OperatorActed(action="accept_unstable", detail=""))
            await until(server, journal_stalled=True)
            with pytest.raises(CannotRecord):
                await disconnect(server, turn("other", OPENING, previous=None))
            setup.store.full = False
            await until(server, journal_stalled=False)
            await disconnect(server, turn("other", OPENING, previous=None))
            for _ in range(2):
                await clients.enter_async_context(local(server).generate(to("other", OPENING)))
            with pytest.raises(QueueFull):
                await disconnect(server, turn("other", OPENING, previous=None))
        strange = Sampling(temperature=0.0, logit_bias=((1 << 20, 1.0),))
        with pytest.raises(PromptRefused, match="not a token id of this model"):
            await ask(server, turn("other", OPENING, previous=None, sampling=strange))
        await ask(server, turn("one", OPENING, previous=None))
        assert await local(server).agents.delete("notes")


async def test_an_agent_changes_its_model(setup: Setup) -> None:
    """
    Its history continues under the model that a request names, and it can be deleted while either
    model is loaded.
    """
    async with setup.serving() as server:
        await local(server).agents.create(NewAgent(name="notes", model="one"))
        first = await ask(server, turn("one", OPENING, previous=None))
        head = first.accepted.request
        second = await ask(server, turn("other", OPENING, first.text, "And?", previous=head))
        assert ("one", "other") == (first.accepted.model, second.accepted.model)
        assert first.accepted.session == second.accepted.session
        found = await local(server).agents.history("notes")
        assert found is not None
        assert [OPENING, "And?"] == [one.asked[0].content for one in found.turns]
        assert ["agent/notes"] == [used.session for used in local(server).contexts(3)]
        await local(server).agents.delete("notes")
        assert () == local(server).agents.all()

    assert [second.accepted.session] == [e.session for e in setup.events(ev.SessionClosed)]
    setup.verify()


async def test_a_stop_while_the_model_of_an_agent_is_unloaded(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    An agent that is deleted meanwhile stays deleted. Its session remains, because it holds its slab
    until the journal records that the model was unloaded.
    """
    before = loading.unload

    async with setup.serving() as server, trio.open_nursery() as nursery:
        await local(server).agents.create(NewAgent(name="notes", model="one"))
        said = await ask(server, turn("one", OPENING, previous=None))
        deleted = []

        async def delete() -> None:
            deleted.append(await local(server).agents.delete("notes"))

        async def stops_first(*arguments: Any) -> None:
            nursery.start_soon(delete)
            await trio.testing.wait_all_tasks_blocked()
            assert [] == deleted
            nursery.start_soon(server.drain)
            await trio.testing.wait_all_tasks_blocked()
            await before(*arguments)

        monkeypatch.setattr(models_module, "unload", stops_first)
        await refused(ask, server, to("other", OPENING))

    assert [True] == deleted
    assert [] == setup.events(ev.SessionClosed, ev.InvariantViolated)
    setup.verify()
    async with setup.serving() as server:
        assert () == local(server).agents.all()
        await local(server).agents.create(NewAgent(name="notes", model="one"))
    assert [said.accepted.session] == [e.session for e in setup.events(ev.SessionClosed)]
    setup.verify()
