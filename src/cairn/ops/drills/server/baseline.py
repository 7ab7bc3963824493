"""The answers of an undamaged server, which drills compare with."""

from __future__ import annotations

from pathlib import Path

import attrs

from cairn.ops.drills.server.client import Answer
from cairn.ops.drills.server.conversation import Bystander, victim_first
from cairn.ops.drills.server.private_server import BLOCK_TOKENS, private_server


@attrs.frozen
class Baseline:
    """
    The answers of an undamaged server. By P1 they do not depend on what else was served.

    Attributes:
        victim: to the victim's first request.
        bystander: to the bystander's three turns.
    """

    victim: Answer
    bystander: tuple[Answer, Answer, Answer]

    def is_recomputed(self, answer: Answer | None) -> bool:
        """
        Whether an answer equals the victim's first one and no block was reused for it. All prompts
        begin with the same few tokens, so it may match another conversation in these.
        """
        if answer is None or answer.cached_tokens is None:
            return False
        return answer.bits == self.victim.bits and answer.cached_tokens < BLOCK_TOKENS


async def record_baseline(directory: Path, model: Path) -> Baseline:
    """Hold the conversations on an undamaged server. One baseline serves for all drills."""
    async with private_server(directory, model) as private:
        ask, bystander = private.client.ask, Bystander()
        victim = await ask(victim_first())
        first = await ask(bystander.first())
        second = await ask(bystander.beside(first))
        third = await ask(bystander.after(second))
    return Baseline(victim, (first, second, third))
