"""
What is read off mlx-lm's tokenizer wrapper.

Runs with the oldest and the newest mlx-lm that pyproject.toml admits (`make oldest`).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from mlx_lm.utils import load_tokenizer

from cairn.engine.answer.markers import CALLING, SAYING, THINKING, Edge, Markers, markers_of


@pytest.fixture(scope="module")
def tokenizer(model_directory: Path) -> Any:
    """That of the random model, whose template is Qwen's."""
    return load_tokenizer(model_directory)


def test_what_a_wrapper_knows(tokenizer: Any):
    """Thoughts, calls and their parser; of what the version does not know, nothing."""
    found = markers_of(tokenizer)
    assert (("<think>", "</think>"), ("<tool_call>", "</tool_call>")) == (
        found.thinking,
        found.calling,
    )
    assert ((), {}, None) == (found.dropped, found.edges, found.first)
    assert found.parse is not None
    assert {"name": "go"} == found.parse('{"name": "go"}', [])
    assert "json_tools" == found.format
    assert ("<think>", "</think>", "<tool_call>", "</tool_call>") == found.texts


@pytest.mark.parametrize(
    ("end", "may"),
    [("assistant\n", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)],
)
def test_where_thoughts_may_open_an_answer(tokenizer: Any, end: str, may: bool):
    """Everywhere except after empty ones, with which a template switches thinking off."""
    prompt = f"<|im_start|>user\n</think><|im_end|>\n<|im_start|>{end}"
    assert may == markers_of(tokenizer).may_think(prompt)
    assert not Markers().may_think(prompt)


def test_the_form_of_calls() -> None:
    """It is on record if all text of an answer is shown, or is a call."""
    tags = ("<call>", "</call>")
    known = Markers(calling=tags, parse=lambda *_: {}, format="new")
    assert ("new", *tags) == known.form_of_calls
    assert ("", *tags) == attrs.evolve(known, format=None).form_of_calls
    assert () == Markers().form_of_calls
    assert () == attrs.evolve(known, parse=None).form_of_calls
    assert attrs.evolve(known, first="header").form_of_calls is None
    assert attrs.evolve(known, edges={SAYING: (("<eom>", "header"),)}).form_of_calls is None


def test_an_answer_that_continues_words() -> None:
    """It goes on in the thoughts that the words opened, and else in words."""
    thinks = Markers(thinking=("<think>", "</think>"))
    assert SAYING == thinks.continues("It is")
    assert THINKING == thinks.continues("<think>\nHm, so")
    assert SAYING == thinks.continues("<think>\nHm\n</think>\n\nIt is")
    assert SAYING == Markers().continues("<think>Hm")


def test_what_a_wrapper_knows_of_a_format(tokenizer: Any):
    """A format with states of its own: what leads out of them, and where an answer begins."""
    if importlib.util.find_spec("mlx_lm.chat_templates.muse_spark") is None:
        pytest.skip("this mlx-lm has no such format")
    module = importlib.import_module("mlx_lm.chat_templates.muse_spark")
    tokenizer_of = type(tokenizer)
    found = markers_of(
        tokenizer_of(
            tokenizer._tokenizer,  # the wrapper has no name for it
            response_format=module.RESPONSE_FORMAT,
        )
    )
    assert "header" == found.first
    assert Edge("<|eom|>", "header") in found.table(calls=True)[THINKING]
    assert (("<|eom|>", "header"), ("<|eot|>", SAYING)) == found.edges[SAYING]


def test_a_wrapper_that_knows_nothing(model_directory: Path, tmp_path: Path):
    """A model without any markers says all that it writes."""
    for path in model_directory.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    known = (tmp_path / "tokenizer.json").read_text("utf-8")
    (tmp_path / "tokenizer.json").write_text(known.replace("think>", "thunk>"), "utf-8")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    found = markers_of(load_tokenizer(tmp_path))
    assert Markers() == found
    assert {SAYING: (), THINKING: (), CALLING: ()} == found.table(calls=True)
