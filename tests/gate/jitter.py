"""
A random history of a server that has too little of everything, and what each answer must be.

``Script`` draws the requests from a seed. The expected answers come from a server that reuses
nothing and has room for all; the next turn of a conversation continues from them. So a script and
its expected answers are complete before the server under test starts. ``Setup`` is that server,
over all its runs: a journal and a folder of block files.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from cairn.actors.errors import Broken, NoMemory, Stopping
from cairn.actors.requests.limits import Limits
from cairn.actors.requests.messages import Accepted, Delta, Finished, Generate, TokenInfo
from cairn.actors.server import Server
from cairn.engine.answer.parts import AnswerPart
from cairn.engine.prompt.template import Conversation, Message, message_of
from cairn.engine.sampling import Sampling
from cairn.journal import events as ev
from cairn.journal.lifecycle import SessionState
from cairn.journal.replay import Finding, replay
from cairn.journal.rows.codec import Row, decode
from cairn.journal.rows.store import MemoryStore
from tests.support.in_process_server import Said, ask, generate, serving, text_of

C = 64
BLOCK_BYTES = 256 * 1024
"""A chunk's KV in the model of random weights."""

ROUND = 150
"""
The most requests of one history. Larger numbers are several histories, each with its own seed.
"""
Window = tuple[int, int] | None

SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_p=0.95, top_k=200, min_p=0.001),
    Sampling(
        temperature=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((100, 4.0), (200, -100.0)),
    ),
)
STONES = ("granite", "slate", "lichen", "summit", "saddle", "path", "cairn", "rain", "scree")
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weigh_stone", "arguments": {"stone": "slate"}},
}
KINDS = {"ids": 24, "cut": 18, "turn": 36, "again": 10, "cold": 4, "named": 8}
"""How many of a hundred requests are of each kind; see ``Script``."""

TENANTS = ("local", "local", "local", "local", "neighbour")
DAY_S = 86_400

LEAVES = (-1, 0, 0, 0, 1, 3, 8)
"""When clients disconnect early, of fifty each; see ``Asked.leaves``."""


# --- what is asked --------------------------------------------------------------------------------


@attrs.frozen
class Asked:
    """
    A request, and its expected answer.

    Attributes:
        leaves: its client disconnects after so many pieces of the answer; with 0 as soon as a
            session has taken it, with -1 before that. With None it stays to the end.
    """

    command: Command
    due: Said
    leaves: int | None = None


@attrs.frozen
class Together:
    """
    Requests at the same time, or a single one.

    Attributes:
        in_turn: whether each is sent when a session has taken the one before.
    """

    asked: tuple[Asked, ...]
    in_turn: bool = False


@attrs.frozen
class Rest:
    """Wait until the server has nothing left to do."""


@attrs.frozen
class Restart:
    """
    The server ends, and another one starts on its journal and files.

    Attributes:
        asked: requests that are in flight then.
        killed: how many of them have begun to be answered when the server is killed; None if it is
            stopped, when a session has taken the first.
    """

    asked: tuple[Asked, ...]
    killed: int | None = None


Act = Together | Rest | Restart


@attrs.frozen(kw_only=True)
class Command(Generate):
    """A request and its tenant."""

    tenant: str


