"""The parts of a chat that need no server: conversations, lines, rendering, settings, greeting."""

from __future__ import annotations

import io

import click
import pytest
from rich.console import Console

from cairn.ops.chat.conversation import Conversation, Message, as_markdown, as_messages
from cairn.ops.chat.greeting import greeting, openings_of
from cairn.ops.chat.replies import Cairn, StoredMessage, StoredTurn, Usage
from cairn.ops.chat.settings import parsed, shown
from cairn.ops.chat.terminal.keyboard import completions
from cairn.ops.chat.terminal.markdown import Markdown, last_block
from cairn.ops.chat.terminal.rendering import Breaking, Wrapped
from cairn.ops.chat.transcript import Answer, bar, help_text, is_open, read_line, summary, unquoted
from cairn.ops.models.fitting import Machine
from cairn.ops.models.short_names import PEBBLE
from tests.support.processes.terminal import Picture

GIB = 1024**3

# --- conversations -------------------------------------------------------------------------------


def stored_conversation() -> Conversation:
    """Two turns that an agent has."""
    begun = Conversation("Be kind.").in_agent("chat-1")
    one = begun.asking("one").answered("1", "", stored=True)
    return one.asking("two").answered("2", "hm", stored=True)


def texts(conversation: Conversation) -> list[str]:
    return [one["content"] for one in conversation.unsent()]


def test_only_what_the_agent_does_not_have_is_sent():
    """With its thoughts; all of it before there is an agent."""
    asked = stored_conversation().asking("three")
    assert ["three"] == texts(asked)
    assert not asked.must_fork
    assert ["1", "2"] == texts(Conversation(said=(Message("user", "1"), Message("assistant", "2"))))
    assert {"role": "assistant", "content": "2", "reasoning_content": "hm"} == (
        stored_conversation().in_no_agent().unsent()[-1]
    )


def test_a_stopped_answer_is_sent_with_the_next_message():
    """The agent has no part of that turn."""
    stopped = stored_conversation().asking("three").answered("half", "", stored=False)
    assert ["three", "half", "four"] == texts(stopped.asking("four"))
    assert not stopped.asking("four").must_fork
    ended = stopped.asking("four").answered("4", "", stored=True)
    assert ["five"] == texts(ended.asking("five"))


def test_an_edit_forks_the_agent_before_the_message():
    """And an edit of a message that the agent does not have forks nothing."""
    edited = stored_conversation().edited("zwei")
    assert (True, (2,), ["zwei"]) == (edited.must_fork, edited.ends, texts(edited))
    assert not edited.in_agent("chat-2").must_fork
    stopped = stored_conversation().asking("three").answered("half", "", stored=False)
    again = stopped.edited("three")
    assert (False, ["three"]) == (again.must_fork, texts(again))


def test_an_edit_of_a_turn_with_several_messages_keeps_those_before():
    """A turn that began with a stopped answer: its earlier messages are sent again."""
    stopped = stored_conversation().asking("three").answered("half", "", stored=False)
    edited = stopped.asking("four").answered("4", "", stored=True).edited("vier")
    assert (True, (2, 4)) == (edited.must_fork, edited.ends)
    assert ["three", "half", "vier"] == texts(edited)


def test_an_agent_that_went_on_or_lost_a_turn():
    """The conversation is what the user sees: it forks, or sends the lost turn again."""
    asked = stored_conversation().asking("three")
    assert asked.with_turns(3).must_fork
    lost = asked.with_turns(1)
    assert (False, ["two", "2", "three"]) == (lost.must_fork, texts(lost))


def test_another_system_message_begins_another_agent():
    """Which gets everything that was said."""
    changed = stored_conversation().with_system("Be brief.")
    assert (None, "Be brief.", 4) == (changed.agent, changed.system, len(changed.unsent()))
    assert not changed.must_fork


def test_a_stored_conversation_is_read_back():
    """Turn by turn, with thoughts."""
    turns = [
        StoredTurn((StoredMessage("user", "one"),), StoredMessage("assistant", "1")),
        StoredTurn((StoredMessage("user", "two"),), StoredMessage("assistant", "2", "hm")),
    ]
    assert stored_conversation() == Conversation.stored("chat-1", "Be kind.", turns)
    assert ("two", None) == (stored_conversation().question, Conversation().question)


def test_a_conversation_as_a_document():
    """As Markdown, and as messages that any server takes."""
    said = stored_conversation()
    assert as_markdown(said).startswith("## System\n\nBe kind.\n\n## You\n\none\n\n## Model\n\n1\n")
    assert ["system", "user", "assistant", "user", "assistant"] == [
        one["role"] for one in as_messages(said)
    ]


