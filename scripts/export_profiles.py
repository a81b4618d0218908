"""Make the grids of the shipped profiles (`src/prorsa/profiles/shipped/*.csv`) anew from NVIDIA AIConfigurator 0.12.0.

    pip install prorsa[aic]                            # Python 3.11 to 3.13, Linux on x86-64, 850 MB
    python scripts/export_profiles.py                  # every grid, a few seconds
    python scripts/export_profiles.py --to DIRECTORY deepseek-v3-h200-ep16

AIConfigurator holds operator times that were measured on H200 under SGLang's kernels, and interpolates between them. It
prices a step in which all attention DP ranks carry the same work; the grids keep its operators apart, so that ranks with
different work can meet at the experts. What is changed on the way:

- Operators are summed into attention, dense, experts and communication.
- A grid holds the experts' times twice: under equal load and under AIConfigurator's power law.
- AIConfigurator knows no MiMo-V2.5-Pro. Its graph for MiMo-V2-Flash is given that model's public geometry, and the layer
  pattern is inverted, since 0.12.0 takes the sliding-window layers (1 in the checkpoint's pattern) for the global ones.
  Operators without measurements are estimated (mode HYBRID). It would exchange tokens by all-gather and reduce-scatter
  over NCCL across servers; instead they take what DeepSeek-V3's measured DeepEP exchange takes, times hidden size and
  number of MoE layers, with the tokens of a rank spread over its eight GPUs.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiconfigurator_core
from aiconfigurator.cli.api import resolve_context_fmha_by_data
from aiconfigurator.sdk import perf_database
from aiconfigurator.sdk.config_builders import apply_nextn, build_model_config
from aiconfigurator.sdk.moe_comm_resolver import resolve_model_config_moe_comm
from aiconfigurator_core.sdk import engine
from aiconfigurator_core.sdk.models import get_model

from prorsa.profiles.costs import COLUMNS
from prorsa.profiles.profile import SHIPPED

GPU = "h200_sxm"
FRAMEWORK = "sglang"
CHUNKS = tuple(2**n for n in range(7, 15))
PREFIXES = (0, 1024, *(2**n for n in range(12, 20)))
BATCHES = tuple(2**n for n in range(9))
CONTEXTS = tuple(2**n for n in range(10, 20))
DECIMALS = 4
"""Of a millisecond."""
MIMO_FULL_ATTENTION = (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)
"""Layers of MiMo-V2.5-Pro without a sliding window."""
MIMO_LAYERS = 70


@dataclass(frozen=True)
class Layout:
    """An engine instance: attention TP within a DP rank, EP over all GPUs."""

    model: str
    tp: int
    dp: int
    ep: int
    deep_ep: bool = True
    """Whether AIConfigurator has DeepEP measurements for the exchange; else it is priced with the experts' fused kernel."""


DEEPSEEK = Layout("deepseek-ai/DeepSeek-V3", tp=1, dp=16, ep=16)
QWEN = Layout("Qwen/Qwen3-235B-A22B-FP8", tp=2, dp=2, ep=4, deep_ep=False)
MIMO = Layout("MiMo-V2.5-Pro", tp=8, dp=2, ep=16, deep_ep=False)
MIMO_EXCHANGE = (6144 / 7168) * (69 / 58)
"""A DeepEP exchange of MiMo-V2.5-Pro over one of DeepSeek-V3: hidden sizes, MoE layers (both send to 8 experts)."""
LAYOUTS = {
    "deepseek-v3-h200-ep16": DEEPSEEK,
    "deepseek-v3.2-h200-ep16": replace(DEEPSEEK, model="deepseek-ai/DeepSeek-V3.2"),
    "qwen3-235b-h200-ep4": QWEN,
    "qwen3-235b-h200-ep8-decode": replace(QWEN, dp=4, ep=8),
    "mimo-v2.5-pro-h200-ep16": MIMO,
    "mimo-v2.5-pro-h200-ep32-decode": replace(MIMO, dp=4, ep=32),
}

Times = dict[str, float]
"""Milliseconds of attn, dense, moe and comm."""


