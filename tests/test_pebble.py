"""
Pebble's files: size, tokenizer and template. Its skills are measured by
workshop/pebble/src/cairn_pebble/train.py, and tested in tests/e2e.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from cairn.engine.model.builtin import builtin_directory
from cairn.engine.model.generation_config import read_template_settings
from cairn_pebble.evaluation import SKILLS
from cairn_pebble.sequences import MARKER_TOKENS, SPECIAL_TOKENS
from cairn_pebble.texts.by_hand import SPOKEN, WISHES

BY_HAND = {
    "Told and asked in words that were written by hand",
    "Calls of tools that were written by hand",
}
EVALUATED = {skill.name for skill in SKILLS} | BY_HAND

Message = dict[str, Any]
Render = Callable[..., str]

WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Málaga"}}}


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer() -> Any:  # transformers has no common type for it
    """The tokenizer as transformers, and so mlx-lm, load it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(builtin_directory()))


@pytest.fixture(name="render")
def _render(tokenizer: Any) -> Render:
    """Renders messages through the chat template, as text."""

    def render(messages: list[Message], **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    return render


def user(content: Any) -> Message:
    """A message."""
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    """A message."""
    return {"role": "assistant", "content": content, **more}


def tool(content: Any) -> Message:
    """A message."""
    return {"role": "tool", "content": content}


def system(content: Any) -> Message:
    """A message."""
    return {"role": "system", "content": content}


class TestFiles:
    """The files that ship."""

    def test_small_enough_to_ship(self) -> None:
        """All files together take at most 8 MB."""
        assert sum(path.stat().st_size for path in builtin_directory().glob("*.*")) <= 8_000_000

    def test_nothing_but_the_model(self) -> None:
        """Files next to the weights may be part of the fingerprint; none of them is a program."""
        assert not list(builtin_directory().glob("*.py"))

    def test_the_figures_are_of_these_weights(self) -> None:
        """
        The evaluation belongs to the weights that ship. Each skill reaches its target, or the card
        names it as one that does not; there are twenty answers to read. Skills whose evaluation was
        added later are named in the card as not measured, and no others are.
        """
        page = (builtin_directory() / "EVALUATION.md").read_text("utf-8")
        card = (builtin_directory() / "README.md").read_text("utf-8")
        weights = (builtin_directory() / "model.safetensors").read_bytes()
        assert hashlib.sha256(weights).hexdigest() in page
        table = [line.split("|")[1:-1] for line in page.split("\n") if line.startswith("| ")]
        rows = [[cell.strip() for cell in row] for row in table]
        skills = [row for row in rows if len(row) == 5][1:]
        figures = {name: (int(right), int(tried)) for name, right, tried, _, _ in skills}
        later = card.partition("Not measured yet:\n\n")[2].partition("\n\n")[0]
        unmeasured = {line.removeprefix("- ") for line in later.split("\n") if line}
        by_hand = {name for name in BY_HAND if name in page}
        assert figures.keys() | by_hand == EVALUATED - unmeasured
        for skill in SKILLS:
            if skill.name in unmeasured:
                continue
            right, tried = figures[skill.name]
            assert tried >= 200 // skill.every, skill.name
            assert right >= skill.least * tried or f"- {skill.name}:" in card, skill.name
            assert f"- {skill.name}:" not in card or right < skill.least * tried, skill.name
        tables = [SPOKEN, *([WISHES] if by_hand == BY_HAND else [])]
        assert sum(1 + len(some) for some in tables) == len([row for row in rows if len(row) == 4])
        assert 21 == len([row for row in rows if len(row) == 2])

    def test_mlx_lm_understands_it(self) -> None:
        """
        mlx-lm loads it, and detects the end of a turn, thinking and tool calls without
        configuration.
        """
        from mlx_lm import load

        loaded: Any = load(str(builtin_directory()))
        _, tokenizer = loaded
        ends = ["<|im_end|>", "<|endoftext|>"]
        assert set(tokenizer.convert_tokens_to_ids(ends)) == set(tokenizer.eos_token_ids)
        assert tokenizer.has_thinking
        assert tokenizer.has_tool_calling

    def test_long_prompts_are_served(self) -> None:
        """An agent's long system prompt fits into the context."""
        config = json.loads((builtin_directory() / "config.json").read_text("utf-8"))
        assert 65_536 == config["max_position_embeddings"]


class TestTokenizer:
    """Text to ids and back."""

    @pytest.mark.parametrize(
        "text",
        [
            "A cairn is a pile of stones.",
            "  two spaces, a tab\t, lines\n\n\r\n and 1234567890 ",
            "naïve café, e\u0301 decomposed, 你好, привет, 🙂🏔️",
            '{"name": "weather", "arguments": {"city": "Málaga"}}',
            "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>",
            "".join(map(chr, range(256))),
            "",
        ],
    )
    def test_round_trip(self, tokenizer: Any, text: str) -> None:
        """
        Any text survives encoding and decoding; nothing is normalised, and nothing is unknown.
        """
        assert text == tokenizer.decode(tokenizer.encode(text))

    def test_prose_is_compressed(self, tokenizer: Any) -> None:
        """English prose takes less than one token per three characters."""
        text = "The walkers went from one cairn to the next until they could see the hut."

        assert len(tokenizer.encode(text)) < len(text) / 3

    def test_control_tokens(self, tokenizer: Any) -> None:
        """Special tokens and markers are one id each, at the end of the vocabulary."""
        ids = [tokenizer.encode(token) for token in SPECIAL_TOKENS + MARKER_TOKENS]

        assert [[number] for number in range(1632 - len(ids), 1632)] == ids

    def test_only_special_tokens_are_skipped(self, tokenizer: Any) -> None:
        """Decoding without special tokens keeps the markers, which parsers look for."""
        ids = tokenizer.encode("<|im_start|>a<think></tool_call><|im_end|>")

        assert "a<think></tool_call>" == tokenizer.decode(ids, skip_special_tokens=True)

    def test_ends_and_length(self, tokenizer: Any) -> None:
        """Turns end with <|im_end|>, padding is <|endoftext|>, 65536 tokens fit."""
        assert ("<|im_end|>", "<|endoftext|>", 65_536) == (
            tokenizer.eos_token,
            tokenizer.pad_token,
            tokenizer.model_max_length,
        )


class TestTemplate:
    """Messages to a prompt, as Qwen3 does it."""

    def test_plain(self, render: Render) -> None:
        """Each message is a ChatML turn, and nothing is added by default."""
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi.<|im_end|>\n"
        )

        assert expected == render([system("Be brief."), user("Hello"), assistant("Hi.")])

    def test_it_does_not_think_unless_it_is_asked_to(self) -> None:
        """
        mlx-lm lets every model think that can; the file of defaults turns this off for Pebble.
        """
        assert {"enable_thinking": False} == read_template_settings(builtin_directory())

    def test_generation_prompt(self, render: Render) -> None:
        """The generation prompt opens an assistant turn."""
        text = render([user("Hello")], add_generation_prompt=True, enable_thinking=True)

        assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" == text

    def test_thinking_disabled(self, render: Render) -> None:
        """With thinking off, the generation prompt has an empty think block."""
        plain, on, off = (
            render([user("Hello")], add_generation_prompt=True, **options)
            for options in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        )

        assert plain == off
        assert on + "<think>\n\n</think>\n\n" == off

    def test_tools_with_system(self, render: Render) -> None:
        """Tools are JSON lines in the system block, after the system message."""
        text = render([system("Be brief."), user("Hello")], tools=[WEATHER_TOOL])
        head, _, rest = text.partition("<|im_end|>\n")

        assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
        assert f"<tools>\n{json.dumps(WEATHER_TOOL)}\n</tools>" in head
        assert "<|im_start|>user\nHello<|im_end|>\n" == rest

    def test_tools_without_system(self, render: Render) -> None:
        """Without a system message, the tools have a system block of their own."""
        text = render([user("Hello")], tools=[WEATHER_TOOL])

        assert text.startswith("<|im_start|>system\n# Tools\n\n")
        assert 1 == text.count("<|im_start|>system")

    def test_tool_calls(self, render: Render) -> None:
        """Calls are JSON in tags after the content, with non-ASCII letters unescaped."""
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Málaga"}}\n</tool_call>'
        text = render([user("?"), assistant("I ask.", tool_calls=[TOOL_CALL, TOOL_CALL])])

        assert text.endswith(f"<|im_start|>assistant\nI ask.\n{call}\n{call}<|im_end|>\n")

    def test_tool_call_without_content(self, render: Render) -> None:
        """A call without content starts the turn at once; missing content is no error."""
        missing: list[Message] = [{}, {"content": None}, {"content": ""}, {"content": []}]
        for message in missing:
            turn = {"role": "assistant", "tool_calls": [TOOL_CALL], **message}
            text = render([user("?"), turn])

            assert '<|im_start|>assistant\n<tool_call>\n{"name": "weather"' in text

    def test_tool_call_arguments_as_text(self, render: Render) -> None:
        """Arguments that are already JSON text are rendered unchanged."""
        function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
        text = render([user("?"), assistant(None, tool_calls=[{"function": function}])])

        assert '{"name": "weather", "arguments": {"city":"Oslo"}}\n</tool_call>' in text

    def test_tool_call_without_arguments(self, render: Render) -> None:
        """A call without arguments is rendered with an empty object."""
        missing: list[Any] = ["", None, {}]
        for arguments in missing:
            call = {"function": {"name": "weather", "arguments": arguments}}
            text = render([user("?"), assistant(None, tool_calls=[call])])

            assert '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in text

    def test_tool_responses_are_merged(self, render: Render) -> None:
        """Consecutive tool messages are wrapped one by one and share a user turn."""
        text = render([user("?"), assistant("I ask."), tool("one"), tool("two"), assistant("So.")])
        expected = (
            "<|im_start|>user\n"
            "<tool_response>\none\n</tool_response>\n"
            "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nSo.<|im_end|>\n"
        )

        assert text.endswith(expected)

    def test_separate_tool_responses(self, render: Render) -> None:
        """Tool messages with an assistant turn between them are separate turns."""
        text = render([user("?"), assistant("a"), tool("one"), assistant("b"), tool("two")])

        assert 2 == text.count("<|im_start|>user\n<tool_response>\n")

    @pytest.mark.parametrize(
        "turn",
        [
            assistant("It is 4.", reasoning_content="two and two"),
            assistant("It is 4.", reasoning_content="\ntwo and two\n"),
            assistant("<think>\ntwo and two\n</think>\n\nIt is 4."),
            assistant([{"type": "text", "text": "<think>two and two</think>It is 4."}]),
        ],
    )
    def test_thinking_after_last_user(self, render: Render, turn: Message) -> None:
        """
        Thinking after the last user message is rendered, in one form; earlier thinking is not.
        """
        rendered = "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>\n"
        kept = render([user("2+2?"), turn])
        dropped = render([user("2+2?"), turn, user("Sure?")])

        assert kept.endswith(rendered)
        assert "<|im_start|>assistant\nIt is 4.<|im_end|>\n" in dropped
        assert "two and two" not in dropped

    def test_thinking_kept_over_tool_answers(self, render: Render) -> None:
        """A tool result is no user message: the thinking before it is kept."""
        for answer in (tool("14"), user("<tool_response>\n14\n</tool_response>")):
            text = render([user("?"), assistant("I ask.", reasoning_content="hm"), answer])

            assert "<think>\nhm\n</think>\n\nI ask." in text

    def test_only_earlier_thinking_is_dropped(self, render: Render) -> None:
        """
        Of two turns with thinking, one before and one after the last user message, only the later
        is kept.
        """
        text = render(
            [
                user("a"),
                assistant("b", reasoning_content="early"),
                user("c"),
                assistant("d", reasoning_content="late"),
                tool("e"),
            ]
        )

        assert (0, 1) == (text.count("early"), text.count("<think>\nlate\n</think>\n\nd"))

    def test_think_tags_in_mid_content(self, render: Render) -> None:
        """Tags that are not at the beginning are content."""
        content = "Write <think> and </think> around it."

        assert content in render([user("?"), assistant(content), user("ok")])

    def test_system_in_mid_conversation(self, render: Render) -> None:
        """A later system message is rendered in its place, with tools and without."""
        messages = [system("first"), user("a"), system("second"), user("b")]
        for options in ({}, {"tools": [WEATHER_TOOL]}):
            text = render(messages, **options)

            assert "a<|im_end|>\n<|im_start|>system\nsecond<|im_end|>\n<|im_start|>user\nb" in text
            assert 1 == text.count("first")

    def test_text_parts(self, render: Render) -> None:
        """Content in text parts is rendered like the same text as a string, in every role."""
        parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
        for make in (system, user, assistant, tool):
            assert render([user("?"), make("one, two")]) == render([user("?"), make(parts)])

    @pytest.mark.parametrize("make", [system, user, assistant, tool])
    def test_missing_content(self, render: Render, make: Callable[[Any], Message]) -> None:
        """Missing content is empty content, in every role."""
        expected = render([user("?"), make("")])

        assert expected == render([user("?"), make(None)])
        assert expected == render([user("?"), {"role": make("")["role"]}])

    @pytest.mark.parametrize(
        "message", [{"role": "poet", "content": "o"}, user([{"type": "image_url"}])]
    )
    def test_what_cannot_be_rendered(self, render: Render, message: Message) -> None:
        """A role or a part that the template does not know is an error, and never left out."""
        from jinja2 import TemplateError

        with pytest.raises(TemplateError):
            render([message])

    def test_next_turn_extends_the_last(self, render: Render) -> None:
        """
        Except for its reasoning, a prompt with its answer is the beginning of the next prompt.
        """
        prompt = render(
            [user("a")], tools=[WEATHER_TOOL], add_generation_prompt=True, enable_thinking=True
        )
        messages = [user("a"), assistant("b"), user("c")]
        following = render(messages, tools=[WEATHER_TOOL], add_generation_prompt=True)

        assert following.startswith(prompt + "b<|im_end|>\n")
