"""Pebble's shapes, and the stages of their training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Final, TypeAlias

import attrs

from cairn_pebble import dialogues
from cairn_pebble.dialogues import Dialogue
from cairn_pebble.texts.everyday import chatter, everyday, near_miss, not_told
from cairn_pebble.texts.first_messages import first_messages
from cairn_pebble.texts.plain_tools import tool_use
from cairn_pebble.texts.words import Split
from cairn_pebble.texts.written_tools import written_tools

Draw: TypeAlias = Callable[[Random, Split], Dialogue]
_WRITTEN_SIZE: Final = "about two million"
"""As the texts have it."""
ADDED_TOKENS: Final = 96
"""How many tokens ``vocabulary.py`` adds: as many as 8 MB have room for."""


@attrs.frozen(kw_only=True)
class Shape:
    """The model: a Qwen3 with tied embeddings."""

    hidden_size: int = 192
    layers: int = 5
    intermediate_size: int = 384
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 32
    vocab_size: int = 1536
    rope_theta: float = 100_000.0
    max_position_embeddings: int = 65_536


@attrs.frozen(kw_only=True)
class Packing:
    """
    How exported weights are stored: mlx-lm's affine quantisation.

    Attributes:
        bits: of a weight.
        group_size: how many weights of a row share a scale and a bias.
    """

    bits: int = 8
    group_size: int = 64


@attrs.frozen(kw_only=True)
class Stage:
    """
    A stage of the training.

    Attributes:
        tokens: how many are read in all.
        longest: longer dialogues are left out.
        mix: which dialogues are drawn, and how often.
        spread: how far apart the positions of turns are moved; 0 leaves them unchanged.
        batch_tokens: how many tokens a step reads, over all processes.
        rates: the shares of the highest learning rates at the start and at the end of the stage,
            falling linearly.
    """

    name: str
    tokens: int
    longest: int
    mix: tuple[tuple[Draw, float], ...]
    spread: int = 0
    batch_tokens: int = 8192
    rates: tuple[float, float] = (1.0, 1.0)


_MANY: Final = (
    (dialogues.echo, 1),
    (dialogues.recall, 2),
    (partial(dialogues.recall, questions=10), 4),
    (partial(dialogues.recall, turns=10, questions=6), 2),
    (partial(tool_use, rounds=5), 4),
    (partial(tool_use, count=20, rounds=5), 1),
    (tool_use, 2),
    (dialogues.untold, 0.5),
    (dialogues.talk, 2),
)
_LONG: Final = (
    (partial(dialogues.recall, turns=20, questions=6), 2),
    (partial(dialogues.recall, turns=18, fillers=18, questions=6), 1),
    (partial(dialogues.recall, questions=10), 3),
    (dialogues.recall, 2),
    (partial(tool_use, count=30, rounds=5), 2),
    (dialogues.untold, 0.5),
    (partial(tool_use, rounds=5), 3),
    (tool_use, 1),
    (dialogues.talk, 2),
)
# Includes the kinds that were added late: everyday words, tools as developers write them, and
# saying that a fact was not given, which is now one token in fifteen; it was three in a thousand.
_WIDE: Final = (
    (partial(everyday, questions=6), 4),
    (partial(everyday, questions=6, alike=True), 3),
    (partial(everyday, questions=3, changed=True), 1),
    (partial(everyday, questions=6, turns=10), 1),
    (everyday, 3),
    (partial(dialogues.recall, questions=10), 4),
    (partial(dialogues.recall, turns=10, questions=6), 2),
    (partial(dialogues.recall, turns=0, questions=6), 2),
    (dialogues.recall, 2),
    (partial(not_told, questions=6), 1),
    (not_told, 1.5),
    (near_miss, 2),
    (dialogues.untold, 2),
    (partial(written_tools, rounds=4), 2.5),
    (written_tools, 1.5),
    (partial(tool_use, rounds=5), 1),
    (partial(tool_use, count=20, rounds=5), 0.3),
    (tool_use, 1),
    (chatter, 1.5),
    (dialogues.talk, 1),
    (dialogues.echo, 5),
)
_ACROSS: Final = (
    (partial(dialogues.recall, turns=18, fillers=18, questions=8), 4),
    (partial(everyday, turns=18, long=18, questions=8), 3),
    (partial(dialogues.recall, turns=20, questions=8), 2),
    (partial(not_told, questions=6, long=16), 0.4),
    (not_told, 1),
    (near_miss, 2),
    (dialogues.untold, 2),
    (partial(everyday, questions=6, alike=True), 1),
    (partial(written_tools, count=12, rounds=4), 0.4),
    (written_tools, 1),
    (chatter, 1),
    (dialogues.echo, 2),
)
_FAR: Final = (partial(dialogues.recall, turns=18, fillers=18, questions=8), 1)
_SETTLE: Final = (*_WIDE, _FAR)
STAGES: Final = (
    # Copying is learned first and alone: mixed with other skills it takes ten times as many tokens.
    Stage(
        name="copy",
        tokens=800_000,
        longest=128,
        mix=((dialogues.echo, 1),),
        batch_tokens=4096,
    ),
    Stage(
        name="facts",
        tokens=1_200_000,
        longest=320,
        mix=((dialogues.echo, 1), (partial(dialogues.recall, turns=0, questions=6), 4)),
        batch_tokens=4096,
        rates=(1.0, 0.98),
    ),
    Stage(
        name="short",
        tokens=1_500_000,
        longest=512,
        rates=(0.98, 0.89),
        mix=(
            (dialogues.echo, 1),
            (dialogues.recall, 4),
            (tool_use, 3),
            (dialogues.talk, 2),
        ),
    ),
    # Reading the prompt costs as much as the answer, so one prompt has many answers.
    Stage(
        name="far",
        tokens=1_000_000,
        longest=1024,
        spread=4608,
        mix=_MANY,
        rates=(0.89, 0.83),
    ),
    # What was learned at high rates is rough; it becomes exact as they fall.
    Stage(
        name="many",
        tokens=6_600_000,
        longest=2304,
        spread=5120,
        mix=_MANY,
        rates=(0.55, 0.04),
    ),
    Stage(
        name="long",
        tokens=700_000,
        longest=5120,
        mix=_LONG,
        rates=(0.04, 0.0),
    ),
    # A second round, at initial rates at which copying is not lost again.
    Stage(
        name="again",
        tokens=17_000_000,
        longest=2304,
        spread=5120,
        mix=_MANY,
        rates=(0.4, 0.03),
    ),
    Stage(
        name="end",
        tokens=1_000_000,
        longest=5120,
        mix=_LONG,
        rates=(0.03, 0.0),
    ),
    # A third round: no short dialogue is left out of the batches, each question is about a
    # different fact, and earlier answers have thoughts as well.
    Stage(
        name="third",
        tokens=17_000_000,
        longest=2304,
        spread=5120,
        mix=(*_MANY, (dialogues.echo, 0.5), (partial(dialogues.recall, turns=0), 1)),
        rates=(0.35, 0.03),
    ),
    Stage(
        name="last",
        tokens=1_000_000,
        longest=5120,
        mix=(*_LONG, (dialogues.echo, 1), (dialogues.untold, 0.5)),
        rates=(0.03, 0.0),
    ),
    # A fourth round, because other kinds of names and more wordings for facts and questions came
    # late.
    Stage(
        name="names",
        tokens=4_000_000,
        longest=2304,
        spread=5120,
        mix=(*_MANY, (dialogues.echo, 1), (partial(dialogues.recall, turns=0, questions=6), 3)),
        rates=(0.3, 0.03),
    ),
    Stage(
        name="close",
        tokens=600_000,
        longest=5120,
        mix=(*_LONG, (dialogues.echo, 1), (dialogues.untold, 0.5)),
        rates=(0.03, 0.0),
    ),
    # A fifth round, for everyday wordings in no form above, from exported weights (``--from``,
    # ``--after close``). It was run once, and its result did not ship: the model card has the
    # figures.
    Stage(
        name="wide",
        tokens=1_300_000,
        longest=2304,
        spread=5120,
        mix=_WIDE,
        rates=(0.35, 0.306),
    ),
    Stage(
        name="wider",
        tokens=3_100_000,
        longest=2304,
        spread=5120,
        mix=_WIDE,
        rates=(0.306, 0.1),
    ),
    Stage(
        name="across",
        tokens=700_000,
        longest=5632,
        spread=6144,
        mix=_ACROSS,
        rates=(0.1, 0.05),
    ),
    Stage(
        name="settle",
        tokens=900_000,
        longest=5632,
        spread=5120,
        mix=_SETTLE,
        rates=(0.05, 0.0),
    ),
)

# First messages are more than two tokens of five, and the old kinds keep their proportions: with
# three of five the old skills were lost.
_MET: Final = (
    (first_messages, 70),
    (partial(first_messages, most=40), 4),
    *_MANY,
    (dialogues.untold, 3),
    (dialogues.talk, 1),
    (dialogues.echo, 1),
)
_BOTH: Final = (
    (first_messages, 50),
    (partial(first_messages, most=40), 3),
    *_MANY,
    (partial(dialogues.recall, turns=0, questions=6), 3),
    (dialogues.untold, 3),
    (dialogues.talk, 1),
    (dialogues.echo, 15),
)
_BOTH_FAR: Final = (*_BOTH, _FAR)
MET_STAGES: Final = (
    *STAGES[:-4],  # up to "close"
    # Another fifth round, for first messages of a chat. Smaller batches give more steps.
    Stage(
        name="met",
        tokens=5_200_000,
        longest=2304,
        spread=5120,
        mix=_MET,
        batch_tokens=4096,
        rates=(0.2, 0.07),
    ),
    # Again, with answers next to what they answer: up to here the positions of Pebble's own turns
    # were moved as well, so that it read each question from afar, and short ones badly.
    Stage(
        name="near",
        tokens=2_300_000,
        longest=2304,
        spread=5120,
        mix=_MET,
        batch_tokens=4096,
        rates=(0.12, 0.0),
    ),
)
THIRD_STAGES: Final = (
    *MET_STAGES,
    # Longer and at higher rates, because the old skills had suffered: copying most of all, and with
    # it every answer that repeats a name. Old kinds are now most of what is read.
    Stage(
        name="both",
        tokens=1_600_000,
        longest=2304,
        spread=5120,
        mix=_BOTH,
        batch_tokens=4096,
        rates=(0.3, 0.29),
    ),
    Stage(
        name="rest",
        tokens=12_000_000,
        longest=3072,
        spread=5120,
        mix=_BOTH_FAR,
        batch_tokens=6144,
        rates=(0.29, 0.09),
    ),
)
WORDS_STAGES: Final = (
    *THIRD_STAGES,
    # First messages alone come first, so that the new tokens are learned.
    Stage(
        name="new",
        tokens=1_500_000,
        longest=256,
        mix=((first_messages, 1),),
        batch_tokens=4096,
        rates=(0.3, 0.3),
    ),
    Stage(
        name="words",
        tokens=6_300_000,
        longest=3072,
        spread=5120,
        mix=_BOTH_FAR,
        batch_tokens=4096,
        rates=(0.3, 0.18),
    ),
    # The weights that ship end here.
    Stage(
        name="cool",
        tokens=7_500_000,
        longest=3072,
        spread=5120,
        mix=(*_BOTH_FAR, (first_messages, 12)),
        batch_tokens=4096,
        rates=(0.18, 0.0),
    ),
)


# --- seven million parameters, stored in 8 bits --------------------------------------------------

# Every kind from the first stage of mixtures on, at shares that stay: a kind that waits for a later
# stage costs the others a round, and what is no longer trained is lost within one.
_ALL: Final = (
    (dialogues.echo, 1.5),
    (dialogues.recall, 2),
    (partial(dialogues.recall, questions=10), 3),
    (partial(dialogues.recall, turns=10, questions=6), 2),
    (partial(dialogues.recall, turns=0, questions=6), 1),
    (partial(everyday, questions=6), 2),
    (partial(everyday, questions=6, alike=True), 1.5),
    (partial(everyday, questions=3, changed=True), 0.7),
    (everyday, 1),
    (dialogues.untold, 1.5),
    (partial(not_told, questions=6), 0.5),
    (not_told, 0.7),
    (near_miss, 1),
    (partial(tool_use, rounds=5), 3),
    (partial(tool_use, count=20, rounds=5), 0.7),
    (tool_use, 1.5),
    (partial(written_tools, rounds=4), 1.2),
    (written_tools, 0.8),
    (dialogues.talk, 2),
    (chatter, 0.7),
    (first_messages, 8),
    (partial(first_messages, most=40), 1),
)
_ALL_FAR: Final = (
    *_ALL,
    (partial(dialogues.recall, turns=18, fillers=18, questions=8), 2),
    (partial(everyday, turns=18, long=18, questions=8), 1),
    (partial(tool_use, count=30, rounds=5), 0.5),
)
EVERYDAY_STAGES: Final = (
    Stage(
        name="copy",
        tokens=1_500_000,
        longest=128,
        mix=((dialogues.echo, 1),),
        batch_tokens=4096,
    ),
    Stage(
        name="facts",
        tokens=2_500_000,
        longest=320,
        mix=((dialogues.echo, 1), (partial(dialogues.recall, turns=0, questions=6), 4)),
        batch_tokens=4096,
    ),
    Stage(
        name="short",
        tokens=6_000_000,
        longest=512,
        mix=_ALL,
        rates=(1.0, 0.9),
    ),
    Stage(
        name="many",
        tokens=60_000_000,
        longest=2304,
        spread=5120,
        mix=_ALL,
        batch_tokens=16_384,
        rates=(0.7, 0.1),
    ),
    Stage(
        name="far",
        tokens=18_000_000,
        longest=5632,
        spread=6144,
        mix=_ALL_FAR,
        batch_tokens=16_384,
        rates=(0.1, 0.02),
    ),
    Stage(
        name="end",
        tokens=6_000_000,
        longest=5632,
        spread=5120,
        mix=_ALL_FAR,
        batch_tokens=16_384,
        rates=(0.02, 0.0),
    ),
)


@attrs.frozen(kw_only=True)
class Recipe:
    """
    What a training makes, and of what.

    Attributes:
        packing: how the exported weights are stored; None for float32.
        kinds: what the tokenizer is trained on besides the plain kinds.
        size: how Pebble says how many parameters it has.
        grown: its vocabulary is that of another recipe with tokens added (``vocabulary.py``), so
            its training goes on from such a model.
    """

    shape: Shape
    stages: tuple[Stage, ...]
    packing: Packing | None = None
    kinds: tuple[Draw, ...] = ()
    size: str = _WRITTEN_SIZE
    grown: bool = False

    def said(self, dialogue: Dialogue) -> Dialogue:
        """A dialogue in which Pebble has the size of this recipe. Modifies it."""
        for message in dialogue.messages:
            message["content"] = message["content"].replace(_WRITTEN_SIZE, self.size)
        dialogue.needed = tuple(one.replace(_WRITTEN_SIZE, self.size) for one in dialogue.needed)
        return dialogue


SHIPPED: Final = "2m-words"
"""The recipe of the weights in the package."""
RECIPES: Final = {
    "2m": Recipe(shape=Shape(), stages=STAGES),
    "2m-met": Recipe(shape=Shape(), stages=MET_STAGES),
    "2m-third": Recipe(shape=Shape(), stages=THIRD_STAGES),
    "2m-words": Recipe(
        shape=Shape(vocab_size=Shape().vocab_size + ADDED_TOKENS), stages=WORDS_STAGES, grown=True
    ),
    "7m": Recipe(
        shape=Shape(
            hidden_size=320, layers=6, intermediate_size=768, heads=10, kv_heads=5, vocab_size=2048
        ),
        stages=EVERYDAY_STAGES,
        packing=Packing(),
        kinds=(first_messages, everyday, written_tools),
        size="about seven million",
    ),
}
