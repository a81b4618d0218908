"""How fast the embedded engine computes, against transformers' `generate` with the same checkpoint, on one thread.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/engine_speed.py

A random Qwen3 of 4.2 million parameters. Each figure is the best of several rounds, in which the two take turns, in CPU
seconds of this process: on an idle core that is the wall time, and other load on the machine disturbs it less. Decoding is
measured end to end, prefill of the 32-token prompts included, and both must give the same greedy tokens.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from time import process_time

import numpy as np
import torch
import transformers

from prorsa.engines.embedded.checkpoint import parameters, read_config
from prorsa.engines.embedded.core import EngineCore
from prorsa.engines.protocol import Role, SamplingParams

PROMPT = 32
NEW = 128
PREFILL = 512
BATCHES = (1, 8, 32)

LOAD = """
from time import process_time
from prorsa.engines.embedded.core import EngineCore
from prorsa.engines.protocol import Role
EngineCore({path!r}, Role.MIXED, kv_tokens=8192)
print(process_time())
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--rounds", type=int, default=5)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        model = make_model(path)
        measure(path, model, rounds)


def make_model(path: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.save_pretrained(path)
    return model


def measure(path: str, model: transformers.PreTrainedModel, rounds: int) -> None:
    print(f"{parameters(read_config(path)):,} parameters; load average {os.getloadavg()[0]:.1f}; best of {rounds}")
    starts = [float(subprocess.check_output([sys.executable, "-c", LOAD.format(path=path)])) for _ in range(rounds)]
    print(f"start of the core, Python and imports included: {min(starts):.2f} s")
    print("\n| tokens/s | embedded | transformers | ratio |\n|---|---|---|---|")
    core = EngineCore(path, Role.MIXED, kv_tokens=16384)
    for batch in BATCHES:
        embedded, reference = compare(core, model, (batch, PROMPT), NEW, rounds)
        report(f"decode, batch {batch}", batch * NEW / embedded, batch * NEW / reference)
    embedded, reference = compare(core, model, (1, PREFILL), 1, rounds)
    report(f"prefill, {PREFILL} tokens", PREFILL / embedded, PREFILL / reference)


def report(what: str, embedded: float, reference: float) -> None:
    print(f"| {what} | {embedded:,.0f} | {reference:,.0f} | {embedded / reference:.1f} |", flush=True)


def compare(
    core: EngineCore, model: transformers.PreTrainedModel, shape: tuple[int, int], new: int, rounds: int
) -> tuple[float, float]:
    """Best seconds of the core and of transformers, for fresh prompts of a shape in each round."""
    rng = np.random.default_rng(shape)
    best = [float("inf")] * 2
    for _ in range(rounds):
        prompts = rng.integers(0, 4096, shape)
        first, ours = timed(lambda prompts=prompts: generate(core, prompts, new))
        second, theirs = timed(lambda prompts=prompts: reference(model, prompts, new))
        if ours != theirs:
            sys.exit(f"prompts of shape {shape}: the tokens differ")
        best = [min(best[0], first), min(best[1], second)]
    return best[0], best[1]


def timed(run: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = process_time()
    answer = run()
    return process_time() - start, answer


_rids = count()


def generate(core: EngineCore, prompts: np.ndarray, new: int) -> list[list[int]]:
    rids = [str(next(_rids)) for _ in prompts]
    for rid, prompt in zip(rids, prompts.tolist(), strict=True):
        core.submit(rid, prompt, SamplingParams(new, temperature=0.0))
    tokens: dict[str, list[int]] = {rid: [] for rid in rids}
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.rid] += output.token_ids
    return [tokens[rid] for rid in rids]


def reference(model: transformers.PreTrainedModel, prompts: np.ndarray, new: int) -> list[list[int]]:
    ids = torch.from_numpy(prompts)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None
    )
    return output[:, prompts.shape[1] :].tolist()


if __name__ == "__main__":
    main()
