"""A Qwen3 decoder in NumPy, float32, made for models of 1-5 million parameters on one core.

What the layout buys (measured in `benchmarks/engine_speed.py`):

- Weights are stored as panels of 64 columns and multiplied 16 rows at a time, small enough that BLAS takes its direct
  kernels; an ordinary product of a thin batch spends most of its time on packing the weights.
- The scale vector of each norm is folded into the matrix behind it, and q, k and v, as gate and up, are one matrix.
- The two halves of a rotary pair are stored side by side, so that the rotation is one complex product. The order of the
  dimensions inside a head is therefore not the checkpoint's; the KV blocks of two engines fit, since both permute.
- Decode reads the keys and values of the running batch in place (`kv.Window`), without a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from prorsa.engines.embedded.checkpoint import Array, ModelConfig
from prorsa.engines.embedded.kv import BlockPool, Window

PANEL = 64
"""Columns of a weight panel."""
TILE = 16
"""Rows multiplied at a time when there are many."""
QUERIES = 64
"""Query positions of a prefill that attend at a time."""


class Linear:
    """`x @ weight` for a weight [in, out]."""

    def __init__(self, weight: Array) -> None:
        inputs, self.outputs = weight.shape
        panels = -(-self.outputs // PANEL)
        padded = np.zeros((inputs, panels * PANEL), np.float32)
        padded[:, : self.outputs] = weight
        self.width = panels * PANEL
        """Columns of the result, zero from `outputs` on."""
        self._panels = np.ascontiguousarray(padded.reshape(inputs, panels, PANEL).transpose(1, 0, 2))

    def __call__(self, x: Array) -> Array:
        """x [rows, in] -> [rows, width]."""
        rows = len(x)
        result = np.empty((rows, self.width), np.float32)
        tiled = rows - rows % TILE if rows > 2 * TILE else 0
        if tiled:
            tiles = tiled // TILE
            tiles_out = result[:tiled].reshape(tiles, TILE, -1, PANEL).transpose(0, 2, 1, 3)
            np.matmul(x[:tiled].reshape(tiles, 1, TILE, -1), self._panels, out=tiles_out)
        if tiled < rows:
            rest_out = result[tiled:].reshape(rows - tiled, -1, PANEL).transpose(1, 0, 2)
            np.matmul(x[tiled:], self._panels, out=rest_out)
        return result


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Linear
    head_scale: Array
    """Scale of the query and key norms [heads + kv heads, head dim], with the attention's 1 / sqrt(head dim)."""
    output: Linear
    gate_up: Linear
    """Both negated: silu(g) * u = g' * u' / (1 + exp(g')) with g' = -g and u' = -u."""
    down: Linear


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of one sequence's tokens to prefill."""

    tokens: Sequence[int]
    start: int
    """Position of the first; the KV of everything before it is in `blocks`."""
    blocks: Sequence[int]
    """The chain of blocks, long enough for the last position."""
    wanted: bool
    """Whether the logits after the last token are needed."""


