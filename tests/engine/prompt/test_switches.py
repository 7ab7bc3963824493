"""The settings of thinking that a template supports are found by rendering with them."""

from __future__ import annotations

from typing import Any

import pytest

from cairn.engine.mlx.model import load_model
from cairn.engine.model.builtin import builtin_directory
from cairn.engine.prompt.template import switches


class Template:
    """A tokenizer whose template supports some settings, and refuses others."""

    def __init__(self, heeds: str, refuses: str = "") -> None:
        self._heeds = heeds
        self._refuses = refuses

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        """A text that has in it what is heeded."""
        if self._refuses in kwargs:
            raise ValueError("not here")
        return f"{messages[0]['content']} {kwargs.get(self._heeds)}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (Template("enable_thinking"), {"enable_thinking"}),
        (Template("reasoning_effort"), {"reasoning_effort"}),
        (Template("date"), set()),
        (Template("enable_thinking", refuses="reasoning_effort"), {"enable_thinking"}),
        (Template("enable_thinking", refuses="enable_thinking"), set()),
    ],
)
def test_what_changes_a_prompt_is_heeded(template: Any, expected: set[str]) -> None:
    """
    A setting with which the prompt is the same does nothing, and one that is refused does neither.
    """
    assert expected == switches(template, {})


def test_thinking_can_be_switched_on_for_pebble() -> None:
    """It has the switch, and its own setting does not stand in the way."""
    loaded = load_model(str(builtin_directory()))
    assert {"enable_thinking"} == switches(loaded.tokenizer, loaded.template)