class Instance:
    """AIConfigurator's prices of one layout under one expert load."""

    def __init__(self, layout: Layout, models: Path, skewed: bool) -> None:
        mimo = layout.model == MIMO.model
        path = str(models / layout.model) if mimo else layout.model
        config = build_model_config(layout.tp, 1, layout.dp, 1, layout.ep)
        apply_nextn(config, 0)
        # Of DeepEP there are measurements with redundant experts (EPLB), which is what balances their load in practice.
        config.workload_distribution = "power_law" if skewed else "uniform" if layout.deep_ep else "balanced"
        config.enable_eplb = layout.deep_ep and not skewed
        version = perf_database.resolve_query_version(GPU, FRAMEWORK, "current")
        if mimo:
            database = perf_database.get_database_view(GPU, FRAMEWORK, version, database_mode="HYBRID")
        else:
            database = perf_database.get_database(GPU, FRAMEWORK, version)
        if layout.deep_ep:
            exchange = resolve_model_config_moe_comm(
                config,
                model_path=path,
                backend_name=FRAMEWORK,
                database=database,
                required_phases=("context", "generation"),
            )
            if exchange is None:
                raise SystemExit(f"{layout}: AIConfigurator has no measured exchange between the experts for it")
        else:
            config.num_gpus_per_node = 8
            resolve_context_fmha_by_data(config, path, database, FRAMEWORK, is_context_role=True)
        spec = engine.build_engine_spec_json(
            get_model(path, config, FRAMEWORK),
            model_path=path,
            system=GPU,
            backend=FRAMEWORK,
            backend_version=version,
            kv_block_size=None,
            systems_path=None,
            nextn=0,
            database=database,
        )
        self._engine = engine.EngineHandle(bytes(aiconfigurator_core.engine_spec_bincode_from_json(spec)))

    def price(self, phase: str, tokens: int, context: int) -> Times:
        if phase == "prefill":
            request = {"batch_size": 1, "isl": context + tokens, "prefix": context, "mode": "static_ctx"}
            operators, _ = self._engine.run_static_per_op(osl=2, **request)
        else:
            request = {"batch_size": tokens, "isl": context, "mode": "static_gen"}
            _, operators = self._engine.run_static_per_op(osl=2, **request)
        times = dict.fromkeys(("attn", "dense", "moe", "comm"), 0.0)
        for name, milliseconds, *_ in operators:
            times[_kind(name)] += milliseconds
        return times


def _kind(operator: str) -> str:
    if operator.endswith("attention"):
        return "attn"
    if operator.endswith(("_ar", "_p2p")) or "dispatch" in operator or "combine" in operator:
        return "comm"
    return "moe" if operator.endswith("_moe") else "dense"


def grid(layout: Layout, models: Path) -> Iterator[tuple[str, int, int, *tuple[float, ...]]]:
    """The lines of a profile's grid, in the order of `COLUMNS`."""
    balanced, skewed = Instance(layout, models, skewed=False), Instance(layout, models, skewed=True)
    donor = None
    if layout.model == MIMO.model:
        donor = Instance(replace(DEEPSEEK, dp=layout.ep, ep=layout.ep), models, skewed=False)
    for phase, sizes, contexts in (("prefill", CHUNKS, PREFIXES), ("decode", BATCHES, CONTEXTS)):
        for tokens in sizes:
            comm = _exchange(donor, layout, phase, tokens) if donor else None
            for context in contexts:
                times = balanced.price(phase, tokens, context)
                moe_skewed = skewed.price(phase, tokens, context)["moe"]
                if comm is not None:
                    times["comm"] = comm
                row = (times["attn"], times["dense"], times["moe"], moe_skewed, times["comm"])
                yield phase, tokens, context, *(round(value, DECIMALS) for value in row)


def _exchange(donor: Instance, layout: Layout, phase: str, tokens: int) -> float:
    """Milliseconds of communication of MiMo-V2.5-Pro, of which a GPU sends its share of the rank's tokens."""
    share = max(1, tokens // layout.tp)
    context = 0 if phase == "prefill" else CONTEXTS[0]
    return MIMO_EXCHANGE * donor.price(phase, share, context)["comm"]


def write_mimo(models: Path) -> None:
    """A model directory for AIConfigurator with the geometry of MiMo-V2.5-Pro's public configuration."""
    flash = Path(aiconfigurator_core.__file__).parent / "model_configs" / "XiaomiMiMo--MiMo-V2-Flash_config.json"
    config = json.loads(flash.read_text()) | {
        "num_hidden_layers": MIMO_LAYERS,
        "hidden_size": 6144,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 128,
        "swa_num_key_value_heads": 8,
        "intermediate_size": 16384,
        "max_position_embeddings": 2**20,
        "hybrid_layer_pattern": [int(layer in MIMO_FULL_ATTENTION) for layer in range(MIMO_LAYERS)],
        "moe_layer_freq": [0] + [1] * (MIMO_LAYERS - 1),
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    }
    directory = models / MIMO.model
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def main() -> None:
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help=f"default: all of {', '.join(LAYOUTS)}")
    parser.add_argument("--to", type=Path, default=Path(str(SHIPPED)), metavar="DIRECTORY")
    arguments = parser.parse_args()
    unknown = set(arguments.profiles) - LAYOUTS.keys()
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(LAYOUTS)}")
    with TemporaryDirectory() as temporary:
        models = Path(temporary)
        write_mimo(models)
        for name in arguments.profiles or LAYOUTS:
            path = arguments.to / f"{name}.csv"
            with path.open("w", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(COLUMNS)
                writer.writerows(grid(LAYOUTS[name], models))
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
