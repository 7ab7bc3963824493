"""Dialogues as tokens, each with its weight in the loss."""

from __future__ import annotations

import json
from collections.abc import Iterable
from random import Random
from typing import Any, Final

import attrs
import jinja2
import numpy as np
import numpy.typing as npt
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from cairn.engine.model.builtin import builtin_directory
from cairn_pebble.dialogues import Dialogue

TEXT_END: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (TEXT_END, TURN_START, TURN_END)
MARKER_TOKENS: Final = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

_OPENING: Final = f"{TURN_START}assistant\n"
_NO_THOUGHTS: Final = "<think>\n\n</think>\n\n"
_OPENED_SHARE: Final = 0.5
_THOUGHT_SHARE: Final = 0.25

# Where a text is split before pairs are merged: small words with their space, capitalised words
# without, digits by two, punctuation. A name is therefore the same tokens everywhere, in JSON too,
# and can be copied from one place to another.
_SPLIT_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"| ?[\p{Ll}\p{Lo}\p{Lm}\p{M}]+"
    r"|[\p{Lu}\p{Lt}][\p{Ll}\p{M}]*"
    r"|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def template() -> str:
    """
    The chat template that turns a conversation into Pebble's prompt: ChatML, as in Qwen3.

    It is written by hand and kept in the package that ships it.
    """
    return (builtin_directory() / "chat_template.jinja").read_text("utf-8")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, split: str = _SPLIT_PATTERN, least: int = 0
) -> Tokenizer:
    """
    Train a byte-level BPE; the control tokens get the last ids, as in Qwen3.

    Nothing is normalised, so any text survives a round trip unchanged.

    Args:
        split: where a text is split before pairs are merged.
        least: how often a pair must occur in the texts.

    Raises:
        ValueError: the texts have too few pairs for this vocabulary size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(MARKER_TOKENS),
        min_frequency=least,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in MARKER_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts yield {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


_CHOSEN: Final = ("opening", "talk")
"""Skills whose answers are among a hundred known ones."""
_BEGUN_TOKENS: Final = 6
_BEGUN_WEIGHT: Final = 3.0
"""How much the first tokens of such an answer are learned: they choose it, the rest follows."""


@attrs.frozen
class Sequence:
    """
    Attributes:
        ids: (T,), int32.
        answers: (T,), float32: how much each token is learned, from those before it; 0 for those of
            others.
        turns: where a turn begins, or the line of a tool. Without Pebble's own turns, because in
            use an answer is next to what it answers.
    """

    ids: npt.NDArray[np.int32]
    answers: npt.NDArray[np.float32]
    turns: npt.NDArray[np.int64]


class Renderer:
    """
    Turns dialogues into what a server would feed, using the chat template.

    Attributes:
        tokenizer: the tokenizer.
        template: the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        self._template = environment.from_string(template)
        self.tokenizer = tokenizer
        self.template = template
        self._tool: list[int] = tokenizer.encode('{"type').ids
        self._own_turn = (tokenizer.encode(_OPENING).ids or [0, 0])[1]

    def prompt(self, dialogue: Dialogue) -> str:
        """Everything before the last answer."""
        return self._render(dialogue.messages[:-1], dialogue.tools, thinking=dialogue.thinking)

    def text(self, dialogue: Dialogue) -> str:
        """The whole dialogue."""
        return f"{self.prompt(dialogue)}{dialogue.messages[-1]['content']}{TURN_END}\n"

    def sequence(self, dialogue: Dialogue, rng: Random | None = None) -> Sequence:
        """
        The dialogue for training: Pebble's answers are learned, other messages are not.

        How an earlier answer begins is not learned either, because the template removed what came
        before it: an answer is generated after thoughts, even if they are empty, and is read
        without them in the next turn.

        Args:
            rng: gives half of the earlier answers empty thoughts and a quarter of them thoughts, as
                if each were the last answer, so that their beginnings are learned. With the last
                answers alone, beginnings are learned from a tenth of the answers, and answers then
                begin badly.
        """
        prompt = self.prompt(dialogue)
        blocks = prompt.split(_OPENING)
        *earlier, thoughts = blocks[1:]
        parts = [(blocks[0] + _OPENING, False)]
        places = [
            place for place, one in enumerate(dialogue.messages) if one["role"] == "assistant"
        ]
        for place, block in zip(places, earlier, strict=False):
            said, rest = block.split(f"{TURN_END}\n", 1)
            thought = said.startswith("<think>")  # thoughts are kept after the last user message
            drawn = 1.0 if thought or rng is None else rng.random()
            opened = drawn < _OPENED_SHARE
            thinks = dialogue.thoughts.get(place, "")
            if not opened and drawn < _OPENED_SHARE + _THOUGHT_SHARE and thinks:
                said = f"<think>\n{thinks}\n</think>\n\n{said}"
            parts.append((_NO_THOUGHTS if opened else "", False))
            parts.append((f"{said}{TURN_END}", True))
            parts.append((f"\n{rest}{_OPENING}", False))
        parts.append((thoughts, False))  # empty thoughts, if it is not to think
        parts.append((f"{dialogue.messages[-1]['content']}{TURN_END}", True))
        encoded = self.tokenizer.encode_batch([text for text, _ in parts])
        ids: list[int] = []
        answers: list[float] = []
        begun = _BEGUN_WEIGHT if dialogue.skill in _CHOSEN else 1.0
        for place, (one, (text, answer)) in enumerate(zip(encoded, parts, strict=True)):
            ids += one.ids
            first = min(_BEGUN_TOKENS, len(one.ids)) if answer else 0
            answers += [begun] * first + [float(answer)] * (len(one.ids) - first)
            bare = not parts[place - 1][0] and not text.startswith("<think>")
            if answer and bare and place < len(parts) - 1:
                answers[-len(one.ids)] = 0.0
        found = np.array(ids, np.int32)
        begins = found == self.tokenizer.token_to_id(TURN_START)
        begins[:-1] &= found[1:] != self._own_turn
        begins[:-1] |= (found[:-1] == self._tool[0]) & (found[1:] == self._tool[1])
        return Sequence(found, np.array(answers, np.float32), np.flatnonzero(begins))

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, thinking: bool
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
