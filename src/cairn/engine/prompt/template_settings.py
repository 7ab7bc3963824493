"""The arguments of a chat template: those of the server, and those that clients may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENDERED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""
Arguments of a template that belong to the server, or that change how a template is rendered:
neither clients nor models may set them. With ``chat_template`` a client would replace the template.
"""

GRADES = ("low", "medium", "high")
"""Values of ``reasoning_effort``, for templates that use it."""

SWITCHES: Mapping[str, tuple[Any, ...]] = {
    "enable_thinking": (True, False),
    "reasoning_effort": GRADES,
}
"""
Settings of thinking, each with values that a template supporting it renders differently.
"""
