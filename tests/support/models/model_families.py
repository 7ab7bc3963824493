"""
Small models of mlx-lm's families, with random weights.

The classes are mlx-lm's own; only the sizes are ours. Windows are so short that a prompt of a few
chunks is much longer.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

WINDOW: Final = 100

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "partial_rotary_factor": 0.5,
    # mixtures of experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # windows
    "sliding_window": WINDOW,
    # recurrent layers
    "conv_kernel": 4,
    "use_conv_bias": True,
    "state_size": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_TURNS: Final = ["sliding_attention", "full_attention"] * 2
_YARN: Final = {
    "type": "yarn",
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_ROPE_BY_LAYER: Final = {kind: {"rope_theta": 1e4} for kind in set(_TURNS)}
_LLAMA4_SCALING: Final = {
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 128,
}

# The fields that differ from the common ones, by kind and family.
FAMILIES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "dense": {
        "llama": {},
        "qwen2": {},
        "qwen3": {},
        "phi3": {},
        "phi": {},
        "gemma": {},
        "gemma2": {"query_pre_attn_scalar": 32},
        "smollm3": {},
        "glm": {},
        "glm4": {},
        "granite": {
            "logits_scaling": 1.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
        },
        "cohere": {},
        "olmo2": {},
        "starcoder2": {},
        "stablelm": {"use_qkv_bias": False, "num_key_value_heads": 4},
        "gpt2": {"n_embd": 128, "n_head": 4, "n_layer": 4, "n_positions": 4096, "n_ctx": 4096},
        "gpt_bigcode": {
            "n_embd": 128,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 4096,
            "n_inner": 256,
        },
        "gpt_neox": {"rotary_emb_base": 1e4, "rotary_pct": 0.5},
        "gptj": {
            "n_embd": 128,
            "n_head": 4,
            "n_layer": 4,
            "n_positions": 4096,
            "rotary_dim": 16,
            "n_inner": 256,
        },
        "nemotron": {"hidden_act": "relu2"},
        "ernie4_5": {},
        "exaone": {"num_layers": 4},
        "helium": {},
        "hunyuan_v1_dense": {},
        "internlm2": {},
        "internlm3": {},
        "minicpm": {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0},
        "ministral3": {"rope_parameters": _LLAMA4_SCALING},
        "mimo": {},
        "nanochat": {},
        "nanbeige": {},
        "plamo": {"n_shared_head": 2},
        "seed_oss": {},
        "apertus": {"post_norm": False, "qk_norm": True},
        "lille-130m": {
            "n_embd": 128,
            "n_head": 4,
            "n_layer": 4,
            "n_kv_heads": 2,
            "block_size": 4096,
        },
        "qwen": {"kv_channels": 32},
        "telechat3": {},
        "youtu_llm": {},
        "olmo": {},
        "spark2_5": {"rope_parameters": _ROPE_BY_LAYER},
        "talkie": {},
        "laguna": {},
    },
    "mixture of experts": {
        "mixtral": {},
        "qwen2_moe": {},
        "qwen3_moe": {},
        "olmoe": {},
        "phimoe": {},
        "deepseek": {},
        "dots1": {},
        "glm4_moe": {"use_qk_norm": True, "rope_scaling": None},
        "granitemoe": {
            "logits_scaling": 1.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
        },
        "hunyuan": {
            "use_qk_norm": True,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_cla": False,
            "cla_share_factor": 2,
            "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
        },
        "ernie4_5_moe": {"moe_num_experts": 8},
        "bailing_moe": {},
        "Klear": {},
        "minimax": {"rotary_dim": 16},
        "solar_open": {},
        "lfm2_moe": {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_bias": True,
            "conv_L_cache": 3,
            "use_expert_bias": True,
            "num_dense_layers": 1,
        },
    },
    "latent attention": {
        "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "rope_scaling": _YARN},
        "deepseek_v3": {},
        "deepseek_v32": {"index_head_dim": 32, "index_n_heads": 4, "index_topk": 64},
        "deepseek_v41": {},
        "glm4_moe_lite": {},
        "glm_moe_dsa": {
            "index_head_dim": 32,
            "index_n_heads": 4,
            "index_topk": 64,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": {"rope_theta": 1e4},
        },
        "longcat_flash": {
            "attention_method": "MLA",
            "num_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 64,
            "zero_expert_num": 2,
            "zero_expert_type": "identity",
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
        },
        "minicpm3": {
            "dim_model_base": 64,
            "scale_depth": 1.4,
            "scale_emb": 1.0,
            "num_key_value_heads": 4,
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0] * 16,
            },
        },
        "mistral4": {"rope_parameters": _LLAMA4_SCALING, "num_key_value_heads": 4},
    },
    "sliding windows": {
        "gemma3_text": {"sliding_window_pattern": 2, "query_pre_attn_scalar": 32},
        "gemma4_text": {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "vocab_size_per_layer_input": 2048,
            "hidden_size_per_layer_input": 32,
            "layer_types": _TURNS + _TURNS[:2],
        },
        "muse_glimmer": {},
        "iquestloopcoder": {},
        "mellum": {"layer_types": _TURNS, "rope_parameters": _ROPE_BY_LAYER},
        "gpt_oss": {"layer_types": _TURNS},
        "cohere2": {"sliding_window_pattern": 4},
        "exaone4": {
            "sliding_window_pattern": "LLLG",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "rope_scaling": None,
        },
        "exaone_moe": {"layer_types": _TURNS, "is_moe_layer": [False, True, True, True]},
        "olmo3": {},
        "afmoe": {"layer_types": _TURNS},
        "mimo_v2_flash": {
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 1e4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": [0, 1, 1, 1],
            "n_shared_experts": None,
        },
        "step3p5": {"num_attention_groups": 2},
        "llama4_text": {
            "intermediate_size_mlp": 256,
            "use_qk_norm": True,
            "no_rope_layers": [1, 1, 1, 0],
        },
        "llama4": {
            "text_config": {
                "intermediate_size_mlp": 256,
                "use_qk_norm": True,
                "no_rope_layers": [1, 1, 1, 0],
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "num_experts_per_tok": 1,
                "rope_scaling": None,
            },
        },
        "afm7": {
            "hidden_dim": 256,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "num_kv_reuse_layers": 1,
        },
        "plamo3": {},
        "recurrent_gemma": {
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    },
    "recurrent and hybrid": {
        "mamba": {"time_step_rank": 8, "num_hidden_layers": 2},
        "mamba2": {
            "time_step_rank": 8,
            "num_heads": 8,
            "n_groups": 1,
            "time_step_limit": [0.0, 100.0],
            "head_dim": 32,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
        },
        "rwkv7": {
            "a_low_rank_dim": 16,
            "v_low_rank_dim": 16,
            "gate_low_rank_dim": 16,
            "decay_low_rank_dim": 16,
            "num_hidden_layers": 2,
        },
        "qwen3_next": {"full_attention_interval": 2},
        "qwen3_5": {},
        "kimi_linear": {
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
            },
            "model_max_length": 4096,
        },
        "nemotron_h": {
            "hybrid_override_pattern": ["M", "*", "-", "M"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
        "lfm2": {
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_bias": True,
            "conv_L_cache": 3,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 64,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        "granitemoehybrid": {
            "layer_types": ["mamba", "attention"] * 2,
            "logits_scaling": 1.0,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_proj_bias": False,
            "mamba_conv_bias": True,
        },
        "falcon_h1": {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
        "jamba": {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "num_experts": 2,
        },
        "olmo_hybrid": {
            "linear_allow_neg_eigval": True,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        "plamo2": {"mamba_num_heads": 8, "hidden_size_per_head": 32, "mamba_step": 2},
        "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2},
        "bailing_moe_linear": {"layer_group_size": 2, "group_norm_size": 2},
        "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    },
}


QUICK: Final = (
    "llama",
    "mixtral",
    "deepseek_v3",
    "gemma3_text",
    "gpt_oss",
    "mamba2",
    "rwkv7",
    "qwen3_next",
    "nemotron_h",
    "lfm2",
)
"""One or two families of each kind, for the everyday tests."""


def kind_of(family: str) -> str:
    """The kind of a family."""
    return next(kind for kind, families in FAMILIES.items() if family in families)


def config_of(family: str) -> dict[str, Any]:
    """The config.json of a small model of a family."""
    own = {**FAMILIES[kind_of(family)][family], "model_type": family}
    if "text_config" in own:
        own["text_config"] = {**_COMMON, **own["text_config"], "model_type": f"{family}_text"}
    return {**_COMMON, **own}


def make_family_model(directory: Path, source: Path, config: Mapping[str, Any]) -> Path:
    """
    Write a model with random weights into a new directory, and return the directory.

    Args:
        source: a model directory whose tokenizer and template are copied.
        config: the config.json; its ``model_type`` names the family.
    """
    shutil.copytree(
        source, directory, ignore=shutil.ignore_patterns("model.safetensors", "config.json")
    )
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    weights: Any = dict(tree_flatten(tree_map(_shaken, model.parameters())))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(dict(config)), "utf-8")
    return directory


def _shaken(weight: mx.array) -> mx.array:
    """Weights with noise. Initial weights are often ones and zeros, which hide omitted terms."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return weight + 0.05 * mx.random.normal(weight.shape).astype(weight.dtype)
