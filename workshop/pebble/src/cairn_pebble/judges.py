"""
Whether an answer shows a skill.

A judge gets the dialogue, the answer, and whether the answer ended by itself. An answer that only
looks right is wrong.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cairn_pebble.dialogues import Dialogue


def visible(text: str) -> str:
    """What a user sees: the answer without its thoughts; empty if the thoughts did not end."""
    said = text.split("</think>", 1)[-1]
    return "" if "<think>" in said else said.strip()


def says(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """The expected answer, with no other words."""
    due: str = dialogue.messages[-1]["content"]
    return ended and visible(said) == visible(due)


def ends(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """Any text, if it ends."""
    return ended and visible(said) != ""


def calls_exactly(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """The expected call: names, values and types, with keys in any order."""
    call = calls(said) if ended else None
    return call is not None and _exact(call) == _exact(json.loads(dialogue.needed[0]))


def calls(said: str) -> dict[str, Any] | None:
    """The one call in an answer, or None if it is not exactly one call in JSON with unique keys."""
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
    """JSON in a form that distinguishes 17 from 17.0."""
    return json.dumps(call, sort_keys=True)


def thinks(dialogue: Dialogue, said: str, ended: bool) -> bool:
    """Thoughts followed by an answer if thinking was requested, otherwise only an answer."""
    if dialogue.thinking:
        thoughts = re.fullmatch(r"<think>\n(.+)\n</think>\n\n(.+)", said, re.DOTALL)
        right = thoughts is not None and not any("think>" in part for part in thoughts.groups())
    else:
        right = "think>" not in said
    return ended and right
