"""Tools named by a verb and a noun with one or two parameters, and wishes in the same words."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import attrs

from cairn_pebble.dialogues import (
    NOTED,
    THINKING_SHARE,
    Dialogue,
    ask,
    capital,
    chat,
    distinct,
    tell,
)
from cairn_pebble.texts import words
from cairn_pebble.texts.values import Value, of
from cairn_pebble.texts.words import Split, phrase, pick


@attrs.frozen
class _Parameter:
    name: str
    type: str
    draw: Value
    said: str


_PARAMETERS: Final = (
    _Parameter("city", "string", words.place, "in {}"),
    _Parameter("name", "string", words.name, "for {}"),
    _Parameter("person", "string", words.name, "of {}"),
    _Parameter("count", "integer", words.number, "with {} pieces"),
    _Parameter("number", "integer", words.number, "number {}"),
    _Parameter("colour", "string", of(*words.COLOURS), "in {}"),
    _Parameter("month", "string", of(*words.MONTHS), "in {}"),
    _Parameter("place", "string", words.place, "near {}"),
    _Parameter("minutes", "integer", words.number, "of {} minutes"),
    _Parameter("title", "string", words.name, "called {}"),
)
DOES: Final = (
    *("get", "find", "show", "open", "create", "delete", "send", "check", "start", "stop"),
    *("list", "book", "order", "update", "print", "move", "count", "read", "save", "close"),
)
WHAT: Final = (
    *("weather", "recipe", "timer", "message", "file", "account", "invoice", "meeting", "alarm"),
    *("playlist", "photo", "ticket", "room", "table", "note", "contact", "report", "task", "taxi"),
    *("hotel", "flight", "backup", "folder", "calendar", "reminder", "price", "route", "story"),
    *("letter", "window", "light", "garden", "train", "book", "game", "picture", "document"),
)
_DESCRIBED: Final = (
    ("", "", "Can ", "Will ", "Use it to ", "To "),
    ("{} a {}", "{} the {}", "{} one {}", "{} any {}"),
    (".", " for the user.", " that is asked for.", " and say what came of it."),
)
_WISHES: Final = (
    (
        *(
            "",
            "Please ",
            "Can you ",
            "Could you ",
            "I want to ",
            "I need to ",
            "Now ",
            "Would you ",
        ),
        *("I would like you to ", "Help me to ", "Hello! Please ", "Pebble, ", "So, please "),
    ),
    ("{} the {}", "{} a {}", "{} one {}", "{} my {}"),
)


@attrs.frozen
class _Tool:
    does: str
    what: str
    parameters: tuple[_Parameter, ...]
    description: str

    @property
    def name(self) -> str:
        return f"{self.does}_{self.what}"

    def schema(self) -> dict[str, Any]:
        properties = {one.name: {"type": one.type} for one in self.parameters}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }


def is_held_out_pair(does: str, what: str) -> bool | None:
    """
    Whether a tool with this verb and noun is for the evaluation.

    None if there are no tools here with these words.
    """
    if does not in DOES or what not in WHAT:
        return None
    return (DOES.index(does) * len(WHAT) + WHAT.index(what)) % 8 == 5


def _tools(rng: random.Random, split: Split, count: int) -> list[_Tool]:
    """Tools with different names. Every eighth pair of verb and noun is held out."""
    found: dict[str, _Tool] = {}
    while len(found) < count:
        does, what = pick(rng, DOES), pick(rng, WHAT)
        if is_held_out_pair(does, what) is not (split is Split.HELD_OUT):
            continue
        described = capital(phrase(rng, split, *_DESCRIBED).format(does, what))
        some = rng.sample(_PARAMETERS, rng.choices((0, 1, 2), (1, 5, 3))[0])
        found[f"{does}_{what}"] = _Tool(does, what, tuple(some), described)
    return list(found.values())


_RESULTS: Final[tuple[tuple[str, Value], ...]] = (
    ("status", of("done", "open", "closed", "ready", "waiting")),
    ("number", words.number),
    ("place", words.place),
    ("owner", words.name),
    ("colour", of(*words.COLOURS)),
    ("total", words.number),
    ("code", words.number),
)


def tool_use(
    rng: random.Random, split: Split, *, count: int | None = None, rounds: int | None = None
) -> Dialogue:
    """
    Pebble calls the right tool with its arguments. In every second dialogue it uses the result.

    Args:
        count: how many tools there are to choose from.
        rounds: how many wishes there are, each with a call; the last one counts.
    """
    dialogue = Dialogue("tool call")
    dialogue.instruct(rng, split)
    tools = _tools(rng, split, count or rng.choices((1, 2, 4, 8, 16), (3, 3, 3, 2, 1))[0])
    dialogue.tools = [tool.schema() for tool in tools]
    if rng.random() < 0.2:
        (told,) = distinct(rng, split, 1)
        dialogue.say(tell(rng, split, [told]), pick(rng, NOTED))
        dialogue.say(ask(rng, split, told), told.answer, told.thought)
    for _ in range(rng.choices((0, 1, 2), (4, 2, 1))[0]):
        chat(rng, split, dialogue)
    rounds = rounds or rng.randint(1, 3)
    for place in range(rounds):
        tool = pick(rng, tools)
        given: dict[str, Any] = {}
        asked = capital(phrase(rng, split, *_WISHES).format(tool.does, tool.what))
        for one in tool.parameters:
            value = one.draw(rng, split)
            given[one.name] = int(value) if one.type == "integer" else value
            asked += " " + one.said.format(value)
        asked += pick(rng, (".", "", "?" if asked.startswith(("Can", "Could", "Would")) else "."))
        last = place == rounds - 1
        dialogue.thinking = last and rng.random() < THINKING_SHARE
        thinks = f"The tool for it is {tool.name}."
        thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
        call = {"name": tool.name, "arguments": given}
        text = f"{thought}<tool_call>\n{json.dumps(call)}\n</tool_call>"
        dialogue.say(asked, text, thinks)
        if last and rng.random() < 0.5:
            dialogue.needed = (json.dumps(call),)
            return dialogue
        pairs = rng.sample(_RESULTS, rng.randint(1, 3))
        result = {key: draw(rng, split) for key, draw in pairs}
        dialogue.messages.append({"role": "tool", "content": json.dumps(result)})
        said = " and ".join(f"the {key} is {value}" for key, value in result.items())
        if last:
            dialogue.thinking = rng.random() < THINKING_SHARE
            dialogue.skill = "tool result"
            dialogue.needed = tuple(result.values())
        thinks = f"The tool {tool.name} has answered. I tell what it says."
        thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
        dialogue.answer(f"{thought}The {tool.what}: {said}.", thinks)
    return dialogue
