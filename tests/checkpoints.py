"""Random tiny Qwen3 checkpoints for tests, written with NumPy and safetensors only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 320


def write_checkpoint(path: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write `config.json` and `model.safetensors` (float32) of a random Qwen3 model to the directory `path`.

    The weights are large enough that greedy tokens vary and that the two best logits are well apart. `overrides` replace
    entries of the configuration, such as `tie_word_embeddings=True`.
    """
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "torch_dtype": "float32",
        **overrides,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(config, np.random.default_rng(seed)), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def linear(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, 1.5 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.normal(1.0, 0.1, size).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.normal(0.0, 1.0, (config["vocab_size"], hidden)).astype(np.float32),
        "model.norm.weight": norm(hidden),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = linear(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": norm(hidden),
            prefix + "post_attention_layernorm.weight": norm(hidden),
            prefix + "self_attn.q_proj.weight": linear(queries, hidden),
            prefix + "self_attn.k_proj.weight": linear(keys, hidden),
            prefix + "self_attn.v_proj.weight": linear(keys, hidden),
            prefix + "self_attn.o_proj.weight": linear(hidden, queries),
            prefix + "self_attn.q_norm.weight": norm(dim),
            prefix + "self_attn.k_norm.weight": norm(dim),
            prefix + "mlp.gate_proj.weight": linear(inner, hidden),
            prefix + "mlp.up_proj.weight": linear(inner, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, inner),
        }
    return weights
