"""Driving engine cores to the end, in one piece or as prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from checkpoints import VOCABULARY

from prorsa.engines.embedded.core import EngineCore, StepOutput
from prorsa.engines.protocol import FinishReason, SamplingParams

_rids = count()


@dataclass
class Result:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    cached: int = 0


def prompts_of(lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


def collect(step: StepOutput, results: dict[str, Result]) -> None:
    """Add the outputs of a step to what is known of each request; none may speak after its finish."""
    for output in step.outputs:
        result = results.setdefault(output.rid, Result())
        assert result.finish is None, f"{output.rid} was finished already"
        assert len(output.token_ids) == len(output.logprobs)
        result.tokens += output.token_ids
        result.logprobs += output.logprobs
        result.finish = output.finish
        result.cached = output.cached_tokens


def run(core: EngineCore, results: dict[str, Result] | None = None, limit: int = 10_000) -> dict[str, Result]:
    results = {} if results is None else results
    for _ in range(limit):
        if not core.has_work():
            return results
        collect(core.step(), results)
    raise AssertionError(f"still at work after {limit} steps")


def generate(core: EngineCore, prompts: Sequence[list[int]], sampling: SamplingParams) -> list[Result]:
    """All prompts at once on a mixed core."""
    rids = [f"request-{next(_rids)}" for _ in prompts]
    for rid, prompt in zip(rids, prompts, strict=True):
        core.submit(rid, prompt, sampling)
    results = run(core)
    return [results[rid] for rid in rids]


def hand_over(prefill: EngineCore, decode: EngineCore, rid: str, prompt: list[int], sampling: SamplingParams) -> int:
    """Prefill one request, move its blocks as they become ready, and admit it. The number of blocks that moved."""
    reservation = decode.reserve(rid, prompt, sampling)
    assert reservation is not None
    prefill.submit(rid, prompt, sampling, handover=True)
    sent = reservation.first_missing_block
    while True:
        (output,) = prefill.step().outputs
        done = output.prefilled == len(prompt)
        ready = reservation.n_blocks if done else output.prefilled // prefill.block_tokens
        for index in range(sent, ready):
            decode.import_block(rid, index, bytes(prefill.export_block(rid, index)))
        sent = max(sent, ready)
        if done:
            break
        assert not output.token_ids
    prefill.release(rid)
    decode.admit(rid, output.token_ids[0], output.logprobs[0])
    return sent - reservation.first_missing_block


def generate_apart(
    prefill: EngineCore, decode: EngineCore, prompts: Sequence[list[int]], sampling: SamplingParams
) -> list[Result]:
    """Each prompt prefilled on one core; all decoded together on the other."""
    rids = [f"request-{next(_rids)}" for _ in prompts]
    for rid, prompt in zip(rids, prompts, strict=True):
        hand_over(prefill, decode, rid, prompt, sampling)
    results = run(decode)
    return [results[rid] for rid in rids]
