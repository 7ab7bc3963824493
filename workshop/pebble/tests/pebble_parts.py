"""Shared parts of the tests of Pebble's making."""

from __future__ import annotations

from functools import cache, partial
from typing import Final

from tokenizers import Tokenizer

from cairn.engine.model.builtin import builtin_directory
from cairn_pebble import dialogues
from cairn_pebble.recipe import RECIPES, SHIPPED, Draw, Shape, Stage
from cairn_pebble.sequences import Renderer, template

SMALL: Final = Shape(
    hidden_size=32,
    layers=1,
    intermediate_size=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vocab_size=RECIPES[SHIPPED].shape.vocab_size,
)
SHORT: Final = Stage(name="short", tokens=300_000, longest=128, mix=((dialogues.echo, 1),))


def _kind(draw: Draw) -> str:
    return f"{draw.func.__name__} {draw.keywords}" if isinstance(draw, partial) else draw.__name__


DRAWS: Final = tuple(
    {
        _kind(draw): draw
        for recipe in RECIPES.values()
        for stage in recipe.stages
        for draw, _ in stage.mix
    }.values()
)
"""Each kind of dialogue that any stage draws, once."""


@cache
def pebble_tokenizer() -> Tokenizer:
    """Pebble's own tokenizer."""
    return Tokenizer.from_file(str(builtin_directory() / "tokenizer.json"))


@cache
def pebble_renderer() -> Renderer:
    """What turns dialogues into tokens."""
    return Renderer(pebble_tokenizer(), template())