# --- lines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "opened"),
    [
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one"""', False),
        ('/edit """one', True),
        ('/edit """one\ntwo"""', False),
        ('say """ and go on', False),
        ("one", False),
    ],
)
def test_three_quotes_begin_a_message_of_several_lines(typed: str, opened: bool):
    """Until three quotes end it; within a line they mean nothing."""
    assert opened == is_open(typed)


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ('"""\none\n\ntwo\n"""\n', ("", "one\n\ntwo")),
        ('/edit """\none\ntwo"""', ("edit", "one\ntwo")),
        ('"""/new"""', ("", "/new")),
        ("/bye", ("quit", "")),
        ("/exit", ("quit", "")),
        ("/clear", ("new", "")),
        ("/?", ("help", "")),
        ("/set temperature 0.5", ("set", "temperature 0.5")),
    ],
)
def test_quotes_and_other_names_of_commands(typed: str, read: tuple[str, str]):
    """Quotes are not part of the message; a slash within them begins no command."""
    assert read == read_line(typed)


def test_quotes_that_are_not_closed_stay():
    """They are text then."""
    assert '"""one' == unquoted('"""one')
    assert "one" == unquoted("one")


def test_completions():
    """Of commands at the beginning, and of what may follow them."""

    def choices(command: str) -> list[str]:
        return ["temperature ", "top_p "] if command == "set" else []

    def completed(typed: str) -> list[tuple[str, int]]:
        return list(completions(typed, choices))

    assert [("/tour", -3)] == completed("/to")
    assert {("/save", -2), ("/set", -2), ("/sessions", -2), ("/system", -2)} == {*completed("/s")}
    assert [("temperature ", -2)] == completed("/set te")
    assert [] == completed("/set te ")
    assert [] == completed("/why ")
    assert [] == completed("to")
    assert [] == completed("//to")


def test_the_help_names_every_key():
    """And other names of commands."""
    for word in ("Alt-Enter", '"""', "Ctrl-C", "Tab", "/bye", "/clear", "/tour", "/sessions"):
        assert word in help_text()


# --- what is below an answer ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "whole", "full"),
    [(0, 100, 0), (1, 100, 1), (50, 100, 10), (99, 100, 19), (100, 100, 20), (0, 0, 0)],
)
def test_the_bar(part: int, whole: int, full: int):
    """It is full only if nothing was computed, and empty only if nothing was reused."""
    assert "#" * full + "." * (20 - full) == bar(part, whole, blocks="#.")


def test_the_line_below_an_answer_has_a_bar_and_the_speed():
    """The bar on a terminal; the speed if the server measured one."""
    answer = Answer("x", Cairn("continuation", 64), Usage(128, 9), "stop", 0.1, rate=61.4)
    assert (
        "continuation · ##########.......... 64 of 128 tokens reused · first token after 100 ms · "
        "61 tokens/s"
    ) == summary(answer, "#.")
    answer.rate = 9.46
    assert summary(answer).endswith("· 9.5 tokens/s")


# --- rendering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_lines_break_between_words(size: int):
    """However the text arrives; line breaks and indentation stay; a long word is not torn."""
    text = "one two three\n    four five\n\nabcdefghijklmnop six 山山山山山山山"
    wrapped = Wrapped(10)
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    shown = "".join(map(wrapped.feed, pieces)) + wrapped.flush()
    assert [
        *("one two", "three", "    four", "five", "", "abcdefghijklmnop six", "山山山山山", "山山")
    ] == shown.split("\n")


def test_a_plain_answer_on_a_terminal_breaks_between_words():
    """With tags around thoughts, and a line break at the end."""
    written: list[str] = []
    breaking = Breaking(written.append, 12)
    breaking.feed("a long thought", is_thought=True)
    breaking.feed("and an answer", is_thought=False)
    breaking.finish()
    assert "<think>\na long\nthought\n</think>\n\nand an\nanswer\n" == "".join(written)


DOCUMENT = """# Title

Some **bold** <b>text</b>, a line
break and a paragraph that is too long for a line of this terminal.

- one
- two

  more
- three

1. a
2. b

```python
def f(x):

    return x
```

| a | b |
|---|---|
| 1 | 2 |

> quote

End."""

RENDERED = """Title

Some bold <b>text</b>, a line
break and a paragraph that is too long
for a line of this terminal.

 • one
 • two
   more
 • three

 1 a
 2 b

def f(x):

    return x

 a  b
 ────
 1  2

▌ quote

End."""


