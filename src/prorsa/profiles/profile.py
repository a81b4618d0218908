"""A hardware profile: what one engine instance of a model on a kind of GPU can do. A small file that users write too.

A profile is a YAML file with the fields of `Profile`, beside a CSV grid of measured operator times:

    phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms

For phase `prefill`, `tokens` new tokens of one attention data-parallel (DP) rank follow `context` tokens of prefix. For phase
`decode`, a batch of `tokens` requests of one rank has `context` tokens each. `attn_ms` and `dense_ms` are the rank's own;
`moe_ms` (balanced experts), `moe_skewed_ms` (power-law experts) and `comm_ms` are what all ranks together then take, where
all carry that much. An engine without experts has zeros there.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field

from prorsa.config import Positive, Section, find_yaml, read_yaml, shipped, validated

RESTART_S = 120.0
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


class Profile(Section):
    name: str
    model: str
    gpu: str
    source: str
    """Where the grid comes from: measured by whom, with what, and under which licence."""
    gpus: Positive
    """GPUs of one instance."""
    gpus_per_server: Positive = 8
    ranks: Positive
    """Attention DP ranks of one instance. Each has its own queue and KV-cache pool."""
    grid: str
    """CSV file beside this one."""
    chunk: Positive
    """Prompt tokens that a rank prefills in one step."""
    kv_tokens: Positive
    """KV-cache capacity of a rank, tokens."""
    kv_bytes: Positive
    """KV cache of one token, bytes over all GPUs of a rank: what moves from prefill to decode."""
    max_running: Positive
    """Requests that a rank decodes at once."""
    usable_kv_tokens: Positive | None = None
    """C of one instance (paper, Eq. 1), tokens: what the router and the allocation count on; None: all that its ranks have.
    Less leaves decode batches that are quick rather than as large as they can be."""
    expert_imbalance: NonNegative = 0.0
    """0: every expert gets the same load; 1: the power-law load of the grid; between and beyond is interpolated."""
    step_overhead_s: NonNegative = 0.0
    """Host time that a step adds to the operators' time, seconds."""
    request_s: NonNegative = 0.0
    """What a request takes beside the steps that it waits for and runs in: its way to the engine and back, seconds."""
    request_steps: NonNegative = 0.0
    """Steps of an instance at work that a request waits for on its way to the queue, where the host sees to its network
    only between steps."""
    prefill_request_s: NonNegative = 0.0
    """What each request after the first adds to a step that prefills several, beside their tokens: host time, seconds."""
    late_steps: NonNegative = 0.0
    """Steps of a mixed instance after which its reader has what a step made, where the host tells of one while, or after,
    the next is computed."""
    decode_request_s: NonNegative = 0.0
    """What a request that was prefilled elsewhere adds to the decode step that it joins, beside its token: host time."""
    handover_steps: NonNegative = 0.0
    """Steps of a decode instance at work that a handover waits for beside its transfer, for the same reason."""
    network_bytes_per_s: Rate
    """What a rank's network interfaces carry."""
    network_latency_s: NonNegative = 0.0
    store_bytes_per_s: Rate
    """What the KV store outside the instances gives to, or takes from, all instances together."""
    flip_s: NonNegative
    """Dead time of a role switch after the drain, seconds."""
    update_s: NonNegative
    """A weight update, seconds."""
    restart_s: NonNegative = RESTART_S
    """Starting an instance anew, weights included, seconds; it is also what regrouping ranks costs."""
    directory: str = ""
    """Where the file was read from; set by `load_profile`."""

    @property
    def instance_kv_tokens(self) -> int:
        """C."""
        held = self.ranks * self.kv_tokens
        return held if self.usable_kv_tokens is None else min(held, self.usable_kv_tokens)


SHIPPED = files("prorsa.profiles") / "shipped"


def shipped_profiles() -> list[str]:
    """Names of the profiles that come with Prorsa."""
    return shipped(SHIPPED)


def load_profile(name: str, **changes: Any) -> Profile:
    """A shipped profile by its name, or any by the path of its YAML file; `changes` replace fields.

    Raises `ConfigError` with the file, the key, the value and the remedy.
    """
    path = find_yaml(name, SHIPPED, "profile")
    data = read_yaml(path, what="profile")
    return validated(Profile, data | changes | {"directory": str(path.parent)}, f"profile {name}: ")
