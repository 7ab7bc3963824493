"""What a model's makers recommend is the default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.engine.mlx.model import load_model
from cairn.engine.model.generation_config import (
    NAME,
    GenerationConfigFault,
    read_defaults,
    read_template_settings,
)
from cairn.engine.sampling import Sampling
from cairn_pebble.sequences import TEXT_END, TURN_END


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": True, "pad_token_id": 3, "transformers_version": "5"}, Sampling()),
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 2},
            Sampling(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=2.0),
        ),
        ({"do_sample": False, "temperature": 0.6, "top_k": 3}, Sampling(temperature=0.0, top_k=3)),
        ({"do_sample": None, "temperature": None, "eos_token_id": None}, Sampling()),
        ({"eos_token_id": 7}, Sampling()),
        ({"repetition_guard": True}, Sampling(repetition_guard=True)),
        ({"eos_token_id": [7, 8]}, Sampling()),
    ],
)
def test_defaults(tmp_path: Path, found: dict[str, Any], expected: Sampling) -> None:
    """
    What is named is taken; what is not named, or null, is OpenAI's default; a model that is not to
    be sampled is greedy.
    """
    (tmp_path / NAME).write_text(json.dumps(found))

    assert expected == read_defaults(tmp_path)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ("[]", "it is not a JSON object"),
        ('{"top_p": []}', "top_p must be a number, not []"),
        ('{"min_p": "' + "x" * 99 + '"}', f"min_p must be a number, not '{'x' * 12}...{'x' * 13}'"),
        ('{"repetition_penalty": ' + "[" * 500 + "]" * 500 + "}", "repetition_penalty must be a"),
        ('{"temperature": 1' + "0" * 400 + "}", "temperature is too large"),
        ('{"top_k": 1.5}', "top_k must be an integer, not 1.5"),
        ('{"do_sample": "no"}', "do_sample must be true or false, not 'no'"),
        ('{"repetition_guard": 1}', "repetition_guard must be true or false, not 1"),
        ('{"eos_token_id": [7, -1]}', "eos_token_id must be a token id or a list of them, not [7,"),
        ('{"chat_template_kwargs": 7}', "chat_template_kwargs must be an object, not 7"),
        ('{"top_p": 0}', "top_p must be above 0 and at most 1, not 0.0"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, found: str, fault: str) -> None:
    """The message names the file and the field, and says what the field must be."""
    (tmp_path / NAME).write_text(found)
    with pytest.raises(GenerationConfigFault) as refused:
        read_defaults(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / NAME} cannot be used: {fault}")


def test_no_file(tmp_path: Path) -> None:
    """A model without the file has OpenAI's defaults."""
    assert Sampling() == read_defaults(tmp_path)


def test_settings_of_the_template(tmp_path: Path) -> None:
    """The file's template settings are used, except for the server's own, which are refused."""
    assert {} == read_template_settings(tmp_path)
    (tmp_path / NAME).write_text('{"chat_template_kwargs": {"enable_thinking": false}}')
    assert {"enable_thinking": False} == read_template_settings(tmp_path)
    for settings in ('{"tokenize": true}', "[]", "7"):
        (tmp_path / NAME).write_text(f'{{"chat_template_kwargs": {settings}}}')
        with pytest.raises(GenerationConfigFault, match="chat_template_kwargs"):
            read_template_settings(tmp_path)


def test_a_model_has_its_defaults_and_its_ends(model_directory: Path) -> None:
    """Both ends of the random model end its answers, and it is sampled as its file says."""
    loaded = load_model(str(model_directory))

    ends = [loaded.tokenizer.encode(end, add_special_tokens=False) for end in (TURN_END, TEXT_END)]
    ids = {token for tokens in ends for token in tokens}
    assert ids == loaded.eos_ids
    assert Sampling(temperature=0.8, top_p=0.95) == loaded.defaults
