"""
Clients of a simulated server. Each draws what it does from a seed of its own, and compares what it
receives with what the disk holds at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import attrs
import trio

from cairn.actors.errors import Broken, RefusalError, TimedOut
from cairn.actors.requests.messages import Accepted, Delta, Finished, Generate, Keep
from cairn.actors.server import Server
from cairn.engine.answer.parts import AnswerPart
from cairn.engine.prompt.template import Conversation, Message, message_of, prompt_ids
from cairn.engine.sampling import Sampling
from tests.simulation.disk import SimulatedDisk
from tests.simulation.fake import SimulatedTokenizer, answer_ids

TENANTS = ("alice", "bob")
_WORDS = ("slate", "basalt", "marble", "chalk", "flint", "granite", "gneiss", "tuff")


class Wrong(AssertionError):
    """A client saw what must not be."""


@attrs.define
class World:
    """
    What clients share.

    Attributes:
        is_patient: whether requests may take far longer than any of them needs.
        crashed: whether the server's machine is down: what a client receives afterwards counts for
            nothing.
        answers: how many answers clients have read to their end.
        refused: how many requests were refused.
    """

    disk: SimulatedDisk
    is_patient: bool
    crashed: bool = False
    answers: int = 0
    refused: int = 0


@attrs.define
class Client:
    """
    A client with some conversations, which it continues, edits, repeats or leaves. It may share
    them with others of its tenant.

    Attributes:
        pauses: how long it waits between its requests, as a factor.
    """

    server: Server
    world: World
    random: Random
    name: str
    tenant: str
    pauses: float
    _histories: list[tuple[Message, ...]]

    async def run(self, requests: int) -> None:
        """Send so many requests, one after the other."""
        for _ in range(requests):
            pause = self.random.choice((0, 0, 0.5, 5, 40)) * self.random.random()
            await trio.sleep(pause * self.pauses)
            if self.world.crashed:
                return
            command = self._command()
            if self.random.random() < 0.1:
                await self._count(command)
                continue
            leave_after = None
            if self.random.random() < 0.25:
                leave_after = self.random.random() ** 2 * 3
            with trio.move_on_after(float("inf") if leave_after is None else leave_after):
                await self._ask(command)

    async def _count(self, command: Generate) -> None:
        assert command.conversation is not None
        try:
            tokens = await self.server.for_tenant(self.tenant).count(command)
        except RefusalError:
            return
        if tokens != len(prompt_ids(SimulatedTokenizer(), command.conversation)):
            raise Wrong("a prompt was counted wrong")

    async def _ask(self, command: Generate) -> None:
        parts: list[AnswerPart] = []
        ids: dict[int, list[int]] = {}
        requests: dict[int, str] = {}
        finished: set[int] = set()
        try:
            async with self.server.for_tenant(self.tenant).generate(command) as replies:
                async for reply in replies:
                    if self.world.crashed:
                        return
                    match reply:
                        case Accepted():
                            requests[reply.choice] = reply.request
                            self._check_accepted(reply, command)
                        case Delta():
                            ids.setdefault(reply.choice, []).extend(t.id for t in reply.tokens)
                            if reply.choice == 0:
                                parts.extend(reply.parts)
                            self._check_ids(requests[reply.choice], ids[reply.choice])
                        case Finished():
                            finished.add(reply.choice)
                            self._check_finished(requests[reply.choice])
                            self._check_answer(command, ids.get(reply.choice, []), reply)
                        case _:
                            pass
                    if self.random.random() < 0.02:
                        await trio.sleep(3)  # reads slowly
        except Broken as broken:
            if broken.bug_id not in self.world.disk.bugs and not self.world.crashed:
                raise Wrong("a bug was announced before it was committed") from broken
            return
        except TimedOut as over:
            if self.world.is_patient:
                raise Wrong("a request timed out that nothing held up") from over
            self.world.refused += 1
            return
        except RefusalError:
            self.world.refused += 1
            return
        if finished != set(range(command.choices)):
            raise Wrong(f"{command.choices} answers were asked for, and {finished} came")
        self.world.answers += len(finished)
        assert command.conversation is not None
        self._histories.append((*command.conversation.messages, message_of(parts)))

    # --- what to ask for -------------------------------------------------------------------------

    def _command(self) -> Generate:
        random = self.random
        messages = self._messages()
        keep = None
        if random.random() < 0.2:
            keep = Keep(previous=None, asked=messages[-1:], note="", texts={"note": self.name})
        return Generate(
            protocol="test",
            conversation=Conversation(messages=messages),
            prompt=None,
            sampling=Sampling(temperature=0.0),
            seed=1,
            max_tokens=random.choice((0, 1, 2, 5, 11, 30)),
            top_logprobs=0,
            session_name=random.choice((None, None, None, None, f"{self.name}-named", "shared")),
            cache_prompt=random.random() > 0.1,
            cache_mode=random.choice(("full", "full", "full", "prefix")),
            ttl_s=random.choice((None, None, 2, 20)),
            choices=random.choice((1, 1, 1, 1, 3)),
            keep=keep,
        )

    def _messages(self) -> tuple[Message, ...]:
        random = self.random
        question = Message(role="user", content=self._text(12))
        kind = random.random()
        if self._histories and kind < 0.6:
            return (*random.choice(self._histories[-3:]), question)
        if self._histories and kind < 0.7:
            before = random.choice(self._histories)
            return (*before[: len(before) // 2 * 2 or 1][:-1], question)
        # Prompts of different clients begin alike, so that blocks are shared and prefixes joined.
        system = Message(role="system", content=" ".join(_WORDS[: random.choice((1, 3, 8))] * 3))
        return (system, question) if random.random() < 0.8 else (question,)

    def _text(self, most: int) -> str:
        return " ".join(self.random.choice(_WORDS) for _ in range(self.random.randrange(1, most)))

    # --- what must hold --------------------------------------------------------------------------

    def _check_accepted(self, reply: Accepted, command: Generate) -> None:
        if reply.request not in self.world.disk.accepted:
            raise Wrong("a decision was announced before it was committed")
        assert command.conversation is not None
        expected = len(prompt_ids(SimulatedTokenizer(), command.conversation))
        if reply.prompt_tokens != expected or reply.cached_tokens > expected:
            raise Wrong("a prompt of other tokens was announced")

    def _check_ids(self, request: str, ids: Sequence[int]) -> None:
        if self.world.disk.emitted[request][: len(ids)] != ids:
            raise Wrong("tokens were sent before they were committed, or others than these")

    def _check_finished(self, request: str) -> None:
        if request not in self.world.disk.finished:
            raise Wrong("an end was announced before it was committed")

    def _check_answer(self, command: Generate, ids: Sequence[int], reply: Finished) -> None:
        assert command.conversation is not None
        prompt = prompt_ids(SimulatedTokenizer(), command.conversation)
        expected = answer_ids(prompt, command.max_tokens or 0)
        if list(ids) != expected:
            raise Wrong(f"an answer is {ids}, and alone it would be {expected}")
        if reply.completion_tokens != len(expected) or reply.prompt_tokens != len(prompt):
            raise Wrong("other tokens were billed than were sent")