class Model:
    """The weights, and the two ways to run them. Norms sum squares and add `epsilon * size`; the size is in the weights."""

    def __init__(self, config: ModelConfig, weights: dict[str, Array]) -> None:
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_layer(config, weights, index) for index in range(config.layers)]
        head = self._embedding if config.tied else weights["lm_head.weight"]
        self._head = Linear(_behind_norm(head, weights["model.norm.weight"]))
        self._rotations = _rotations(config)

    def decode(self, tokens: Sequence[int], positions: Sequence[int], window: Window) -> Array:
        """One token a row of `window`: write its KV at its position, return logits [rows, vocabulary]."""
        config = self.config
        rows, span = len(tokens), max(positions) + 1
        at = np.asarray(positions)
        order = np.arange(rows)
        rotation = self._rotations[at][:, None]
        mask = np.where(np.arange(span) > at[:, None], np.float32(-np.inf), np.float32(0.0))[:, None, None]
        grouped = (rows, config.kv_heads, config.heads // config.kv_heads, config.head_dim)
        x = self._embedding[np.asarray(tokens)]
        for layer, stored in zip(self._layers, window.data, strict=True):
            queries, kv = self._project(layer, x, rotation)
            stored[order, :, :, at] = kv
            keys, values = stored[:rows, 0, :, :span], stored[:rows, 1, :, :span]
            scores = np.matmul(queries.reshape(grouped), keys.transpose(0, 1, 3, 2))
            scores += mask
            attended = _weighted(scores, values).reshape(rows, -1)
            x += layer.output(attended)[:, : config.hidden]
            self._feed_forward(layer, x)
        return self._logits(x)

    def prefill(self, segments: Sequence[Segment], pool: BlockPool) -> Array:
        """Compute the segments' KV into `pool`; logits [wanted segments, vocabulary] after their last tokens."""
        config = self.config
        at = np.concatenate([np.arange(s.start, s.start + len(s.tokens)) for s in segments])
        places = np.concatenate([_places(s, pool) for s in segments], axis=1)
        ends = np.cumsum([len(s.tokens) for s in segments])
        rotation = self._rotations[at][:, None]
        x = self._embedding[np.concatenate([np.asarray(s.tokens) for s in segments])]
        for index, layer in enumerate(self._layers):
            queries, kv = self._project(layer, x, rotation)
            pool.data[places[0], index, :, places[1]] = kv
            parts = [(s, queries[end - len(s.tokens) : end]) for end, s in zip(ends, segments, strict=True)]
            if index == config.layers - 1:
                # Of the last layer, only the rows whose logits are wanted are read.
                x = x[[end - 1 for end, s in zip(ends, segments, strict=True) if s.wanted]]
                parts = [(s, rows[-1:]) for s, rows in parts if s.wanted]
                if not parts:
                    return np.empty((0, config.vocabulary), np.float32)
            attended = np.concatenate([_attend(rows, s, pool.data[:, index]) for s, rows in parts])
            x += layer.output(attended)[:, : config.hidden]
            self._feed_forward(layer, x)
        return self._logits(x)

    def _project(self, layer: Layer, x: Array, rotation: NDArray[np.complex64]) -> tuple[Array, Array]:
        """Queries [rows, heads, dim] and the keys and values [rows, 2, kv heads, dim] of normed `x`."""
        config = self.config
        rows, dim, rotated = len(x), config.head_dim, config.heads + config.kv_heads
        z = layer.qkv(x / _roots(x, config.epsilon))
        heads = z[:, : rotated * dim].reshape(rows, rotated, dim)
        heads /= _roots(heads, config.epsilon)
        heads *= layer.head_scale
        turned = z.view(np.complex64)[:, : rotated * dim // 2].reshape(rows, rotated, dim // 2)
        turned *= rotation
        kv = z[:, config.heads * dim : layer.qkv.outputs].reshape(rows, 2, config.kv_heads, dim)
        return heads[:, : config.heads], kv

    def _feed_forward(self, layer: Layer, x: Array) -> None:
        inner = self.config.inner
        z = layer.gate_up(x / _roots(x, self.config.epsilon))
        gate, up = z[:, :inner], z[:, inner : 2 * inner]
        up *= gate
        with np.errstate(over="ignore"):  # exp(-g) = inf is silu(g) = 0
            np.exp(gate, out=gate)
        gate += 1.0
        up /= gate
        x += layer.down(up)[:, : self.config.hidden]

    def _logits(self, x: Array) -> Array:
        return self._head(x / _roots(x, self.config.epsilon))[:, : self.config.vocabulary]


def _layer(config: ModelConfig, weights: dict[str, Array], index: int) -> Layer:
    def weight(name: str) -> Array:
        return weights[f"model.layers.{index}.{name}.weight"]

    dim = config.head_dim
    pairs = np.arange(dim).reshape(2, dim // 2).T.ravel()
    query, key = (
        weight(f"self_attn.{name}").reshape(-1, dim, config.hidden)[:, pairs].reshape(-1, config.hidden)
        for name in ("q_proj", "k_proj")
    )
    # A norm leaves its input times sqrt(size) to the weights; a query also takes the attention's 1 / sqrt(dim).
    query_scale = weight("self_attn.q_norm")[pairs]
    key_scale = weight("self_attn.k_norm")[pairs] * np.float32(np.sqrt(dim))
    return Layer(
        qkv=Linear(_behind_norm(np.concatenate([query, key, weight("self_attn.v_proj")]), weight("input_layernorm"))),
        head_scale=np.concatenate([np.tile(query_scale, (config.heads, 1)), np.tile(key_scale, (config.kv_heads, 1))]),
        output=Linear(weight("self_attn.o_proj").T),
        gate_up=Linear(
            -_behind_norm(
                np.concatenate([weight("mlp.gate_proj"), weight("mlp.up_proj")]), weight("post_attention_layernorm")
            )
        ),
        down=Linear(weight("mlp.down_proj").T),
    )


def _behind_norm(weight: Array, scale: Array) -> Array:
    """A checkpoint's weight [out, in] as [in, out], taking over the scale of the norm before it."""
    return weight.T * (scale * np.float32(np.sqrt(len(scale))))[:, None]


def _rotations(config: ModelConfig) -> NDArray[np.complex64]:
    """cos + i sin for each position and pair [context, head dim / 2], with angles in float32 like the trainer's."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(config.rope_theta), exponents)
    angles = np.arange(config.context, dtype=np.float32)[:, None] * frequencies
    rotations: NDArray[np.complex64] = np.cos(angles) + np.complex64(1j) * np.sin(angles)
    return rotations


def _roots(x: Array, epsilon: float) -> Array:
    """What an RMS norm divides by, times sqrt(size) [..., 1]."""
    squares: Array = np.vecdot(x, x)
    squares += np.float32(epsilon * x.shape[-1])
    return np.sqrt(squares, out=squares)[..., None]


def _places(segment: Segment, pool: BlockPool) -> NDArray[np.intp]:
    """Block and offset of each token of a segment [2, tokens]."""
    block_tokens = pool.data.shape[3]
    index, offset = np.divmod(np.arange(segment.start, segment.start + len(segment.tokens)), block_tokens)
    return np.stack([np.asarray(segment.blocks)[index], offset])


def _attend(queries: Array, segment: Segment, stored: Array) -> Array:
    """Causal attention of a segment's last queries [rows, heads, dim]; `stored` is [blocks, 2, tokens, kv heads, dim]."""
    rows, heads, dim = queries.shape
    kv_heads, total = stored.shape[3], segment.start + len(segment.tokens)
    blocks = np.asarray(segment.blocks)[: -(-total // stored.shape[2])]
    keys = stored[blocks, 0].reshape(-1, kv_heads, dim).transpose(1, 2, 0)[:, None]
    values = stored[blocks, 1].reshape(-1, kv_heads, dim).transpose(1, 0, 2)[:, None]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, dim).transpose(1, 2, 0, 3)
    result = np.empty((rows, heads * dim), np.float32)
    for first in range(0, rows, QUERIES):
        tile = grouped[:, :, first : first + QUERIES]
        size = tile.shape[2]
        seen = total - rows + first + size
        scores = np.matmul(tile, keys[..., :seen])
        scores[..., seen - size :] += _future(size)
        attended = _weighted(scores, values[:, :, :seen])
        result[first : first + size] = attended.transpose(2, 0, 1, 3).reshape(size, -1)
    return result


@cache
def _future(size: int) -> Array:
    """Minus infinity above the diagonal [size, size]."""
    return np.triu(np.full((size, size), -np.inf, np.float32), 1)


def _weighted(scores: Array, values: Array) -> Array:
    """softmax(scores) @ values; overwrites the scores."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    totals = scores.sum(axis=-1, keepdims=True)
    result: Array = np.matmul(scores, values)
    result /= totals
    return result
