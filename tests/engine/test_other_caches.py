"""
Models whose layers keep other things than the keys and values of all tokens (windows, recurrent
states): they are served cold, on mlx-lm's own caches, and P1 holds for them too.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from mlx.utils import tree_flatten, tree_map

from cairn.engine.prompt import Conversation, Message
from cairn.journal.replay import replay
from cairn.journal.store import MemoryStore
from tests.running import Said, ask, generate, serving

SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "windows beside full attention": {
        **SMALL,
        "model_type": "gemma3_text",
        "sliding_window": 100,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "a window in every other layer": {
        **SMALL,
        "model_type": "llama",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 100,
    },
    "recurrent only": {
        "model_type": "mamba",
        "vocab_size": 2048,
        "use_bias": False,
        "use_conv_bias": True,
        "conv_kernel": 4,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "state_size": 16,
        "intermediate_size": 128,
        "time_step_rank": 8,
    },
}


@pytest.fixture(params=list(FAMILIES.values()), ids=list(FAMILIES))
def family_directory(request: pytest.FixtureRequest, model_directory: Path, tmp_path: Path) -> Path:
    """
    A small model of the family with random weights, and the tokenizer of the random model.
    """
    config = request.param
    shutil.copytree(model_directory, tmp_path / "model")
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "model" / name).unlink()
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    shaken = tree_map(
        lambda weight: weight + 0.05 * mx.random.normal(weight.shape), model.parameters()
    )
    model.update(shaken)
    weights: Any = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), weights)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.mark.gate
def test_served_cold_with_the_same_bits(family_directory: Path) -> None:
    """
    A conversation is served turn by turn with nothing reused; each answer has the bits of a server
    that knows nothing, and the journal holds.
    """
    store = MemoryStore()
    talk: list[tuple[Conversation, Said]] = []

    async def main() -> None:
        messages: list[Message] = []
        async with serving(family_directory, store) as server:
            for turn in range(3):
                messages.append(Message(role="user", content=f"{turn} " + "stone on stone " * 15))
                conversation = Conversation(messages=tuple(messages))
                said = await ask(server, generate(conversation, max_tokens=12))
                messages.append(Message(role="assistant", content=said.text))
                talk.append((conversation, said))
        for conversation, said in talk:
            async with serving(family_directory) as cold:
                missed = await ask(cold, generate(conversation, max_tokens=12))
            assert missed.tokens == said.tokens

    trio.run(main)

    assert [("new_session", 0), ("continuation", 0), ("continuation", 0)] == [
        (said.accepted.path, said.accepted.cached_tokens) for _, said in talk
    ]
    assert talk[-1][1].finished.prompt_tokens > 100
    kinds = [row.kind for row in store.rows]
    assert kinds.count("slab_acquired") == kinds.count("slab_released") == 3
    assert replay(store.read()).findings == ()
