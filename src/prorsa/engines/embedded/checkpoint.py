"""Reading a Hugging Face checkpoint: its configuration and its weights, everything checked before anything is used."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray

Array = NDArray[np.float32]

ARCHITECTURE = "Qwen3ForCausalLM"


class ModelError(Exception):
    """The checkpoint cannot be served; the message names the file, what it holds and what is needed."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    rope_theta: float
    context: int
    """The most positions that the model was made for."""
    tied: bool
    """Whether the output projection is the embedding."""


def read_config(path: str | Path) -> ModelConfig:
    """Read `config.json` in the directory `path`. Raises `ModelError` for anything but a plain Qwen3 decoder."""
    file = Path(path) / "config.json"
    try:
        entries = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); give the directory of a checkpoint") from error
    except ValueError as error:
        raise ModelError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: holds {type(entries).__name__}; a JSON object is needed")
    _check_architecture(file, entries)
    try:
        return _parse_config(entries)
    except KeyError as error:
        raise ModelError(f"{file}: {error.args[0]} is missing") from error


def _check_architecture(file: Path, entries: dict[str, Any]) -> None:
    architectures = entries.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ModelError(f"{file}: architectures is {architectures}; only {ARCHITECTURE} is supported")
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    needed = {
        "hidden_act": (entries.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(entries.get("attention_bias")), False),
        "use_sliding_window": (bool(entries.get("use_sliding_window")), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "quantization_config": (entries.get("quantization_config"), None),
    }
    for key, (found, supported) in needed.items():
        if found != supported:
            raise ModelError(f"{file}: {key} is {found!r}; only {supported!r} is supported")


def _parse_config(entries: dict[str, Any]) -> ModelConfig:
    heads = entries["num_attention_heads"]
    rope = entries.get("rope_parameters") or {}
    return ModelConfig(
        vocabulary=entries["vocab_size"],
        hidden=entries["hidden_size"],
        inner=entries["intermediate_size"],
        layers=entries["num_hidden_layers"],
        heads=heads,
        kv_heads=entries.get("num_key_value_heads", heads),
        head_dim=entries.get("head_dim") or entries["hidden_size"] // heads,
        epsilon=float(entries["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or entries.get("rope_theta") or 10000.0),
        context=entries["max_position_embeddings"],
        tied=bool(entries.get("tie_word_embeddings", False)),
    )


def read_weights(path: str | Path, config: ModelConfig) -> dict[str, Array]:
    """Every tensor that `config` needs, as float32, from `model.safetensors` or its shards.

    Raises `ModelError` for a missing, misshapen or unknown tensor.
    """
    directory = Path(path)
    tensors: dict[str, Array] = {}
    for file in _weight_files(directory):
        tensors |= _read_file(file)
    needed = _shapes(config)
    for name, shape in needed.items():
        if name not in tensors:
            raise ModelError(f"{directory}: tensor {name} is missing; the configuration needs it with shape {shape}")
        if tensors[name].shape != shape:
            raise ModelError(f"{directory}: tensor {name} has shape {tensors[name].shape}; {shape} is needed")
    unknown = tensors.keys() - needed.keys() - {"lm_head.weight"}
    if unknown:
        raise ModelError(f"{directory}: tensor {min(unknown)} is not part of {ARCHITECTURE} as it is supported here")
    return {name: tensors[name] for name in needed}


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of shards ({error!r})") from error
    return [directory / name for name in sorted(names)]


def _read_file(file: Path) -> dict[str, Array]:
    try:
        entries = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except safetensors.SafetensorError as error:
        raise ModelError(f"{file}: not a safetensors file ({error})") from error
    return {name: _as_float32(file, name, entry) for name, entry in entries}


def _as_float32(file: Path, name: str, entry: dict[str, Any]) -> Array:
    data, shape, dtype = entry["data"], tuple(entry["shape"]), entry["dtype"]
    if dtype == "F32":
        return np.frombuffer(data, np.float32).reshape(shape)
    if dtype == "F16":
        return np.frombuffer(data, np.float16).astype(np.float32).reshape(shape)
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    raise ModelError(f"{file}: tensor {name} is {dtype}; only F32, F16 and BF16 are supported")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden, config.inner, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def parameters(config: ModelConfig) -> int:
    """Number of weights."""
    return sum(math.prod(shape) for shape in _shapes(config).values())
