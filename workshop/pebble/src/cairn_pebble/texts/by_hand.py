"""
Hand-written examples in words that no template uses: facts, and tools with wishes for them.

These are not promised skills: they show how far the skills generalise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from cairn_pebble.dialogues import Dialogue
from cairn_pebble.judges import calls, visible
from cairn_pebble.sequences import Renderer

Say = Callable[[str], tuple[str, bool]]
"""Generates the answer to a prompt, and whether it ended by itself."""

SPOKEN: Final = (
    ("hi, I'm Anna", "what's my name?", "Anna"),
    ("My name is Kowalski, Piotr Kowalski.", "What is my name?", "Kowalski"),
    ("you can call me Sam", "who am i", "Sam"),
    ("I live in Bristol with two cats", "where do I live", "Bristol"),
    ("My sister Laura lives in Oslo.", "Where does Laura live?", "Oslo"),
    ("we have a dog called Rex", "what is the name of our dog?", "Rex"),
    ("My favourite colour has always been green.", "Which colour do I like best?", "green"),
    ("the code for the front door is 4821", "what was the door code again", "4821"),
    ("Our meeting is in room 312.", "Which room is the meeting in?", "312"),
    ("I'm 34 years old", "how old am I?", "34"),
    ("I was born in May", "In which month was I born?", "May"),
    ("my daughter Emma is a nurse", "What does Emma do?", "nurse"),
    ("Please remember that the keys are in the kitchen.", "Where are the keys?", "kitchen"),
    ("My flight number is 7730.", "Tell me my flight number, please.", "7730"),
    ("I drive a red car.", "What colour is my car?", "red"),
    ("the wifi password is sunflower", "what is the wifi password?", "sunflower"),
    ("My boss is called Martin.", "What is the name of my boss?", "Martin"),
    ("I work at a school as a teacher.", "What is my job?", "teacher"),
    ("My grandmother comes from Lisbon.", "Where does my grandmother come from?", "Lisbon"),
    ("Ben likes pancakes, and Ida likes soup.", "What does Ida like?", "soup"),
)
"""Facts, a question for the next turn, and the expected answer, in words not used in training."""


@attrs.frozen
class Spoken:
    """The result of one fact."""

    told: str
    asked: str
    said: str
    right: bool


def spoken(renderer: Renderer, say: Say) -> Iterator[Spoken]:
    """Try the facts."""
    for told, asked, value in SPOKEN:
        messages = [
            {"role": "user", "content": told},
            {"role": "assistant", "content": "I will remember that."},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": ""},
        ]
        said, ended = say(renderer.prompt(Dialogue("recall", messages)))
        found = re.search(rf"(?<!\w){re.escape(value)}(?!\w)", visible(said)) is not None
        yield Spoken(told, asked, said, ended and found)


# --- tools ---------------------------------------------------------------------------------------


@attrs.frozen
class Wish:
    """
    Attributes:
        asked: what the user says.
        name: the name of the right tool.
        description: what the tool is for.
        parameters: its JSON schema.
        due: where in the arguments a value must be, and the text that it must contain, ignoring
            case.
    """

    asked: str
    name: str
    description: str
    parameters: dict[str, Any]
    due: tuple[tuple[str, str], ...]


def _object(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


_TEXT: Final[dict[str, Any]] = {"type": "string"}

WISHES: Final = (
    Wish(
        "What's the weather like in Reykjavik right now?",
        "get_current_weather",
        "Get the current weather conditions for a given location.",
        _object(
            "location",
            location={"type": "string", "description": "City and country, e.g. Lima, Peru"},
            unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
        ),
        (("location", "Reykjavik"),),
    ),
    Wish(
        "open an issue in acme/rocket and call it Fan too loud",
        "mcp__github__create_issue",
        "Create a new issue in a GitHub repository",
        _object(
            "owner repo title",
            owner={"type": "string", "description": "Repository owner"},
            repo={"type": "string", "description": "Repository name"},
            title={"type": "string", "description": "Issue title"},
            body={"type": "string", "description": "Issue body content"},
            labels={"type": "array", "items": {"type": "string"}},
        ),
        (("owner", "acme"), ("repo", "rocket"), ("title", "Fan too loud")),
    ),
    Wish(
        "show me what is in src/main.py",
        "viewSourceFile",
        "Reads a file from the local filesystem. The path must be relative to the project root.",
        _object(
            "filePath",
            filePath={"type": "string", "description": "The path of the file to read"},
            offset={"type": "integer", "description": "The line to start from"},
            limit={"type": "integer", "description": "The number of lines to read"},
        ),
        (("filePath", "src/main.py"),),
    ),
    Wish(
        "mail lena@example.org that the train is late, subject Delay",
        "send-email",
        "Send an email to one or more recipients.",
        _object(
            "to subject body",
            to={"type": "array", "items": {"type": "string", "format": "email"}},
            subject=_TEXT,
            body={"type": "string", "description": "Plain text body"},
            cc={"type": "array", "items": {"type": "string", "format": "email"}},
        ),
        (("to", "lena@example.org"), ("subject", "Delay"), ("body", "late")),
    ),
    Wish(
        "make the bedroom 19 degrees please",
        "set_thermostat",
        "Sets the target temperature of one room.",
        _object(
            "room temperature",
            room={"type": "string", "enum": ["kitchen", "bedroom", "bathroom"]},
            temperature={"type": "number", "description": "Target in degrees Celsius"},
        ),
        (("room", "bedroom"), ("temperature", "19")),
    ),
    Wish(
        "Put the dentist into my calendar for 2026-12-03 at 09:30.",
        "createCalendarEvent",
        "Creates an event in the user's primary calendar and returns its id.",
        _object(
            "title start",
            title=_TEXT,
            start=_object(
                "date time",
                date={"type": "string", "format": "date"},
                time={"type": "string", "description": "HH:MM, 24 hours"},
            ),
            attendees={"type": "array", "items": {"type": "string"}},
        ),
        (("title", "dentist"), ("start.date", "2026-12-03"), ("start.time", "09:30")),
    ),
    Wish(
        "run pytest -x for me",
        "bash",
        "Executes a shell command and returns stdout and stderr.",
        _object(
            "command",
            command={"type": "string", "description": "The command to execute"},
            timeout_ms={"type": "integer", "description": "Optional timeout, at most 600000"},
        ),
        (("command", "pytest -x"),),
    ),
    Wish(
        "Could you look up how tall pine trees get?",
        "web_search",
        "Search the web. Use this for anything that you do not know.",
        _object(
            "query",
            query={"type": "string", "description": "The search query"},
            max_results={"type": "integer", "default": 5},
        ),
        (("query", "pine trees"),),
    ),
    Wish(
        "play something by Mozart",
        "play_music",
        "Plays music on the speaker in the living room.",
        _object("", artist=_TEXT, track=_TEXT, volume={"type": "integer", "maximum": 100}),
        (("artist", "Mozart"),),
    ),
    Wish(
        "How much is 250 EUR in JPY?",
        "convertCurrency",
        "Converts an amount of money from one currency to another at today's rate.",
        {
            "type": "object",
            "properties": {
                "amount": {"type": "number"},
                "from": {"type": "string", "enum": ["EUR", "USD", "GBP", "JPY"]},
                "to": {"type": "string", "enum": ["EUR", "USD", "GBP", "JPY"]},
            },
            "required": ["amount", "from", "to"],
        },
        (("amount", "250"), ("from", "EUR"), ("to", "JPY")),
    ),
    Wish(
        "add milk to my todo list, priority high",
        "todo_add_item",
        "Add an item to the todo list",
        _object(
            "item",
            item={"type": "string", "description": "What has to be done"},
            priority={"type": "string", "enum": ["low", "normal", "high"], "default": "normal"},
        ),
        (("item", "milk"), ("priority", "high")),
    ),
    Wish(
        "which files are in /var/log?",
        "filesystem__list_directory",
        "List the contents of a directory. Only works within allowed directories.",
        _object("path", path=_TEXT),
        (("path", "/var/log"),),
    ),
    Wish(
        "Translate good evening into French",
        "translate_text",
        "Translates a text.",
        _object(
            "text target_language",
            text={"type": "string", "description": "The text to translate"},
            target_language={"type": "string", "description": "Name of the language"},
        ),
        (("text", "good evening"), ("target_language", "French")),
    ),
    Wish(
        "how much battery is left",
        "getBatteryLevel",
        "Returns the charge of the battery in percent. Takes no arguments.",
        _object(""),
        (),
    ),
    Wish(
        "remind me at 18:45 to water the plants",
        "reminders.create",
        "Create a reminder that rings at a given time of the day",
        _object(
            "text at",
            text={"type": "string", "description": "What to be reminded of"},
            at={"type": "string", "description": "Time of day as HH:MM"},
            repeat={"type": "boolean", "default": False},
        ),
        (("text", "water the plants"), ("at", "18:45")),
    ),
)
"""Wishes with the right tool for each, as developers write tools; none is used in training."""

_OFFERED: Final = 3
"""The number of tools in a prompt; the right one is the second."""


@attrs.frozen
class Called:
    """The result of one wish."""

    asked: str
    tool: str
    said: str
    usable: bool


def called(renderer: Renderer, say: Say) -> Iterator[Called]:
    """Try the wishes, each with its tool among its neighbours' tools."""
    for place, wish in enumerate(WISHES):
        some = [WISHES[(place + step - 1) % len(WISHES)] for step in range(_OFFERED)]
        dialogue = Dialogue(
            "tool call",
            [{"role": "user", "content": wish.asked}, {"role": "assistant", "content": ""}],
            [_tool(one) for one in some],
        )
        said, ended = say(renderer.prompt(dialogue))
        yield Called(wish.asked, wish.name, said, is_usable(wish, said, ended))


