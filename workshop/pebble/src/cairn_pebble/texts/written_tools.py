"""
Tools as developers write them, and wishes for them.

Names have any style, some with a server's prefix; parameters are nested, optional, lists or enums;
descriptions have one to three sentences. Pebble's task is the same each time: find the tool by a
word of the wish, copy its name letter by letter, and fill in what the wish names, in the order of
the schema. It leaves out what the wish does not name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

import attrs

from cairn_pebble.dialogues import THINKING_SHARE, Dialogue, capital
from cairn_pebble.texts import plain_tools, words
from cairn_pebble.texts.phrasings import ASK_OPENED, casual
from cairn_pebble.texts.values import Value, code, day, dish, of, person, spot, time
from cairn_pebble.texts.words import Split, phrase, pick

# --- names ---------------------------------------------------------------------------------------

_ACTIONS: Final = (
    (("create", "add", "new", "make"), ("create", "add", "make", "set up")),
    (("get", "fetch", "retrieve", "read", "show"), ("get", "fetch", "show me", "look up", "read")),
    (("list", "browse", "getAll", "enumerate"), ("list", "show all of", "go through")),
    (("update", "edit", "modify", "change"), ("update", "edit", "change", "correct")),
    (("delete", "remove", "drop", "clear"), ("delete", "remove", "get rid of", "drop")),
    (("send", "post", "submit", "deliver"), ("send", "post", "submit", "hand in")),
    (("search", "find", "query", "lookup"), ("search for", "find", "look for")),
    (("start", "run", "launch", "trigger"), ("start", "run", "launch")),
    (("stop", "cancel", "abort"), ("stop", "cancel", "call off")),
    (("book", "reserve"), ("book", "reserve")),
    (("move", "rename", "transfer"), ("move", "transfer", "shift")),
    (("export", "download", "save"), ("export", "download", "save")),
    (("check", "verify", "validate"), ("check", "verify", "test")),
    (("close", "archive", "lock"), ("close", "archive", "shut")),
)
_NOUNS: Final = (
    *("pull request", "user account", "log entry", "shopping list", "bank transfer", "work order"),
    *("data set", "build job", "test run", "web page", "phone call", "mail box", "time sheet"),
    *("image", "video", "branch", "commit", "ticket", "customer", "product", "payment", "refund"),
    *("subscription", "device", "sensor", "camera", "door", "vehicle", "driver", "shipment"),
    *("package", "warehouse", "supplier", "contract", "invoice", "budget", "expense", "employee"),
    *("candidate", "course", "student", "grade", "recipe", "meal", "workout", "song", "album"),
    *("channel", "comment", "thread", "page", "table", "record", "column", "index", "container"),
    *("volume", "cluster", "secret", "token", "policy", "alert", "dashboard", "metric", "survey"),
    *("vote", "event", "station", "forecast", "parcel", "locker", "permit", "claim", "case file"),
)
_SERVERS: Final = (
    *("github", "slack", "jira", "notion", "stripe", "docker", "postgres", "home", "crm", "erp"),
    *("shop", "fleet", "clinic", "library", "campus", "bank", "hr", "files", "cloud", "studio"),
)
_JOINERS: Final[tuple[Callable[[list[str]], str], ...]] = (
    "_".join,
    "_".join,
    lambda parts: parts[0] + "".join(capital(one) for one in parts[1:]),
    lambda parts: parts[0] + "".join(capital(one) for one in parts[1:]),
    "-".join,
    lambda parts: "".join(map(capital, parts)),
)


def _prefix(rng: random.Random, split: Split) -> str:
    """Prefixes that MCP servers and other collections put before the names of their tools."""
    if rng.random() < 0.6:
        return ""
    server = words.word(rng, split) if rng.random() < 0.3 else pick(rng, _SERVERS)
    return rng.choice((f"mcp__{server}__", f"mcp__{server}__", f"{server}_", f"{server}-"))


# --- parameters ----------------------------------------------------------------------------------


@attrs.frozen
class _Parameter:
    """
    Attributes:
        words: of its name.
        schema: of its value.
        draw: makes values as users say them.
        said: how a wish says it.
        about: descriptions to choose from.
        read: converts the spoken value to its JSON value.
    """

    words: str
    schema: dict[str, Any]
    draw: Value
    said: tuple[str, ...]
    about: tuple[str, ...]
    read: Callable[[str], Any] = str


_TEXT: Final[dict[str, Any]] = {"type": "string"}
_WHOLE: Final[dict[str, Any]] = {"type": "integer"}


def _choice(name: str, said: tuple[str, ...], about: str, *values: str) -> _Parameter:
    schema = {"type": "string", "enum": list(values)}
    return _Parameter(name, schema, of(*values), said, (about,))


def _flag(name: str, value: bool, *said: str) -> _Parameter:
    return _Parameter(
        name,
        {"type": "boolean"},
        of("true" if value else "false"),
        said,
        (f"Whether to {name.replace('_', ' ')}", "Off unless it is set", "Defaults to false"),
        lambda text: text == "true",
    )


def _several(draw: Value) -> Value:
    def some(rng: random.Random, split: Split) -> str:
        return " and ".join(dict.fromkeys(draw(rng, split) for _ in range(rng.randint(1, 3))))

    return some


def _path(rng: random.Random, split: Split) -> str:
    parts = [words.word(rng, split) for _ in range(rng.randint(1, 3))]
    ending = rng.choice((".txt", ".md", ".py", ".json", ".csv", ""))
    return rng.choice(("", "/", "./")) + "/".join(parts) + ending


def _mail(rng: random.Random, split: Split) -> str:
    return f"{words.word(rng, split)}@{words.word(rng, split)}.{rng.choice(('org', 'com', 'net'))}"


def _date(rng: random.Random, split: Split) -> str:
    def draw(rng: random.Random) -> str:
        return f"20{rng.randint(24, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"

    return words.of_split(rng, split, draw)


def _decimal(rng: random.Random, split: Split) -> str:
    return words.of_split(rng, split, lambda rng: f"{rng.randrange(1, 400)}.{rng.randrange(1, 10)}")


def _listed(name: str, draw: Value, said: tuple[str, ...], about: str) -> _Parameter:
    schema = {"type": "array", "items": {"type": "string"}}
    return _Parameter(
        name, schema, _several(draw), said, (about,), lambda text: text.split(" and ")
    )


_PARAMETERS: Final = (
    _Parameter(
        "file path",
        _TEXT,
        _path,
        ("at {}", "in {}", "from {}"),
        ("The path, absolute or relative",),
    ),
    _Parameter("owner", _TEXT, person, ("of {}", "owned by {}"), ("Who owns it",)),
    _Parameter(
        "recipient", {"type": "string", "format": "email"}, _mail, ("to {}",), ("Mail address",)
    ),
    _Parameter("customer id", _TEXT, code, ("with the id {}", "for customer {}"), ("The id",)),
    _Parameter("reference", _TEXT, code, ("under {}", "with reference {}"), ("As on the slip",)),
    _Parameter(
        "start date",
        {"type": "string", "format": "date"},
        _date,
        ("from {}", "starting {}", "on {}"),
        ("YYYY-MM-DD", "First day, as YYYY-MM-DD, e.g. 2023-05-17"),
    ),
    _Parameter("due day", _TEXT, day, ("until {}", "due {}"), ("The day it is due",)),
    _Parameter("at time", _TEXT, time, ("at {}",), ("HH:MM, 24 hours", "Time of the day")),
    _Parameter(
        "max results",
        _WHOLE | {"minimum": 1, "default": 10},
        words.number,
        ("at most {}", "no more than {}", "only the first {}"),
        ("How many at most. Default: 10", "Upper limit"),
        int,
    ),
    _Parameter("amount", {"type": "number"}, _decimal, ("over {}", "of {}"), ("In euros",), float),
    _Parameter("year", _WHOLE, words.number, ("of the year {}", "from {}"), ("Four digits",), int),
    _Parameter("quantity", _WHOLE, words.number, ("{} times", "with {} of them"), ("",), int),
    _Parameter("branch name", _TEXT, words.word, ("on branch {}", "on {}"), ("The branch",)),
    _Parameter("city", _TEXT, words.place, ("in {}", "near {}"), ("City, e.g. Oslo", "The town")),
    _Parameter("query", _TEXT, spot, ("about {}", "that says {}"), ("What to look for",)),
    _Parameter("title", _TEXT, dish, ("called {}", "titled {}", "with the title {}"), ("A title",)),
    _Parameter("assignee", _TEXT, person, ("for {}", "assigned to {}"), ("Who does it",)),
    _choice("priority", ("with {} priority", "as {}"), "How urgent", "low", "medium", "high"),
    _choice("sort order", ("sorted {}", "in {} order"), "Order", "ascending", "descending"),
    _choice("status", ("that are {}", "with status {}"), "State", "open", "closed", "merged"),
    _choice("format", ("as {}", "in {}"), "Format of the output", "json", "csv", "pdf", "text"),
    _choice("unit", ("in {}",), "Unit of measure", "metric", "imperial"),
    _choice("size", ("in {}", "of size {}"), "Size", "small", "large", "huge"),
    _choice("visibility", ("kept {}", "{}"), "Who may see it", "public", "private", "internal"),
    _flag("recursive", True, "with all below", "recursively"),
    _flag("dry run", True, "only as a trial", "as a dry run"),
    _flag("notify", True, "and let everybody know", "and notify them"),
    _flag("force", True, "by force", "even if it is in use"),
    _flag("include archived", True, "with archived ones", "the archived ones too"),
    _flag("verbose", False, "without details", "but keep it short"),
    _listed("tags", words.word, ("tagged {}", "with the tags {}"), "Tags to set"),
    _listed("attendees", person, ("with {}", "together with {}"), "Names of those who come"),
    _listed("file paths", _path, ("in {}", "over {}"), "Paths to look at"),
)
_GROUPS: Final = ("options", "filter", "details", "input", "params", "request", "settings", "data")


@attrs.frozen
class _Argument:
    """A parameter of a tool: its path of names, the outermost first."""

    path: tuple[str, ...]
    parameter: _Parameter
    required: bool


# --- tools ---------------------------------------------------------------------------------------


@attrs.frozen
class _Tool:
    name: str
    noun: str
    wishes: tuple[str, ...]
    arguments: tuple[_Argument, ...]
    schema: dict[str, Any]


def is_held_out_tool(does: str, what: str) -> bool:
    """
    Whether a pair of a verb and a noun makes a tool for the evaluation.

    Pairs of the plain tools stay in the split they are in there.
    """
    plain = plain_tools.is_held_out_pair(does, what)
    if plain is not None:
        return plain
    verbs = next((verbs for verbs, _ in _ACTIONS if does in verbs), (does,))
    return words.is_held_out_wording(f"{verbs[0]} {what}")


def _tool(rng: random.Random, split: Split) -> _Tool:
    while True:
        verbs, wishes = pick(rng, _ACTIONS)
        does, noun = pick(rng, verbs), pick(rng, _NOUNS)
        if is_held_out_tool(does, noun) is (split is Split.HELD_OUT):
            break
    join = pick(rng, _JOINERS)
    plural = does in ("list", "browse", "getAll", "enumerate")
    name = _prefix(rng, split) + join([does, *f"{noun}{'s' if plural else ''}".split()])
    count = rng.choices((0, 1, 2, 3, 4), (1, 4, 5, 3, 1))[0]
    found: list[_Argument] = []
    group = join(pick(rng, _GROUPS).split()) if count > 1 and rng.random() < 0.3 else ""
    snake = "_".join if join(["a", "b"]) in ("a_b", "a-b") else join
    for one in rng.sample(_PARAMETERS, count):
        key = snake(one.words.split())
        key = key[:1].lower() + key[1:]
        inside = group and rng.random() < 0.7
        path = (_lower(group), key) if inside else (key,)
        found.append(_Argument(path, one, rng.random() < 0.55))
    # Nested parameters are adjacent in the schema and in the call.
    found.sort(key=lambda one: len(one.path))
    description = _described(rng, split, does, noun)
    return _Tool(name, noun, wishes, tuple(found), _schema(rng, name, description, found))


def _lower(name: str) -> str:
    return name[:1].lower() + name[1:]


_ABOUT: Final = (
    ("", "", "Use this to ", "Call this to ", "This tool lets you ", "Will "),
    ("{} {}", "{} a {}", "{} the {}", "{} one {} or more", "{} a {} of the user"),
    (".", "", " and return it.", " by its properties.", " in the current project."),
    (
        *("", "", "", " Fails if it does not exist.", " Returns a JSON object.", " Do not guess."),
        *(" Ask the user if something is missing.", " This cannot be undone.", " Takes a while."),
        *(" Requires the right to write.", " Prefer this over the command line.", " Beta."),
    ),
)


def _described(rng: random.Random, split: Split, does: str, noun: str) -> str:
    verb = "list" if does == "getAll" else does
    return capital(phrase(rng, split, *_ABOUT).format(verb, noun))


def _schema(
    rng: random.Random, name: str, description: str, arguments: list[_Argument]
) -> dict[str, Any]:
    outer = _object(rng, [one for one in arguments if len(one.path) == 1])
    inner = [one for one in arguments if len(one.path) == 2]
    if inner:
        group = _object(rng, inner)
        if rng.random() < 0.4:
            group["description"] = "More of it"
        outer["properties"][inner[0].path[0]] = group
        if any(one.required for one in inner):
            outer["required"] = [*outer.get("required", ()), inner[0].path[0]]
    if rng.random() < 0.2:
        outer["additionalProperties"] = False
    if rng.random() < 0.1:
        outer = {"$schema": "http://json-schema.org/draft-07/schema#", **outer}
    told = {"name": name, "description": description, "parameters": outer}
    return {"type": "function", "function": told}


def _object(rng: random.Random, arguments: list[_Argument]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for one in arguments:
        about = pick(rng, one.parameter.about)
        told = {"description": about} if about and rng.random() < 0.6 else {}
        properties[one.path[-1]] = {**one.parameter.schema, **told}
    required = [one.path[-1] for one in arguments if one.required]
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | {"required": required} if required or rng.random() < 0.5 else found


# --- dialogues -----------------------------------------------------------------------------------

_WISHED: Final = (
    *("{} the {}", "{} a {}", "{} my {}", "{} that {}", "{} this {}", "{} the {} for me"),
    *("can you {} the {}", "could you {} a {}", "I want to {} the {}", "please {} the {}"),
    *("I'd like to {} a {}", "we need to {} the {}", "help me {} the {}", "go and {} the {}"),
)
_WISH_CLOSED: Final = ("", "", "", " please", " pls", " right now", ", thanks", " if you can")
_RESULTS: Final[tuple[tuple[str, Value], ...]] = (
    ("state", of("done", "open", "closed", "ready", "waiting", "running", "failed")),
    ("due date", day),
    ("start time", time),
    ("last owner", person),
    ("ticket id", code),
    ("total count", words.number),
    ("created by", person),
    ("home town", words.place),
    ("label", dish),
)


def written_tools(
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
    tools: dict[str, _Tool] = {}
    due = count or rng.choices((1, 2, 3, 5, 8), (2, 4, 4, 2, 1))[0]
    while len(tools) < due:
        one = _tool(rng, split)
        # There is one tool for each noun, because the wish uses its own words for the verb.
        tools.setdefault(one.noun, one)
    dialogue.tools = [one.schema for one in tools.values()]
    rounds = rounds or rng.randint(1, 3)
    for place in range(rounds):
        last = place == rounds - 1
        tool = pick(rng, tuple(tools.values()))
        asked, given = _wish(rng, split, tool)
        call = json.dumps({"name": tool.name, "arguments": given}, ensure_ascii=False)
        thinks = f"The tool for it is {tool.name}."
        dialogue.thinking = last and rng.random() < THINKING_SHARE
        thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
        dialogue.say(asked, f"{thought}<tool_call>\n{call}\n</tool_call>", thinks)
        if last and rng.random() < 0.5:
            dialogue.needed = (call,)
            return dialogue
        _result(rng, split, dialogue, tool, last=last)
    return dialogue


def _wish(rng: random.Random, split: Split, tool: _Tool) -> tuple[str, dict[str, Any]]:
    """The user's message, and the arguments of the call."""
    given: dict[str, Any] = {}
    said: list[str] = []
    for one in tool.arguments:
        if not one.required and rng.random() < 0.5:
            continue
        value = one.parameter.draw(rng, split)
        inside = given
        for key in one.path[:-1]:
            inside = inside.setdefault(key, {})
        inside[one.path[-1]] = one.parameter.read(value)
        said.append(pick(rng, one.parameter.said).format(value))
    if rng.random() < 0.4:
        rng.shuffle(said)
    frame = phrase(rng, split, ASK_OPENED, _WISHED, _WISH_CLOSED)
    end = next(end for end in sorted(_WISH_CLOSED, key=len, reverse=True) if frame.endswith(end))
    text = frame.removesuffix(end).format(pick(rng, tool.wishes), tool.noun)
    if said and rng.random() < 0.15:
        text, said = f"{said[-1]}, {text}", said[:-1]
    return casual(rng, " ".join([text, *said]) + end + pick(rng, ("", ".", "?"))), given


def _result(
    rng: random.Random, split: Split, dialogue: Dialogue, tool: _Tool, *, last: bool
) -> None:
    if rng.random() < 0.12:
        error = f"{tool.noun} not found" if rng.random() < 0.5 else "access denied"
        content, said = {"error": error}, f"It failed: {error}."
        needed: tuple[str, ...] = (error,)
    else:
        pairs = {key: draw(rng, split) for key, draw in rng.sample(_RESULTS, rng.randint(1, 3))}
        join = pick(rng, _JOINERS[:4])
        content = {join(key.split()): value for key, value in pairs.items()}
        said = " and ".join(f"the {key} is {value}" for key, value in pairs.items())
        said, needed = f"The {tool.noun}: {said}.", tuple(pairs.values())
    dialogue.messages.append({"role": "tool", "content": json.dumps(content)})
    thinks = f"The tool {tool.name} has answered. I tell what it says."
    if last:
        dialogue.thinking = rng.random() < THINKING_SHARE
        dialogue.skill, dialogue.needed = "tool result", needed
    thought = f"<think>\n{thinks}\n</think>\n\n" if dialogue.thinking else ""
    dialogue.answer(f"{thought}{said}", thinks)
