"""Reading checkpoints: the forms they come in, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from safetensors.numpy import load_file, save_file

from prorsa.engines.embedded.checkpoint import ModelError, parameters, read_config, read_weights


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(path: Path, **changes: np.ndarray | None) -> None:
    """Replace tensors, or remove them (None); the names are those inside `model.layers.0.`, dots as underscores."""
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, value in changes.items():
        key = next((k for k in weights if k.replace(".", "_") == f"model_layers_0_{name}"), f"model.layers.0.{name}")
        if value is None:
            del weights[key]
        else:
            weights[key] = value
    save_file(weights, file)


def test_shards_are_put_together(copy: Path) -> None:
    config = read_config(copy)
    whole = read_weights(copy, config)
    names = sorted(whole)
    (copy / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: whole[name] for name in part}, copy / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = read_weights(copy, config)
    assert sorted(sharded) == names
    assert all(np.array_equal(sharded[name], whole[name]) for name in names)


def test_half_precision_is_widened(copy: Path) -> None:
    config = read_config(copy)
    whole = read_weights(copy, config)
    save_file({name: value.astype(np.float16) for name, value in whole.items()}, copy / "model.safetensors")
    half = read_weights(copy, config)
    assert all(value.dtype == np.float32 for value in half.values())
    assert all(np.allclose(half[name], whole[name], rtol=1e-3, atol=1e-6) for name in whole)


def test_bfloat16_is_read_as_torch_reads_it(copy: Path) -> None:
    torch = pytest.importorskip("torch", reason="only torch writes bfloat16 (extra `verl`)")
    from safetensors.torch import save_file as save_torch

    config = read_config(copy)
    rounded = {name: torch.from_numpy(v.copy()).bfloat16() for name, v in read_weights(copy, config).items()}
    save_torch(rounded, copy / "model.safetensors")
    read = read_weights(copy, config)
    assert all(np.array_equal(read[name], value.float().numpy()) for name, value in rounded.items())


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    untied = write_checkpoint(tmp_path / "untied")
    assert "lm_head.weight" not in read_weights(tied, read_config(tied))
    weights = read_weights(untied, read_config(untied))
    assert parameters(read_config(untied)) == sum(value.size for value in weights.values())
    assert parameters(read_config(untied)) - parameters(read_config(tied)) == 320 * 64
    # Some writers store the tied head as well.
    change_config(untied, tie_word_embeddings=True)
    assert "lm_head.weight" not in read_weights(untied, read_config(untied))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
    ],
)
def test_the_rope_base_is_found_in_either_form(copy: Path, changes: dict[str, Any], theta: float) -> None:
    change_config(copy, **changes)
    assert read_config(copy).rope_theta == theta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures is \['LlamaForCausalLM'\]; only Qwen3ForCausalLM"),
        ({"architectures": None}, "architectures is None"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type is 'linear'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_an_unsupported_model_is_refused_by_name(copy: Path, changes: dict[str, Any], message: str) -> None:
    change_config(copy, **changes)
    with pytest.raises(ModelError, match=message):
        read_config(copy)


def test_a_missing_or_broken_configuration_is_refused(copy: Path) -> None:
    entries = json.loads((copy / "config.json").read_text())
    del entries["rms_norm_eps"]
    (copy / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ModelError, match="rms_norm_eps is missing"):
        read_config(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_config(copy)
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds list"):
        read_config(copy)
    with pytest.raises(ModelError, match="cannot be read"):
        read_config(copy / "nowhere")


def test_weights_that_do_not_fit_are_refused_by_name(copy: Path) -> None:
    config = read_config(copy)
    change_weights(copy, mlp_up_proj_weight=np.zeros((160, 32), np.float32))
    with pytest.raises(ModelError, match=r"up_proj.weight has shape \(160, 32\); \(160, 64\) is needed"):
        read_weights(copy, config)
    change_weights(copy, mlp_up_proj_weight=np.zeros((160, 64), np.float64))
    with pytest.raises(ModelError, match=r"up_proj.weight is F64; only F32, F16 and BF16"):
        read_weights(copy, config)
    change_weights(copy, mlp_up_proj_weight=None)
    with pytest.raises(ModelError, match=r"up_proj.weight is missing; .* \(160, 64\)"):
        read_weights(copy, config)
    change_weights(
        copy, **{"mlp.up_proj.weight": np.zeros((160, 64), np.float32), "self_attn.q_proj.bias": np.zeros(64)}
    )
    with pytest.raises(ModelError, match=r"F64"):
        read_weights(copy, config)
    change_weights(copy, self_attn_q_proj_bias=np.zeros(64, np.float32))
    with pytest.raises(ModelError, match=r"q_proj.bias is not part of Qwen3ForCausalLM"):
        read_weights(copy, config)


def test_a_damaged_file_is_refused(copy: Path) -> None:
    config = read_config(copy)
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_weights(copy, config)
    file.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        read_weights(copy, config)
    (copy / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not an index of shards"):
        read_weights(copy, config)
