"""How our SGLang engines draw a token: by the request's seed, the token's position and its probabilities alone.

SGLang reads seeds only where all of its inference is deterministic. There it numbers the tokens in another way when any
request of the batch has a top-k or top-p, and it fails at a min-p. A batch is whatever meets on an engine, so a resent turn
would draw other tokens. Here a row's draw does not know the other rows. The noise is that of the embedded engine
(`engines.embedded.sampling`), so both engines draw alike.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

GOLDEN = 0x9E3779B97F4A7C15


def fill_seeds(original: Callable[..., Any], cls: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
    """Around `SamplingBatchInfo.from_schedule_batch`: each row has a seed. Batches that are merged later keep their rows'.

    But under speculative decoding, which draws elsewhere.
    """
    info = original(cls, batch, *arguments, **options)
    if not batch.spec_algorithm.is_none():
        return info
    seeds = torch.tensor([_seed(request) for request in batch.reqs], dtype=torch.int64)
    info.sampling_seed = seeds.to(batch.device, non_blocking=True)
    return info


def _seed(request: Any) -> int:
    """Its own, or one that differs from engine to engine and request to request, but not between the ranks of an engine."""
    asked: int | None = request.sampling_params.sampling_seed
    if asked is not None:
        return asked
    from sglang.srt.runtime_context import get_device

    digest = blake2b(f"{get_device().random_seed} {request.rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def draw_by_seed(
    original: Callable[..., Any], sampler: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> Any:
    """Around `Sampler._sample_from_probs`, whose answer is the tokens, and what a request for its sampling mask gets."""
    if info.sampling_mask_batch_indices is not None:
        # Nothing of ours asks for masks, and they have to come from SGLang's own draw, which takes no seeds.
        info.sampling_seed = None
    if info.sampling_seed is None:
        return original(sampler, probs, info, positions, simple)
    weights = probs if simple else cut(probs, info.top_ks, info.top_ps, info.min_ps)
    return draw(weights, info.sampling_seed, positions + 1), None


def cut(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """`probs` [rows, vocabulary], zero for what is not among a row's `top_ks` likeliest tokens, is not one of the fewest
    likeliest that hold `top_ps`, or has less than `min_ps` of the likeliest's."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    # A sum of all may round to more than 1: a row that asks for no top-p keeps its tail.
    dropped = (before > top_ps[:, None]) & (top_ps < 1.0)[:, None]
    dropped |= ranks >= top_ks[:, None]
    dropped |= ordered < ordered[:, :1] * min_ps[:, None]
    return torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(dropped, 0.0))


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A token [rows], int32, for each row of `weights` [rows, vocabulary]; `positions` are those of the drawn tokens."""
    noise = uniform(seeds, positions, weights.shape[-1]).log_().neg_()
    return (weights / noise).argmax(dim=-1).to(torch.int32)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) [rows, size], float64, as `engines.embedded.sampling.counter_uniform` has them."""
    golden = _signed(GOLDEN)
    start = _mix(_mix(seeds.to(torch.int64) + golden) + positions.to(torch.int64) * golden)
    columns = torch.arange(1, size + 1, dtype=torch.int64, device=seeds.device) * golden
    return _shifted(_mix(start[:, None] + columns), 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64. Products wrap, so the bits are those of unsigned integers."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >= 1 << 63 else bits
