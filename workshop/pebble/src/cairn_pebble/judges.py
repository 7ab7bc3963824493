"""
Whether an answer shows a skill.

A judge is given the dialogue, what was said, and whether it ended by itself. What only looks right
is wrong.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cairn_pebble.dialogues import Dialogue


def visible(text: str) -> str:
    """
    What a user sees: the answer without its thoughts, of which nothing is left where they did not
    end.
    """
    said = text.split("</think>", 1)[-1]
    return "" if "<think>" in said else said.strip()


def says(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """The answer that is due, and no other words."""
    due: str = dialogue.messages[-1]["content"]
    return ended and visible(said) == visible(due)


def ends(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """Something, and then the end."""
    return ended and visible(said) != ""


def calls_exactly(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """The call that is due: names, values and types, in any order of keys."""
    call = calls(said) if ended else None
    return call is not None and _exact(call) == _exact(json.loads(dialogue.needed[0]))


def calls(said: str) -> dict[str, Any] | None:
    """
    The one call that an answer is; None where it is none, or not in JSON, or a key stands twice.
    """
    text = visible(said)
    if not (text.startswith("<tool_call>") and text.endswith("</tool_call>")):
        return None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key stands twice")
        return found

    text = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        found = json.loads(text, object_pairs_hook=once)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _exact(call: dict[str, Any]) -> str:
    """JSON in a form that tells 17 from 17.0."""
    return json.dumps(call, sort_keys=True)


def thinks(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """Thoughts and an answer behind them where thoughts were asked for, else an answer alone."""
    if dialogue.thinking:
        thoughts = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.+)", said, re.DOTALL)
        right = thoughts is not None and not any("think>" in part for part in thoughts.groups())
    else:
        right = "think>" not in said
    return ended and right
