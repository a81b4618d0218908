from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from prorsa.config import ConfigError
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import load_profile, shipped_profiles

NAMES = shipped_profiles()
KV_BYTES = {
    "DeepSeek-V3": 61 * (512 + 64),
    "DeepSeek-V3.2": 61 * 772,
    "Qwen3-235B-A22B": 94 * 4 * 2 * 128,
    "MiMo-V2.5-Pro (stand-in)": 10 * 8 * (192 + 128),
}
"""Bytes of a token in FP8: layers x what a layer keeps. MiMo: of the layers without a window."""
GPU_BYTES = 141e9
NIC_BYTES_PER_S = 400e9 / 8
LAYOUTS = {
    "deepseek-v3-h200-ep16": (16, 16, 512),
    "deepseek-v3.2-h200-ep16": (16, 16, 512),
    "qwen3-235b-h200-ep4": (4, 2, 4096),
    "qwen3-235b-h200-ep8-decode": (8, 4, 4096),
    "mimo-v2.5-pro-h200-ep16": (16, 2, 4096),
    "mimo-v2.5-pro-h200-ep32-decode": (32, 4, 4096),
}
"""GPUs, attention DP ranks, chunk (paper, 5.1 and 5.3)."""


def test_the_shipped_profiles_are_the_papers_three_models_and_deepseek_v3() -> None:
    assert set(NAMES) == set(LAYOUTS)


WINDOWED_BYTES = {"MiMo-V2.5-Pro (stand-in)": int(0.8 * 60 * 320 * 8)}
"""What a token takes in the pools of layers with a sliding window, which do not move: 0.8 tokens of 60 layers on 8 GPUs."""


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.grid == f"{name}.csv"
    assert "AIConfigurator 0.12.0" in profile.source
    assert "Apache-2.0" in profile.source
    assert "modified" in profile.source


@pytest.mark.parametrize("name", NAMES)
def test_its_parts_fit_together(name: str) -> None:
    profile = load_profile(name)
    assert (profile.gpus, profile.ranks, profile.chunk) == LAYOUTS[name]
    gpus_of_a_rank = profile.gpus // profile.ranks
    assert gpus_of_a_rank * profile.ranks == profile.gpus
    assert profile.network_bytes_per_s == gpus_of_a_rank * NIC_BYTES_PER_S
    assert profile.kv_bytes == KV_BYTES[profile.model]
    # The cache leaves room for weights, and a rank's requests fit with contexts of a few thousand tokens.
    held = profile.kv_bytes + WINDOWED_BYTES.get(profile.model, 0)
    assert 0.3 < profile.kv_tokens * held / gpus_of_a_rank / GPU_BYTES < 0.65
    assert profile.kv_tokens > profile.max_running * 8192


@pytest.mark.parametrize("decode", [name for name in NAMES if name.endswith("-decode")])
def test_a_decode_variant_has_the_same_ranks_with_twice_the_experts_parallelism(decode: str) -> None:
    model = load_profile(decode).model
    base = next(p for p in map(load_profile, NAMES) if p.model == model and p.name != decode)
    profile = load_profile(decode)
    assert (profile.gpus, profile.ranks) == (2 * base.gpus, 2 * base.ranks)
    assert profile.kv_bytes == base.kv_bytes
    assert profile.kv_tokens > base.kv_tokens, "half as many experts a GPU leave more room"
    context, batch = 32768, 16
    assert decode_step(decode, batch, context) < decode_step(base.name, batch, context)
    assert StepCosts(profile).decode_local(batch, context) == StepCosts(base).decode_local(batch, context)


def decode_step(name: str, batch: int, context: int) -> float:
    costs = StepCosts(load_profile(name))
    return costs.decode_local(batch, context) + costs.shared(False, batch, batch)


@pytest.mark.parametrize("name", NAMES)
def test_steps_take_a_plausible_time(name: str) -> None:
    costs = StepCosts(load_profile(name))
    assert 0.005 < decode_step(name, 16, 32768) < 0.1
    assert costs.prefill_speed(8192) > costs.prefill_speed(131072) > 1000


def test_sparse_attention_overtakes_dense_attention_as_contexts_grow() -> None:
    dense, sparse = (StepCosts(load_profile(f"deepseek-{version}-h200-ep16")) for version in ("v3", "v3.2"))
    assert sparse.prefill_local(512, 0) > dense.prefill_local(512, 0)
    assert sparse.prefill_local(512, 131072) < dense.prefill_local(512, 131072)


def test_a_shipped_profile_is_the_start_of_an_own_one(tmp_path: Path) -> None:
    shipped = files("prorsa.profiles") / "shipped" / "qwen3-235b-h200-ep4.yaml"
    data = yaml.safe_load(shipped.read_text()) | {"chunk": 2048}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    mine = load_profile(str(tmp_path / "mine.yaml"), expert_imbalance=0.5)
    assert (mine.chunk, mine.expert_imbalance, mine.directory) == (2048, 0.5, str(tmp_path))
    with pytest.raises(ConfigError, match=r"qwen3-235b-h200-ep4\.csv: cannot be read"):
        StepCosts(mine)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ranks": 0}, "profile qwen3-235b-h200-ep4: ranks=0"),
        ({"flip_s": -1.0}, r"flip_s=-1\.0"),
        ({"expert_imbalance": -0.1}, r"expert_imbalance=-0\.1"),
        ({"kv_tokens": "many"}, "kv_tokens='many'"),
        ({"network_bytes_per_s": 0.0}, r"network_bytes_per_s=0\.0"),
        ({"speed": 1}, "speed=1: unknown key"),
    ],
)
def test_an_impossible_profile_is_one_clear_error(changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        load_profile("qwen3-235b-h200-ep4", **changes)
    assert "\n" not in str(raised.value)


def test_a_profile_that_is_not_there_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"profile=b300: .*one of: deepseek-v3-h200-ep16, .*qwen3"):
        load_profile("b300")


def test_usable_kv_is_what_an_instance_counts_on_and_never_more_than_it_has() -> None:
    ranks = LAYOUTS["qwen3-235b-h200-ep4"][1]
    whole = load_profile("qwen3-235b-h200-ep4")
    assert whole.instance_kv_tokens == ranks * whole.kv_tokens
    assert load_profile("qwen3-235b-h200-ep4", usable_kv_tokens=1000).instance_kv_tokens == 1000
    most = load_profile("qwen3-235b-h200-ep4", usable_kv_tokens=10 * whole.instance_kv_tokens)
    assert most.instance_kv_tokens == whole.instance_kv_tokens
