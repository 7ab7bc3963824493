"""The built-in model: its files, its place on the disk, its tokenizer, its template, its words."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from cairn.engine.builtin import (
    BUILTIN_NAME,
    MANIFEST_NAME,
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    BuiltinModelError,
    BuiltinSpec,
    ensure_builtin_model,
)

SMALL = BuiltinSpec(
    hidden_size=32,
    layer_count=1,
    head_count=2,
    kv_head_count=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=300,
)
"""Enough for what concerns the directory only."""

SMALL_DIGEST = "80f1de56cf129299b3127e5fc52e85d04d9eb037bea7b65a370bb926b48db4e9"
"""SHA-256 over the small model's weights, the same on every machine."""

Message = dict[str, Any]
Render = Callable[..., str]

WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Málaga"}}}


@pytest.fixture(scope="session", name="model_directory")
def _model_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built-in model with its default specification; nothing may be asked of the network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield ensure_builtin_model(tmp_path_factory.mktemp("models") / BUILTIN_NAME)


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer(model_directory: Path) -> Any:  # transformers has no one type for it
    """The tokenizer as transformers, and so mlx-lm, load it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model_directory))


@pytest.fixture(scope="session", name="loaded")
def _loaded(model_directory: Path) -> Any:  # mlx-lm is not typed
    """The (model, tokenizer) pair of mlx-lm."""
    pytest.importorskip("mlx.core")
    from mlx_lm import load

    return load(str(model_directory))


@pytest.fixture(name="render")
def _render(tokenizer: Any) -> Render:
    """Renders messages through the chat template, as text."""

    def render(messages: list[Message], **options: Any) -> str:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    return render


def contents(directory: Path) -> dict[str, bytes]:
    """Read all files of a directory."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names(directory: Path) -> set[str]:
    """List a directory."""
    return {path.name for path in directory.iterdir()}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def tool(content: Any) -> Message:
    return {"role": "tool", "content": content}


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


class TestFiles:
    """What is written."""

    def test_same_bytes_every_time(self, tmp_path: Path, model_directory: Path) -> None:
        """A second make, in another process with another hash seed, gives the same bytes."""
        script = (
            "import sys; from pathlib import Path; from cairn.engine.builtin import *; "
            "ensure_builtin_model(Path(sys.argv[1]))"
        )
        again = tmp_path / "again"
        environment = os.environ | {"PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run([sys.executable, "-c", script, str(again)], check=True, env=environment)

        assert contents(model_directory) == contents(again)

    def test_same_weights_everywhere(self, tmp_path: Path) -> None:
        """The weights do not depend on the platform or on the version of any library."""
        weights = ensure_builtin_model(tmp_path / "m", spec=SMALL) / "model.safetensors"

        assert SMALL_DIGEST == hashlib.sha256(weights.read_bytes()).hexdigest()

    def test_seed_changes_weights_only(self, tmp_path: Path) -> None:
        """Another seed gives other weights and the same tokenizer and configuration."""
        first = contents(ensure_builtin_model(tmp_path / "a", spec=SMALL))
        other = contents(ensure_builtin_model(tmp_path / "b", spec=attrs.evolve(SMALL, seed=1)))

        assert {"model.safetensors", MANIFEST_NAME} == {
            name for name in first if first[name] != other[name]
        }

    def test_manifest_lists_all_parts(self, model_directory: Path) -> None:
        """The manifest has size and digest of every other file."""
        files = contents(model_directory)
        manifest = json.loads(files.pop(MANIFEST_NAME))

        assert manifest["files"] == {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        }

    def test_no_mlx_needed(self, tmp_path: Path) -> None:
        """The model is made without MLX being imported."""
        script = (
            "import sys; from pathlib import Path; from cairn.engine.builtin import *; "
            "ensure_builtin_model(Path(sys.argv[1])); "
            "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules))"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "m")]

        assert 0 == subprocess.run(command, check=False).returncode

    @pytest.mark.parametrize(
        "wrong",
        [{"layer_count": 0}, {"head_count": 3, "kv_head_count": 2}, {"head_dim": 7}],
    )
    def test_impossible_shape(self, wrong: dict[str, int]) -> None:
        """A specification that no Qwen3 can have is refused when it is made."""
        with pytest.raises(ValueError):  # attrs words the message
            BuiltinSpec(**wrong)  # type: ignore[arg-type]  # each of them is an int