class Truth:
    """
    The answers of a server that reuses nothing, has room for all and serves one request at a time.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[str, Said] = {}

    async def of(self, command: Command) -> Said:
        """The answer to a request."""
        cold = attrs.evolve(command, cache_prompt=False, session_name=None)
        said = self._known.get(repr(cold))
        if said is None:
            said = self._known[repr(cold)] = await ask(self._server, cold, cold.tenant)
            assert 0 == said.accepted.cached_tokens
        return said


class Script:
    """
    Draws what is done, from a seed. The requests are of these kinds:

    - ids: a raw prompt, which is the beginning of one of three that share theirs. It is cut
      anywhere, often at the end of a chunk or a token next to it, and new tokens may follow.
    - cut: the first messages of one of three conversations that share theirs.
    - turn: the next turn of a conversation, which continues from the answer before.
    - again, cold: an earlier request, unchanged or on the cold path.
    - named: one of the first two, in a session that it names.
    """

    def __init__(self, seed: int, truth: Truth) -> None:
        self._chance = random.Random(seed)
        self._besides = random.Random(f"besides {seed}")
        self._truth = truth
        self._past: list[Command] = []
        whole = self._ids(12 * C)
        self._prompts = [whole, *(whole[: n * C] + self._ids((12 - n) * C) for n in (3, 7))]
        told = self._telling(11)
        self._tellings = [told, *(told[:n] + self._telling(11)[n:] for n in (3, 7))]
        self._talks = [self._opening() for _ in range(5)]

    async def acts(self, requests: int) -> list[Act]:
        """
        A history of about this many requests: in random order, alone or at once, with clients that
        leave and servers that end.
        """
        chance = self._chance
        kinds = [kind for kind, share in KINDS.items() for _ in range(share * requests // 100)]
        chance.shuffle(kinds)
        leaves: list[int | None] = [*LEAVES] * -(-requests // 50)
        leaves += [None] * (len(kinds) - len(leaves))
        chance.shuffle(leaves)
        acts: list[Act] = []
        while kinds:
            count = chance.choice((1, 1, 1, 2, 3, 5))
            some = [await self._asked(kinds.pop(), leaves.pop()) for _ in kinds[-count:]]
            acts.append(Together(tuple(some)))
            if chance.random() < 0.3:
                acts.append(Rest())
        for _ in range(max(1, requests // 50)):
            for rare in (await self._one_after_the_other(), *(await self._ends())):
                place = chance.randrange(len(acts) // 4, len(acts))
                acts[place:place] = rare
        return acts

    async def _one_after_the_other(self) -> list[Act]:
        """A client that does not wait for the end of a long answer, so that its session is busy."""
        talk = self._opening()
        first, *both = [await self._turn(talk, None, long=True) for _ in range(3)]
        return [Together((first,)), Rest(), Together(tuple(both), in_turn=True)]

    async def _ends(self) -> list[list[Act]]:
        """Two servers that end while requests are in flight: one is stopped, one killed."""
        some = [await self._asked("ids", None) for _ in range(self._chance.randint(1, 4))]
        more = [await self._asked("turn", None) for _ in range(self._chance.randint(1, 4))]
        killed = self._chance.randint(1, len(some))
        return [[Restart(tuple(more))], [Restart(tuple(some), killed=killed)]]

    async def _asked(self, kind: str, leaves: int | None) -> Asked:
        if kind == "turn":
            return await self._turn(self._chance.choice(self._talks), leaves)
        command = self._command(kind)
        self._past.append(command)
        return Asked(command, await self._truth.of(command), leaves)

    async def _turn(self, talk: list[Message], leaves: int | None, *, long: bool = False) -> Asked:
        if len(talk) > 9:
            talk[:] = self._opening()
        talk.append(Message(role="user", content=self._words(25)))
        template = self._chance.choice(({}, {}, {"enable_thinking": False}))
        command = self._drawn(Conversation(messages=tuple(talk), template=template))
        if long:
            plain = Conversation(messages=tuple(talk))
            command = attrs.evolve(command, conversation=plain, max_tokens=80, stop=())
        due = await self._truth.of(command)
        talk.append(message_of(due.parts))
        self._past.append(command)
        return Asked(command, due, leaves)

    def _command(self, kind: str) -> Command:
        chance = self._chance
        if kind == "again" and self._past:
            return chance.choice(self._past)
        if kind == "cold" and self._past:
            return attrs.evolve(chance.choice(self._past), cache_prompt=False)
        if kind == "named":
            of = self._command(chance.choice(("ids", "cut")))
            return attrs.evolve(of, session_name=chance.choice(("one", "two")))
        if kind == "cut":
            told = chance.choice(self._tellings)
            ends = [n for n, message in enumerate(told, 1) if message.role in ("user", "tool")]
            return self._drawn(Conversation(messages=told[: chance.choice(ends)]))
        whole = chance.choice(self._prompts)
        edge = chance.randint(1, len(whole) // C) * C + chance.choice((-1, 0, 0, 1))
        cut = chance.choice((edge, edge, chance.randint(1, len(whole))))
        ids = whole[:cut] + self._ids(chance.choice((0, 0, 0, 1, 4)))
        return attrs.evolve(self._drawn(Conversation(messages=())), conversation=None, prompt=ids)

    def _drawn(self, conversation: Conversation) -> Command:
        chance = self._chance
        drawn = generate(
            conversation,
            sampling=chance.choice(SAMPLINGS),
            seed=chance.randrange(4),
            max_tokens=chance.choice((1, 6, 12, 18, 24)),
            stop=chance.choice(((), (), (), ("e",))),
            top_logprobs=3,
        )
        fields = {name: getattr(drawn, name) for name in attrs.fields_dict(Generate)}
        return Command(**fields, tenant=self._besides.choice(TENANTS))

    def _opening(self) -> list[Message]:
        return [Message(role="system", content="You weigh stones. " + self._words(20))]

    def _telling(self, length: int) -> tuple[Message, ...]:
        """A conversation as a client sends it, with reasoning and calls of a tool."""
        told = self._opening()
        while len(told) < length:
            told.append(Message(role="user", content=self._words(20)))
            if len(told) % 4 == 0:
                told.append(
                    Message(
                        role="assistant",
                        content="",
                        reasoning=self._words(15),
                        tool_calls=(CALL,),
                    )
                )
                told.append(Message(role="tool", content=self._words(15), tool_call_id="call_1"))
            told.append(Message(role="assistant", content=self._words(15)))
        return tuple(told[:length])

    def _words(self, count: int) -> str:
        chance = self._chance
        return " ".join(f"{chance.choice(STONES)} {chance.randrange(100)}" for _ in range(count))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(300, 2000) for _ in range(count))


# --- what is heard --------------------------------------------------------------------------------


@attrs.define
class Heard:
    """
    What a client received for a request, until it disconnected.

    Attributes:
        refused: for lack of memory, so that it may be sent again.
        broken: the bug id that it got instead of an answer, or of the rest of one.
        taken: set when a session has taken it, or will not.
        begun: set when the first piece of the answer has come, or will not come.
    """

    accepted: Accepted | None = None
    parts: list[AnswerPart] = attrs.field(factory=list)
    tokens: list[TokenInfo] = attrs.field(factory=list)
    finished: Finished | None = None
    refused: bool = False
    broken: str | None = None
    taken: trio.Event = attrs.field(factory=trio.Event)
    begun: trio.Event = attrs.field(factory=trio.Event)


async def hear(server: Server, asked: Asked, heard: Heard) -> None:
    """Ask, and receive the answer until the client disconnects."""
    pieces = 0
    try:
        async with server.for_tenant(asked.command.tenant).generate(asked.command) as replies:
            if asked.leaves == -1:
                return
            async for reply in replies:
                match reply:
                    case Accepted():
                        heard.accepted = reply
                        heard.taken.set()
                    case Delta():
                        heard.parts.extend(reply.parts)
                        heard.tokens.extend(reply.tokens)
                        heard.begun.set()
                        pieces += 1
                    case Finished():
                        heard.finished = reply
                    case _:
                        continue
                if heard.finished is None and pieces == asked.leaves:
                    return
    except NoMemory:
        heard.refused = True
    except Stopping:
        pass  # it changed nothing, and no token was received
    except Broken as bug:
        heard.broken = bug.bug_id
    finally:
        heard.taken.set()
        heard.begun.set()


def difference(asked: Asked, heard: Heard) -> str | None:
    """
    How the received replies differ from the expected answer, bit for bit; None if they do not.
    """
    due = asked.due
    for place, (mine, other) in enumerate(zip(due.tokens, heard.tokens, strict=False)):
        if mine != other:
            return f"token {place} is {other}, and {mine} is due"
    text = text_of(heard.parts)
    if heard.finished is None:
        cut = len(heard.tokens) <= len(due.tokens) and due.text.startswith(text)
        return None if cut else f"the answer began with {text!r}, and {due.text!r} is due"
    whole = (due.tokens, due.text, due.finished.finish_reason)
    said = (tuple(heard.tokens), text, heard.finished.finish_reason)
    return None if whole == said else f"the answer was {text!r}, and {due.text!r} is due"


# --- the server -----------------------------------------------------------------------------------


def _checks(server: Server) -> bool:
    """Whether a shadow check runs, or could begin."""
    shadow = server.loaded.shadow
    return shadow is not None and shadow.has_work


@attrs.define
class Setup:
    """
    A server with too little of everything, over all its runs.

    Attributes:
        rows: the beginning of the journal: that of a server that has tested itself.
        seed: determines the limits of each run.
        window: what a token attends to, see ``Settings.window``.
        block_bytes: of a chunk's KV.
        heard: what was received for each request, in the order in which they were sent.
    """

    model: Path
    folder: Path
    rows: Sequence[Row]
    seed: int
    window: tuple[int, int] | None = None
    block_bytes: int = BLOCK_BYTES
    heard: list[tuple[Asked, Heard]] = attrs.field(factory=list)
    store: MemoryStore = attrs.field(init=False)
    _chance: random.Random = attrs.field(init=False)
    _besides: random.Random = attrs.field(init=False)
    _moved: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.store = MemoryStore(self.rows)
        self._chance = random.Random(self.seed)
        self._besides = random.Random(f"besides {self.seed}")

    async def live(self, acts: Sequence[Act]) -> None:
        """Run a history, and wait until the server is idle."""
        left: Sequence[Act] | None = [*acts, Rest()]
        while left:
            left = await self._life(left)

    async def _life(self, acts: Sequence[Act]) -> Sequence[Act]:
        """One run of the server. Returns what is left to do after it."""
        kill, rows, left = trio.CancelScope(), None, iter(acts)
        async with trio.open_nursery() as staying:
            with kill:
                is_last = not any(isinstance(act, Restart) for act in acts)
                settings = self.random_settings(is_last)
                async with serving(self.model, self.store, **settings) as server:
                    server.observe(self._moves)
                    for act in left:
                        match act:
                            case Rest():
                                await self._rest(server)
                            case Together():
                                await self._together(server, act)
                            case Restart(killed=None):
                                first, *_ = self._begin(server, act.asked, staying)
                                await first.taken.wait()
                                break
                            case Restart():
                                async with trio.open_nursery() as clients:
                                    heard = self._begin(server, act.asked, clients)
                                    for one in heard[: act.killed]:
                                        await one.begun.wait()
                                    rows = len(self.store.rows)
                                    kill.cancel()
                                await trio.lowlevel.checkpoint()  # all may have had their answers
                    if is_last:
                        await self._check_all(server)
        if rows is not None:
            # A killed server commits nothing more. This one runs in a thread, which may have.
            del self.store.rows[rows:]
        return tuple(left)

    def random_settings(self, is_last: bool) -> dict[str, Any]:
        """
        The limits of one run: two or three slabs for four decoding requests, memory for a part of
        one prompt's blocks, and files for not many more. The last one checks all its answers.
        """
        chance = self._chance
        share = self._besides.choice((0.0, 0.5, 1.0))
        return {
            "decode_rows": 4,
            "pool_slabs": chance.choice((2, 2, 3)),
            "blocks_bytes": chance.choice((5, 8, 12)) * self.block_bytes,
            "blocks_folder": self.folder,
            "disk_bytes": chance.choice((16, 32, 48)) * (self.block_bytes + 4096),
            "prewarm": chance.random() < 0.8,
            "limits": Limits(
                sessions=12,
                drain_s=300,
                slab_idle_s=chance.choice((0.0, 60.0)),
                ttl_s=self._besides.choice((0, 2, DAY_S, DAY_S, DAY_S, DAY_S)),
            ),
            "shadow_share": 1.0 if is_last else share,
            "window": self.window,
        }

    async def _check_all(self, server: Server) -> None:
        """Close the idle sessions, so that there are slabs to check the answers that still wait."""
        for session in tuple(server.loaded.sequencer.state.sessions):
            await server.loaded.sessions.close_session(session, "the history is over")
        await self._rest(server)

    async def _together(self, server: Server, act: Together) -> None:
        heard: list[Heard] = []
        async with trio.open_nursery() as clients:
            for asked in act.asked:
                heard += self._begin(server, [asked], clients)
                if act.in_turn:
                    await heard[-1].taken.wait()
        for asked, one in zip(act.asked, heard, strict=True):
            if one.refused:
                await self._rest(server)
                async with trio.open_nursery() as clients:
                    (again,) = self._begin(server, [asked], clients)
                assert not again.refused, (
                    "refused for lack of memory, with no other request in flight"
                )

    def _moves(self, recorded: ev.Recorded) -> None:
        self._moved.unpark_all()

    def _begin(self, server: Server, some: Sequence[Asked], clients: trio.Nursery) -> list[Heard]:
        """Send requests, and have the clients receive."""
        new = [(asked, Heard()) for asked in some]
        for asked, heard in new:
            clients.start_soon(hear, server, asked, heard)
        self.heard += new
        return [heard for _, heard in new]

    async def _rest(self, server: Server) -> None:
        """
        Wait until no request is in flight, no session is at work, and no answer can be checked.
        Stop waiting if a bug has closed admission, because that ends all three; the journal has the
        bug.
        """
        resting = {
            str(life) for life in (SessionState.IDLE, SessionState.COLD, SessionState.QUARANTINED)
        }
        with trio.fail_after(600):
            while True:
                now = server.statistics()
                if now.admission_bug is not None:
                    return
                idle = not now.queued and not now.running and set(now.sessions) <= resting
                if idle and not _checks(server):
                    return
                # A request that met a bug before a session took it leaves no event.
                with trio.move_on_after(1):
                    await self._moved.park()

    # --- what happened ------------------------------------------------------------------------

    def differences(self) -> list[str]:
        """The received answers that are wrong, each with its place among the requests."""
        found = [(place, difference(*one)) for place, one in enumerate(self.heard)]
        return [f"request {place}: {what}" for place, what in found if what is not None]

    def unexplained(self) -> list[str]:
        """Requests whose clients received something that is not in the journal."""
        drawn: dict[str, list[float]] = {}
        for event in (decode(row).event for row in self.store.rows):
            if isinstance(event, ev.CacheExtended) and event.request is not None:
                drawn.setdefault(event.request, []).extend(event.logprobs)
        return [
            f"request {heard.accepted.request} has tokens that are not on record"
            for _, heard in self.heard
            if heard.accepted is not None
            for known in [drawn.get(heard.accepted.request, [])]
            if known[: len(heard.tokens)] != [token.logprob for token in heard.tokens]
        ]

    def findings(self) -> tuple[Finding, ...]:
        """The findings of a replay of the journal."""
        return tuple(replay(self.store.read()).findings)

    def happened(self) -> Counter[str]:
        """How often each kind of event is in the journal, with its reason if it has one."""
        counts: Counter[str] = Counter()
        for event in (decode(row).event for row in self.store.rows):
            counts[event.kind] += 1
            match event:
                case ev.PathSelected():
                    counts[event.reason or event.path] += 1
                    counts["reused tokens"] += event.reused_tokens
                    counts["tokens used ahead"] += event.prewarmed_tokens
                case ev.RequestReceived():
                    counts["prompt tokens"] += event.prompt_tokens
                case ev.ShadowEnded():
                    counts[f"shadow: {event.result}"] += 1
                case ev.SessionClosed():
                    counts[f"closed: {event.reason}"] += 1
                case ev.RequestCancelled():
                    counts[f"cancelled in {event.stage}"] += 1
                case ev.SlabReleased():
                    counts[f"slab: {event.reason}"] += 1
                case _:
                    pass
        return counts


def begun(model: Path, **changes: Any) -> list[Row]:
    """The journal of a server that has served nothing, with these settings."""
    store = MemoryStore()

    async def main() -> None:
        async with serving(model, store, decode_rows=4, **changes):
            pass

    trio.run(main)
    return store.rows


def written(
    model: Path, empty: list[Row], seed: int, requests: int, window: Window = None
) -> list[Act]:
    """A history, and the expected answer to each of its requests."""

    async def main() -> list[Act]:
        store = MemoryStore(empty)
        serves = serving(model, store, decode_rows=4, prewarm=False, window=window)
        async with serves as cold:
            return await Script(seed, Truth(cold)).acts(requests)

    return trio.run(main)


def lived(
    model: Path,
    empty: list[Row],
    folder: Path,
    acts: Sequence[Act],
    seed: int,
    window: Window = None,
    block_bytes: int = BLOCK_BYTES,
) -> Setup:
    """A setup after a history."""
    setup = Setup(model, folder, empty, seed, window, block_bytes)
    trio.run(setup.live, acts)
    return setup


def wrong(setup: Setup) -> list[str]:
    """Answers that differ from the cold ones or from the journal, and the journal's findings."""
    found = [f"row {one.position}: {one.invariant}: {one.message}" for one in setup.findings()]
    return [*setup.differences(), *setup.unexplained(), *found]
