"""
Short names for models of mlx-community on the Hugging Face Hub. Pure.

How the table was checked, on ``CHECKED``: written from what is known of these models. The hub was
not looked up and none of them was downloaded. Sizes are computed, parameters times bits: 4.5 bits a
weight are four and, for each group of 64 weights, a scale and a bias of 16 bits. `cairn pull`
shows the size that the hub lists before it starts. The families are in docs/models.md.
"""

from __future__ import annotations

from difflib import get_close_matches

import attrs

CHECKED = "2026-11-27"
"""When the table was checked."""

PEBBLE = "pebble"
"""The name of the built-in model."""

_NEAR = 0.5
_MATCHES = 3
_GROUP_OF_64 = 4.5


@attrs.frozen
class KnownModel:
    """
    A model of the table.

    Attributes:
        name: the short name.
        hub_name: on the Hugging Face Hub.
        family: its ``model_type``.
        parameters: in billions.
        context_tokens: the longest sequence that it takes.
        words: what it is good for.
        bits: of a weight, on average.
    """

    name: str
    hub_name: str
    family: str
    parameters: float
    context_tokens: int
    words: str
    bits: float = _GROUP_OF_64

    @property
    def weights_bytes(self) -> int:
        """The size of its files, about."""
        return round(self.parameters * 1e9 * self.bits / 8)

    @property
    def float32_bytes(self) -> int:
        """The size of its weights in float32, in which a CPU computes."""
        return round(self.parameters * 1e9 * 4)


_COMMUNITY = "mlx-community"

KNOWN_MODELS = (
    KnownModel(
        "qwen3-0.6b", f"{_COMMUNITY}/Qwen3-0.6B-4bit", "qwen3", 0.6, 40_960, "the smallest; trials"
    ),
    KnownModel("qwen3-1.7b", f"{_COMMUNITY}/Qwen3-1.7B-4bit", "qwen3", 1.72, 40_960, "short texts"),
    KnownModel(
        "qwen3-4b", f"{_COMMUNITY}/Qwen3-4B-4bit", "qwen3", 4.02, 40_960, "chat and simple tools"
    ),
    KnownModel("qwen3-8b", f"{_COMMUNITY}/Qwen3-8B-4bit", "qwen3", 8.19, 40_960, "chat and tools"),
    KnownModel(
        "qwen3-14b", f"{_COMMUNITY}/Qwen3-14B-4bit", "qwen3", 14.77, 40_960, "chat and tools"
    ),
    KnownModel(
        "qwen3-30b",
        f"{_COMMUNITY}/Qwen3-30B-A3B-4bit",
        "qwen3_moe",
        30.53,
        40_960,
        "chat and tools, as fast as 3B",
    ),
    KnownModel(
        "qwen3-32b", f"{_COMMUNITY}/Qwen3-32B-4bit", "qwen3", 32.76, 40_960, "chat and tools, slow"
    ),
    KnownModel(
        "qwen3-coder",
        f"{_COMMUNITY}/Qwen3-Coder-30B-A3B-Instruct-4bit",
        "qwen3_moe",
        30.53,
        262_144,
        "coding agents",
    ),
    KnownModel(
        "llama3.2-1b",
        f"{_COMMUNITY}/Llama-3.2-1B-Instruct-4bit",
        "llama",
        1.24,
        131_072,
        "short texts",
    ),
    KnownModel(
        "llama3.2-3b", f"{_COMMUNITY}/Llama-3.2-3B-Instruct-4bit", "llama", 3.21, 131_072, "chat"
    ),
    KnownModel(
        "llama3.3-70b",
        f"{_COMMUNITY}/Llama-3.3-70B-Instruct-4bit",
        "llama",
        70.55,
        131_072,
        "chat and tools, slow",
    ),
    KnownModel("gemma3-1b", f"{_COMMUNITY}/gemma-3-1b-it-4bit", "gemma3_text", 1.0, 32_768, "chat"),
    KnownModel("phi4", f"{_COMMUNITY}/phi-4-4bit", "phi3", 14.66, 16_384, "reasoning"),
    KnownModel("smollm3-3b", f"{_COMMUNITY}/SmolLM3-3B-4bit", "smollm3", 3.08, 65_536, "chat"),
    # The experts have 4.25 bits, the rest 8.5.
    KnownModel(
        "gpt-oss-20b",
        f"{_COMMUNITY}/gpt-oss-20b-MXFP4-Q8",
        "gpt_oss",
        20.9,
        131_072,
        "reasoning and tools",
        bits=4.63,
    ),
)
"""The table, families together, each from small to large."""

_BY_NAME = {name.lower(): model for model in KNOWN_MODELS for name in (model.name, model.hub_name)}


def known_model(name: str) -> KnownModel | None:
    """The model of the table with a short name, or a name on the hub; None if it has none."""
    return _BY_NAME.get(name.lower())


def short_name(name: str) -> str:
    """The short name of a model on the hub; the name itself if it has none."""
    known = known_model(name)
    return name if known is None else known.name


def similar_names(name: str) -> list[str]:
    """Short names that may be meant, the most similar first."""
    plain = name.rpartition("/")[2].lower()
    begin = [model.name for model in KNOWN_MODELS if model.name.startswith(plain)] if plain else []
    near = get_close_matches(plain, [model.name for model in KNOWN_MODELS], _MATCHES, _NEAR)
    return list(dict.fromkeys([*begin, *near]))[:_MATCHES]