def rendered(text: str, size: int, *, height: int = 12) -> str:
    """What a terminal shows of a text that arrived in pieces."""
    output = io.StringIO()
    markdown = Markdown(Console(file=output, force_terminal=True, width=40, height=height))
    for begin in range(0, len(text), size):
        markdown.feed(text[begin : begin + size], is_thought=False)
    markdown.finish()
    markdown.finish()
    picture = Picture()
    picture.feed(output.getvalue().replace("\n", "\r\n"))
    return picture.text().rstrip()


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_markdown_is_rendered_as_it_arrives(size: int):
    """It looks the same however it arrived: nothing is left of what was drawn before."""
    assert RENDERED == rendered(DOCUMENT, size)


def test_a_block_higher_than_the_terminal():
    """All of it is there in the end, and once."""
    lines = [f"line {number}" for number in range(30)]
    assert "\n".join(lines) == rendered("```\n" + "\n".join(lines) + "\n```\n", 5)


@pytest.mark.parametrize("size", range(1, 9))
def test_a_line_that_is_not_complete_ends_no_block(size: int):
    """Its rest may make it the next item of a list."""
    text = "1. a\n\n2. b\n\n3. c\n\nEnd."
    assert " 1 a\n 2 b\n 3 c\n\nEnd." == rendered(text, len(text))
    assert rendered(text, len(text)) == rendered(text, size)


def test_the_end_of_a_high_block_is_shown_meanwhile():
    """Not its beginning, which has been seen."""
    output = io.StringIO()
    markdown = Markdown(Console(file=output, force_terminal=True, width=40, height=12))
    lines = [f"line {number}" for number in range(30)]
    markdown.feed("```\n" + "\n".join(lines), is_thought=False)
    shown = output.getvalue()
    markdown.finish()
    assert "line 29" in shown
    assert "line 0\n" not in shown


def test_thoughts_before_markdown():
    """They are dim, and separate."""
    output = io.StringIO()
    markdown = Markdown(Console(file=output, force_terminal=True, width=40))
    markdown.feed("Hm, ", is_thought=True)
    markdown.feed("well", is_thought=True)
    markdown.feed("*Yes*", is_thought=False)
    markdown.feed("or no", is_thought=True)
    markdown.finish()
    picture = Picture()
    picture.feed(output.getvalue().replace("\n", "\r\n"))
    assert "Hm, well\n\nYes\nor no" == picture.text().rstrip()
    assert "\x1b[2mHm," in output.getvalue()
    assert "\x1b[3mYes" in output.getvalue()


def test_the_last_block_may_still_change():
    """What comes before it may not."""
    assert "End." == DOCUMENT[last_block(DOCUMENT) :]
    assert 0 == last_block("- one\n- two\n")
    assert 0 == last_block("")


# --- settings and greeting -----------------------------------------------------------------------


def test_the_argument_of_set():
    """A name and a value, as in other chats; a name alone takes the value back."""
    assert ("temperature", 0.5) == parsed("temperature 0.5")
    assert ("top_p", 0.9) == parsed("parameter top-p 0.9")
    assert ("seed", None) == parsed("seed")
    assert "temperature         0.5" in shown({"temperature": 0.5})
    assert "seed                default" in shown({})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("temprature 1", "There is no parameter 'temprature'; /set knows temperature"),
        ("top_p 7", "top_p: 7.0 is not in the range"),
        ("seed much", "seed: 'much' is not a valid integer"),
    ],
)
def test_an_invalid_setting(text: str, said: str):
    """The sentence names it."""
    with pytest.raises(click.UsageError, match=said):
        parsed(text)


def mac(free: int) -> Machine:
    """A machine that computes on its GPU, with so many GiB free."""
    return Machine(memory_bytes=free * GIB, free_bytes=free * GIB, on_cpu=False)


def greeted(model: str, machine: Machine | None) -> list[str]:
    """The lines of a greeting."""
    return [
        *greeting(version="1.0", model=model, where=" at URL", context_tokens=4096, machine=machine)
    ]


def test_the_greeting():
    """Three lines: the model and what it can do, openings, commands."""
    model, numbered, commands = greeted("qwen", mac(64))
    assert "Cairn 1.0 · qwen at URL: a context of 4,096 tokens." == model
    for number, text in enumerate(openings_of("qwen"), 1):
        assert f"{number} {text}" in numbered
    assert "/tour" in commands


def test_the_greeting_of_pebble():
    """It is a toy, and a real model that fits the machine is named."""
    model, _, _, real = greeted(PEBBLE, mac(12))
    assert "a toy of 8 MB" in model
    assert "12.0 GiB of memory are free" in real
    assert "cairn chat --model qwen3-14b (downloads 8.3 GB once)" in real
    assert 3 == len(greeted(PEBBLE, None))
