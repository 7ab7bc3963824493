"""
A model that calls a client's tools when a user says so: the scripted model of the tests, with a
chat template that tells it which of its lines is due.

The model knows only the last token of its prompt. So the template puts a cue there, which it
chooses by what a user or a tool said last, and puts the same cue in front of that answer when the
conversation comes back: what was prompt stays the beginning of the next one, as with any model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors.numpy import load_file, save_file

from tests.support.scripted_model import make_scripted_model

_CONTEXT_TOKENS = 131_072
_ENDS = "<|im_end|>"
_LATER_LAYER = re.compile(r"model\.layers\.[1-9]")


@attrs.frozen
class Line:
    """
    What the model says when a word falls.

    Attributes:
        word: what the last message of a user's or a tool's has in it; empty for the line that is
            due otherwise.
        answer: all that it says.
    """

    word: str
    answer: str


def calls(name: str, arguments: Mapping[str, Any]) -> str:
    """The call of a tool as the model writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)})
    return f"<tool_call>\n{call}\n</tool_call>"


def make(directory: Path, lines: Sequence[Line], otherwise: str) -> Path:
    """
    Write the model into a directory that is not there yet, and return it.

    Args:
        otherwise: what it says where no word falls.
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
    # What its layers compute is not used; with one of them it reads long prompts in little time.
    weights = load_file(str(directory / "model.safetensors"))
    kept = {name: value for name, value in weights.items() if not _LATER_LAYER.match(name)}
    save_file(kept, str(directory / "model.safetensors"), metadata={"format": "mlx"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config |= {"num_hidden_layers": 1, "max_position_embeddings": _CONTEXT_TOKENS}
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return directory


def _template(plays: Sequence[Line], cues: Sequence[str]) -> str:
    """
    ChatML, as plain as can be, with the cue at the beginning of each answer. ``tool_call.name`` is
    what mlx-lm knows the format of the calls by.
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