def _tool(wish: Wish) -> dict[str, Any]:
    told = {"name": wish.name, "description": wish.description, "parameters": wish.parameters}
    return {"type": "function", "function": told}


def is_usable(wish: Wish, said: str, ended: bool) -> bool:
    """
    Whether an answer is exactly one call that a program could run.

    It must call the right tool, with arguments that its schema allows, and the values that the user
    named must be in the right places. Optional arguments may have any value.
    """
    call = calls(said) if ended else None
    if call is None or call.get("name") != wish.name or call.keys() != {"name", "arguments"}:
        return False
    arguments = call["arguments"]
    if not allows(wish.parameters, arguments):
        return False
    return all(_contains(arguments, path, value) for path, value in wish.due)


def _contains(arguments: Any, path: str, value: str) -> bool:
    for key in path.split("."):
        arguments = arguments.get(key, "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-])", text, re.IGNORECASE) is not None


_KINDS: Final[dict[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def allows(schema: dict[str, Any], value: Any) -> bool:
    """
    Whether a value matches a schema, as far as tools use schemas here.

    Checks types, enums, items and required properties, and allows no undeclared properties.
    """
    if not _KINDS[schema["type"]](value) or value not in schema.get("enum", [value]):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= value.keys() <= properties.keys():
            return False
        return all(allows(properties[key], one) for key, one in value.items())
    if isinstance(value, list):
        return all(allows(schema["items"], one) for one in value)
    return True
