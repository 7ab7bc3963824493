"""
A model that calls a client's tools on a trigger word: the scripted model of the tests, with a chat
template that selects its next line.

The model knows only the last token of its prompt. So the template puts a cue there, chosen by the
last message of a user or a tool, and puts the same cue before that answer when the conversation
comes back: a prompt stays the beginning of the next one, as with any model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors.numpy import load_file, save_file

from tests.support.models.scripted_model import make_scripted_model

_CONTEXT_TOKENS = 131_072
_ENDS = "<|im_end|>"
_LATER_LAYER = re.compile(r"model\.layers\.[1-9]")


@attrs.frozen
class Line:
    """
    What the model says after a trigger word.

    Attributes:
        word: the text that the last message of a user or a tool contains; empty for the default
            line.
        answer: the whole answer.
    """

    word: str
    answer: str


def calls(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call as the model writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)})
    return f"<tool_call>\n{call}\n</tool_call>"


def make(directory: Path, lines: Sequence[Line], otherwise: str) -> Path:
    """
    Write the model into a new directory, and return it.

    Args:
        otherwise: what it says without a trigger word.
    """
    plays = [*lines, Line("", otherwise)]
    cues = [f"<|cue {number}|>" for number in range(len(plays))]
    table = [
        row
        for cue, line in zip(cues, plays, strict=True)
        for row in ((cue, line.answer, 1.0), (line.answer, _ENDS, 1.0))
    ]
    make_scripted_model(directory, table)
    (directory / "chat_template.jinja").write_text(_template(plays, cues), "utf-8")
    # The output of its layers is not used; with a single layer it reads long prompts quickly.
    weights = load_file(str(directory / "model.safetensors"))
    kept = {name: value for name, value in weights.items() if not _LATER_LAYER.match(name)}
    save_file(kept, str(directory / "model.safetensors"), metadata={"format": "mlx"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {"num_hidden_layers": 1, "max_position_embeddings": _CONTEXT_TOKENS}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def _template(plays: Sequence[Line], cues: Sequence[str]) -> str:
    """
    ChatML in its simplest form, with the cue at the beginning of each answer.

    mlx-lm recognises the format of the calls by ``tool_call.name``.
    """
    choice = "".join(
        f"{{%- {'if' if not index else 'elif'} {json.dumps(line.word)} in text -%}}"
        f"{{%- set due.cue = {json.dumps(cue)} -%}}"
        for index, (line, cue) in enumerate(zip(plays[:-1], cues, strict=False))
    )
    last = json.dumps(cues[-1])
    choice = f"{choice}{{%- else -%}}{{%- set due.cue = {last} -%}}{{%- endif -%}}"
    return f"""\
{{%- set due = namespace(cue={last}) -%}}
{{%- for tool in tools or [] -%}}
    {{{{- '<tools>' + tool | tojson + '</tools>\\n' -}}}}
{{%- endfor -%}}
{{%- for message in messages -%}}
    {{%- set text = message.content or '' -%}}
    {{{{- '<|im_start|>' + message.role + '\\n' -}}}}
    {{%- if message.role == 'assistant' -%}}
        {{{{- due.cue + text -}}}}
        {{%- for call in message.tool_calls or [] -%}}
            {{%- set tool_call = call.function -%}}
            {{%- set given = tool_call.arguments -%}}
            {{{{- '<tool_call>\\n{{"name": ' + tool_call.name | tojson + ', "arguments": ' -}}}}
            {{{{- (given if given is string else given | tojson) + '}}\\n</tool_call>' -}}}}
        {{%- endfor -%}}
    {{%- else -%}}
        {{{{- text -}}}}
        {{%- if message.role in ('tool', 'user') -%}}
            {choice}
        {{%- endif -%}}
    {{%- endif -%}}
    {{{{- '{_ENDS}\\n' -}}}}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}
    {{{{- '<|im_start|>assistant\\n' + due.cue -}}}}
{{%- endif -%}}
"""