class TestDirectory:
    """When it is written, and what happens to what was there."""

    def test_returns_directory(self, tmp_path: Path) -> None:
        """The directory is returned, parents are made, and nothing but a lock stays beside it."""
        directory = tmp_path / "data" / "models" / BUILTIN_NAME

        assert directory == ensure_builtin_model(directory, spec=SMALL)
        assert {BUILTIN_NAME, f".{BUILTIN_NAME}.lock"} == names(directory.parent)

    def test_complete_is_untouched(self, tmp_path: Path) -> None:
        """A complete directory is left as it is, and no progress is told."""
        told: list[int] = []
        directory = ensure_builtin_model(tmp_path / "m", spec=SMALL)
        before = [(path.name, path.stat().st_mtime_ns) for path in directory.iterdir()]
        ensure_builtin_model(directory, spec=SMALL, progress=lambda *step: told.append(step[1]))

        assert before == [(path.name, path.stat().st_mtime_ns) for path in directory.iterdir()]
        assert [] == told

    def test_progress(self, tmp_path: Path) -> None:
        """Progress counts one by one up to the number it announced."""
        told: list[tuple[int, int]] = []
        ensure_builtin_model(
            tmp_path / "m", spec=SMALL, progress=lambda _, *step: told.append(step)
        )

        assert [(done, len(told)) for done in range(1, len(told) + 1)] == told

    @pytest.mark.parametrize("step", [1, 2, 4])
    def test_interrupted(self, tmp_path: Path, step: int) -> None:
        """An interrupted make leaves no directory and no parts; the next one succeeds."""

        def interrupt(_: str, done: int, __: int) -> None:
            if done == step:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ensure_builtin_model(tmp_path / "m", spec=SMALL, progress=interrupt)

        assert {".m.lock"} == names(tmp_path)
        assert (ensure_builtin_model(tmp_path / "m", spec=SMALL) / MANIFEST_NAME).exists()

    def test_interrupted_replacement(self, tmp_path: Path) -> None:
        """When a replacement is interrupted, the old directory is still there, whole."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        directory = ensure_builtin_model(tmp_path / "m", spec=SMALL)
        before = contents(directory)
        with pytest.raises(KeyboardInterrupt):
            ensure_builtin_model(directory, spec=attrs.evolve(SMALL, seed=1), progress=interrupt)

        assert before == contents(directory)

    def test_killed(self, tmp_path: Path) -> None:
        """What a killed make left beside the place is swept up by the next."""
        (tmp_path / ".m.partial").mkdir()
        (tmp_path / ".m.partial" / "config.json").write_text("{")
        ensure_builtin_model(tmp_path / "m", spec=SMALL)

        assert {"m", ".m.lock"} == names(tmp_path)

    def test_damaged_is_made_anew(self, tmp_path: Path) -> None:
        """A changed, a missing and an unreadable file are each noticed and made good."""
        directory = ensure_builtin_model(tmp_path / "m", spec=SMALL)
        before = contents(directory)
        weights = directory / "model.safetensors"
        damage = [
            lambda: weights.write_bytes(before["model.safetensors"][:-1] + b"\x01"),
            lambda: weights.unlink(),
            lambda: (directory / MANIFEST_NAME).write_text("[]"),
        ]
        for cause in damage:
            cause()
            ensure_builtin_model(directory, spec=SMALL)

            assert before == contents(directory)

    def test_foreign_is_refused(self, tmp_path: Path) -> None:
        """A directory that holds something else is refused and stays as it was."""
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text("somebody's model")
        with pytest.raises(BuiltinModelError, match="taken"):
            ensure_builtin_model(tmp_path / "m", spec=SMALL)

        assert {"config.json": b"somebody's model"} == contents(tmp_path / "m")

    def test_vocabulary_too_large(self, tmp_path: Path) -> None:
        """A vocabulary that the corpus cannot fill is refused, and nothing is left."""
        with pytest.raises(BuiltinModelError, match="the corpus yields"):
            ensure_builtin_model(tmp_path / "m", spec=attrs.evolve(SMALL, vocab_size=90_000))

        assert {".m.lock"} == names(tmp_path)

    def test_two_at_once(self, tmp_path: Path) -> None:
        """Processes that make it at the same time all end well, with one complete model."""
        script = (
            "import sys; from pathlib import Path; from cairn.engine.builtin import *; "
            "ensure_builtin_model(Path(sys.argv[1]), progress=lambda *_: print('made'))"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "m")]
        makers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        outputs = [maker.communicate()[0] for maker in makers]

        assert [0, 0, 0] == [maker.returncode for maker in makers]
        assert 1 == sum(b"made" in output for output in outputs)
        assert {"m", ".m.lock"} == names(tmp_path)


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
        """Any text comes back as it was; nothing is normalised, nothing is unknown."""
        assert text == tokenizer.decode(tokenizer.encode(text))

    def test_prose_is_compressed(self, tokenizer: Any) -> None:
        """English prose takes fewer than one token for three characters."""
        text = "The walkers went from one cairn to the next until they could see the hut."

        assert len(tokenizer.encode(text)) < len(text) / 3

    def test_control_tokens(self, tokenizer: Any) -> None:
        """Special tokens and markers are one id each, at the end of the vocabulary."""
        ids = [tokenizer.encode(token) for token in SPECIAL_TOKENS + MARKER_TOKENS]

        assert [[number] for number in range(2048 - len(ids), 2048)] == ids

    def test_only_special_tokens_are_skipped(self, tokenizer: Any) -> None:
        """Decoding without special tokens keeps the markers, which parsers look for."""
        ids = tokenizer.encode("<|im_start|>a<think></tool_call><|im_end|>")

        assert "a<think></tool_call>" == tokenizer.decode(ids, skip_special_tokens=True)

    def test_ends_and_length(self, tokenizer: Any) -> None:
        """Turns end with <|im_end|>, padding is <|endoftext|>, 32768 tokens fit."""
        assert ("<|im_end|>", "<|endoftext|>", 32768) == (
            tokenizer.eos_token,
            tokenizer.pad_token,
            tokenizer.model_max_length,
        )


class TestTemplate:
    """Messages to a prompt, as Qwen3 does it."""

    def test_plain(self, render: Render) -> None:
        """Each message is a ChatML turn, and nothing is added without being asked for."""
        expected = (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n"
            "<|im_start|>assistant\nHi.<|im_end|>\n"
        )

        assert expected == render([system("Be brief."), user("Hello"), assistant("Hi.")])

    def test_generation_prompt(self, render: Render) -> None:
        """The generation prompt opens a turn of the assistant."""
        text = render([user("Hello")], add_generation_prompt=True)

        assert "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n" == text

    def test_thinking_disabled(self, render: Render) -> None:
        """Without thinking, the generation prompt has an empty think block; else it has none."""
        plain, on, off = (
            render([user("Hello")], add_generation_prompt=True, **options)
            for options in ({}, {"enable_thinking": True}, {"enable_thinking": False})
        )

        assert plain == on
        assert plain + "<think>\n\n</think>\n\n" == off

    def test_tools_with_system(self, render: Render) -> None:
        """Tools are listed as JSON lines in the system block, behind the system message."""
        text = render([system("Be brief."), user("Hello")], tools=[WEATHER_TOOL])
        head, _, rest = text.partition("<|im_end|>\n")

        assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
        assert f"<tools>\n{json.dumps(WEATHER_TOOL)}\n</tools>" in head
        assert "<|im_start|>user\nHello<|im_end|>\n" == rest

    def test_tools_without_system(self, render: Render) -> None:
        """Without a system message the tools have a system block of their own."""
        text = render([user("Hello")], tools=[WEATHER_TOOL])

        assert text.startswith("<|im_start|>system\n# Tools\n\n")
        assert 1 == text.count("<|im_start|>system")

    def test_tool_calls(self, render: Render) -> None:
        """Calls stand as JSON in tags behind the content, non-ASCII letters as they are."""
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
        """Arguments that are JSON text already are rendered as they stand."""
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
        """Tool messages with an assistant turn between them are turns of their own."""
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
        """Thinking is rendered, in one form, behind the last real user message; earlier not."""
        rendered = "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>\n"
        kept = render([user("2+2?"), turn])
        dropped = render([user("2+2?"), turn, user("Sure?")])

        assert kept.endswith(rendered)
        assert "<|im_start|>assistant\nIt is 4.<|im_end|>\n" in dropped
        assert "two and two" not in dropped

    def test_thinking_kept_over_tool_answers(self, render: Render) -> None:
        """A tool that answers is no user that speaks: the thinking before it is kept."""
        for answer in (tool("14"), user("<tool_response>\n14\n</tool_response>")):
            text = render([user("?"), assistant("I ask.", reasoning_content="hm"), answer])

            assert "<think>\nhm\n</think>\n\nI ask." in text

    def test_only_earlier_thinking_is_dropped(self, render: Render) -> None:
        """Of two thinking turns, one before and one behind the last user, only one is kept."""
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
        """Tags that do not stand at the head are content."""
        content = "Write <think> and </think> around it."

        assert content in render([user("?"), assistant(content), user("ok")])

    def test_system_in_mid_conversation(self, render: Render) -> None:
        """A later system message is rendered where it stands, with tools and without."""
        messages = [system("first"), user("a"), system("second"), user("b")]
        for options in ({}, {"tools": [WEATHER_TOOL]}):
            text = render(messages, **options)

            assert "a<|im_end|>\n<|im_start|>system\nsecond<|im_end|>\n<|im_start|>user\nb" in text
            assert 1 == text.count("first")

    def test_text_parts(self, render: Render) -> None:
        """Content in text parts is rendered like the same text in one piece, in every role."""
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
        """A role or a part that the template does not know is an error, never left out."""
        from jinja2 import TemplateError

        with pytest.raises(TemplateError):
            render([message])

    def test_next_turn_extends_the_last(self, render: Render) -> None:
        """Without thinking, a prompt and its answer are the beginning of the next prompt."""
        prompt = render([user("a")], tools=[WEATHER_TOOL], add_generation_prompt=True)
        messages = [user("a"), assistant("b"), user("c")]
        following = render(messages, tools=[WEATHER_TOOL], add_generation_prompt=True)

        assert following.startswith(prompt + "b<|im_end|>\n")


class TestModel:
    """What mlx-lm makes of it."""

    PROMPTS = (
        "Hello",
        "What is a cairn?",
        "2+2?",
        "Write a function that adds two numbers.",
        "Why is the sky blue?",
        "List the files in this folder.",
    )

    def generate(self, loaded: Any, prompt: str, temperature: float) -> list[int]:
        """Generate 48 tokens, past any end of turn."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_sampler

        model, tokenizer = loaded
        ids = tokenizer.apply_chat_template([user(prompt)], add_generation_prompt=True)
        mx.random.seed(0)
        sampler = make_sampler(temp=temperature)
        steps = generate_step(mx.array(ids), model, max_tokens=48, sampler=sampler)
        return [int(token) for token, _ in steps]

    def test_tokenizer_is_understood(self, loaded: Any) -> None:
        """mlx-lm sees the ends of a turn, thinking and tool calls, without being told."""
        _, tokenizer = loaded

        assert {2039, 2041} == set(tokenizer.eos_token_ids)
        assert tokenizer.has_thinking
        assert tokenizer.has_tool_calling

    @pytest.mark.parametrize("prompt", PROMPTS)
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_varied(self, loaded: Any, prompt: str, temperature: float) -> None:
        """48 tokens, greedy or sampled, have at least 15 different ones among them."""
        assert len(set(self.generate(loaded, prompt, temperature))) >= 15

    def test_prompts_differ(self, loaded: Any) -> None:
        """No two prompts get the same answer."""
        answers = {tuple(self.generate(loaded, prompt, 0.0)) for prompt in self.PROMPTS}

        assert len(self.PROMPTS) == len(answers)

    def test_logits_spread(self, loaded: Any) -> None:
        """Logits are neither flat nor so steep that sampling has no choice."""
        import mlx.core as mx

        model, tokenizer = loaded
        logits = model(mx.array([tokenizer.encode("A cairn is a pile of stones.")]))

        assert 1.0 < float(mx.std(logits[0, -1])) < 6.0

    def test_untied(self, tmp_path: Path) -> None:
        """A model with a head of its own is loaded as well."""
        pytest.importorskip("mlx.core")
        from mlx_lm import load

        spec = attrs.evolve(SMALL, tie_word_embeddings=False)
        model, _ = load(str(ensure_builtin_model(tmp_path / "m", spec=spec)))[:2]

        assert (300, 32) == model.lm_head.weight.shape
