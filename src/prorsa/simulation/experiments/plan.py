"""`prorsa plan`: how to run a rollout on a cluster that is not booked yet, from simulated runs.

Ways to run it are colocation (with several cadences), static prefill:decode splits, and splits that follow the forecast, by
the paper's rule (adaptive) or by a plan (planned), each with every parallelism that a profile of the model has. They are
sifted by successive halving: short trajectories first, then whole ones, then several seeds for those that are left.
Disaggregation is advised only where it is faster than the best colocation beyond what the seeds differ by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles, stdev
from typing import Any

from prorsa.config import ConfigError, PolicyName, validated
from prorsa.profiles.profile import Profile, load_profile, shipped_profiles
from prorsa.simulation.experiments.grid import Grid, Job
from prorsa.simulation.scenario import PolicySection, RolloutSection, Scenario, WorkloadSection
from prorsa.simulation.workloads.models import build_workload

CADENCES = (0, 4, 16, 64)
SPLITS = 8
"""Static splits are tried at eighths of the cluster."""
KEPT = {"adaptive": 1, "planned": 1, "static": 2, "colocated": 2}
"""Ways that go on to whole trajectories, by policy."""
FOLLOWING: tuple[PolicyName, ...] = ("adaptive", "planned")
SAMPLE = 64
"""Scripts from which the length of a short trajectory is worked out."""
TIE = 0.02
"""A split that follows the forecast is preferred to a static one that is faster by no more than this: nobody has to find its
ratio, and it stays right when the workload changes."""
WORTH = 1.02
"""Disaggregation is advised where even the low end of its gain is above this: a smaller gain is not worth a second kind of
instance."""
DECODE_ONLY = "-decode"
"""What the names of shipped profiles end in that only decode instances may have."""
T95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, two-sided 95 %, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned for."""

    workload: WorkloadSection
    rollout: RolloutSection
    gpus: int
    profiles: tuple[str, ...]
    decode_profiles: tuple[str, ...] = ()
    seeds: int = 4


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the rollout."""

    profile: str
    policy: PolicySection
    decode_profile: str | None = None

    @property
    def colocated(self) -> bool:
        return self.policy.name == "colocated"

    @property
    def plain(self) -> bool:
        """Colocation as engines do it by default."""
        return self.colocated and not self.policy.prefill_every

    def __str__(self) -> str:
        policy = self.policy
        match policy.name:
            case "colocated":
                how = f"one step in {policy.prefill_every} prefills" if policy.prefill_every else "prompts first"
                words = f"colocated, {how}"
            case "static":
                words = f"static {policy.split}"
            case _:
                words = policy.name
        return f"{words}, {self.profile}" + (f" + {self.decode_profile}" if self.decode_profile else "")


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of rollout times with its 95 % confidence interval over the seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Tried:
    way: Way
    short_s: float
    """Rollout time of a step with short trajectories, seconds."""
    full_s: float | None
    """With whole ones; None where it did not get so far."""


@dataclass(frozen=True, slots=True)
class Influence:
    """How the gain changes with one assumption, the others as they are; with short trajectories."""

    name: str
    gains: dict[str, float]
    """Gain by variation."""
    base: float

    @property
    def strength(self) -> float:
        """The largest change, as a factor of the gain minus 1."""
        return max(max(gain / self.base, self.base / gain) for gain in self.gains.values()) - 1

    @property
    def turns(self) -> bool:
        """Whether it changes on which side of `WORTH` the gain is."""
        return any((gain > WORTH) != (self.base > WORTH) for gain in self.gains.values())


@dataclass(frozen=True, slots=True)
class Advice:
    way: Way
    rollout_s: float
    """Mean rollout time of a step that way, seconds."""
    gain: Interval
    """Time of the best colocation over that of the best split; where colocation is advised, its low end is not above
    `WORTH`."""
    plain_gain: Interval
    """Time of colocation without cadence over that of the way advised."""
    best_colocated: Way
    best_split: Way | None
    """None where the cluster has one instance only."""
    tried: tuple[Tried, ...]
    influences: tuple[Influence, ...]
    """The strongest first."""

    @property
    def splits(self) -> bool:
        return not self.way.colocated


def interval(ratios: Sequence[float]) -> Interval:
    """Of the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) < 2:
        return Interval(math.exp(mean), 0.0, math.inf)
    half = T95[min(len(logs) - 1, len(T95) - 1)] * stdev(logs) / math.sqrt(len(logs))
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def choose_split(times: Mapping[Way, float]) -> Way:
    """The fastest; one that follows the forecast where it is as fast within `TIE`."""
    best = min(times, key=lambda way: times[way])
    close = [way for way in times if way.policy.name in FOLLOWING and times[way] <= (1 + TIE) * times[best]]
    return min(close, key=lambda way: times[way], default=best)


def ways(request: Request) -> list[Way]:
    """All that are tried. Raises `ConfigError`."""
    found: list[Way] = []
    prefill, decode = _profiles(request)
    for name, profile in prefill.items():
        if profile.gpus > request.gpus:
            continue
        found += [Way(name, PolicySection(name="colocated", prefill_every=k)) for k in CADENCES]
        if request.gpus >= 2 * profile.gpus:
            found += [Way(name, PolicySection(name=policy)) for policy in FOLLOWING]
        found += [Way(name, _static(split)) for split in splits(request.gpus, profile.gpus, profile.gpus)]
        for other, wide in decode.items():
            if other != name:
                found += [Way(name, _static(split), other) for split in splits(request.gpus, profile.gpus, wide.gpus)]
    if not found:
        smallest = min(profile.gpus for profile in prefill.values())
        raise ConfigError(f"--gpus {request.gpus}: the smallest instance takes {smallest}; give that many or more")
    return found


def splits(gpus: int, prefill: int, decode: int) -> list[str]:
    """n_P:n_D at eighths of the cluster, each of which leaves at least one instance of either role."""
    found: list[str] = []
    for part in range(1, SPLITS):
        n_prefill = max(1, round(part / SPLITS * gpus / prefill))
        n_decode = (gpus - n_prefill * prefill) // decode
        split = f"{n_prefill}:{n_decode}"
        if n_decode >= 1 and split not in found:
            found.append(split)
    return found


def _static(split: str) -> PolicySection:
    return PolicySection(name="static", split=split)


def _profiles(request: Request) -> tuple[dict[str, Profile], dict[str, Profile]]:
    """For prefill and mixed instances, and for decode instances of another parallelism: the given ones, and the shipped ones
    of the same model on the same GPU. Raises `ConfigError`."""
    prefill = {name: load_profile(name) for name in request.profiles}
    decode = {name: load_profile(name) for name in request.decode_profiles}
    kinds = {(profile.model, profile.gpu) for profile in (*prefill.values(), *decode.values())}
    if len(kinds) > 1:
        words = " and ".join(sorted(f"{model} on {gpu}" for model, gpu in kinds))
        raise ConfigError(f"--profile: {words} are given; one model on one kind of GPU can be planned for")
    for name in shipped_profiles():
        profile = load_profile(name)
        if (profile.model, profile.gpu) in kinds:
            (decode if name.endswith(DECODE_ONLY) else prefill).setdefault(name, profile)
    return prefill, decode


def request(
    workload: dict[str, Any],
    rollout: dict[str, Any],
    gpus: int,
    profiles: Sequence[str],
    decode_profiles: Sequence[str] = (),
    *,
    concurrency: int,
    group_size: int | None,
    staleness: int,
    seeds: int,
) -> Request:
    """From what a user says. `workload` and `rollout` are values of those sections of a scenario. Raises `ConfigError`."""
    for name, value, least in (("gpus", gpus, 1), ("concurrency", concurrency, 1), ("seeds", seeds, 2)):
        if value < least:
            raise ConfigError(f"--{name} {value}: write a number of {least} or more")
    size = group_size if group_size is not None else (8 if workload["name"] == "math" else 32)
    groups = max(1, round(concurrency / max(size, 1)))
    told: dict[str, Any] = {
        "mode": "async" if staleness else "sync",
        "max_staleness": staleness,
        "group_size": size,
        "groups": groups,
        # A pool that is too small makes cold starts the longest part of a step, whatever the engines do.
        "prewarmed": groups * size,
        # Steps of a synchronous rollout are alike; the first one of an asynchronous one is not like the others.
        "steps": 3 if staleness else 1,
    }
    # Checked together, as a scenario is.
    data = {"name": "plan", "hardware": {"profile": profiles[0]}, "workload": workload, "rollout": told | rollout}
    checked = validated(Scenario, data)
    return Request(checked.workload, checked.rollout, gpus, tuple(profiles), tuple(decode_profiles), seeds)


def plan(request: Request, grid: Grid) -> Advice:
    """Raises `ConfigError` and `ExperimentFailed`."""
    bench = _Bench(request, grid)
    candidates = ways(request)
    short = bench.times(candidates, seed=0, short=True)
    kept = [way for policy, count in KEPT.items() for way in _best(short, policy, count)]
    plain = min((way for way in short if way.plain), key=lambda way: short[way])
    full = bench.times([*kept, plain], seed=0)
    tried = tuple(
        Tried(way, short[way], full.get(way))
        for way in sorted(candidates, key=lambda way: (way not in full, full.get(way, short[way])))
    )
    colocated = min((way for way in full if way.colocated), key=lambda way: full[way])
    apart = {way: seconds for way, seconds in full.items() if not way.colocated}
    split = choose_split(apart) if apart else None
    finalists = [way for way in (colocated, plain, split) if way is not None]
    runs = [bench.times(finalists, seed=seed) for seed in range(request.seeds)]
    gain = interval([run[colocated] / run[split] if split else 1.0 for run in runs])
    way = split if split is not None and gain.low > WORTH else colocated
    return Advice(
        way=way,
        rollout_s=fmean(run[way] for run in runs),
        gain=gain,
        plain_gain=interval([run[plain] / run[way] for run in runs]),
        best_colocated=colocated,
        best_split=split,
        tried=tried,
        influences=() if split is None else bench.influences(colocated, split),
    )


def _best(times: Mapping[Way, float], policy: str, count: int) -> list[Way]:
    return sorted((way for way in times if way.policy.name == policy), key=lambda way: times[way])[:count]


INFLUENCES: dict[str, dict[str, dict[str, Any]]] = {
    "load": {"x0.5": {"rollout.load": 0.5}, "x2": {"rollout.load": 2.0}},
    "tool times": {"x0.5": {"workload.tool_times": 0.5}, "x2": {"workload.tool_times": 2.0}},
    "output length": {"x0.5": {"workload.output_lengths": 0.5}, "x2": {"workload.output_lengths": 2.0}},
    "dead time of a role switch": {"0.4 s": {"hardware.flip_s": 0.4}, "10 s": {"hardware.flip_s": 10.0}},
    "KV store": {"none": {"hardware.kv_store": False}},
    "expert imbalance": {
        "balanced": {"hardware.expert_imbalance": 0.0},
        "power law": {"hardware.expert_imbalance": 1.0},
    },
}
"""What is varied, one at a time: the values of the scenario that each variation replaces."""


class _Bench:
    """Runs ways and tells their rollout times."""

    def __init__(self, request: Request, grid: Grid) -> None:
        self._request = request
        self._grid = grid
        self._short = short_context(request.workload)

    def times(
        self, chosen: Iterable[Way], *, seed: int, short: bool = False, changes: Mapping[str, Any] | None = None
    ) -> dict[Way, float]:
        """Seconds of a step."""
        jobs = {way: self._job(way, seed, short, changes or {}) for way in chosen}
        self._grid.run(jobs.values())
        return {way: self._grid.outcome(job).rollout_s for way, job in jobs.items()}

    def influences(self, colocated: Way, split: Way) -> tuple[Influence, ...]:
        """The strongest first."""
        variations = [(name, label) for name, labels in INFLUENCES.items() for label in labels]
        changes: list[dict[str, Any]] = [{}, *(INFLUENCES[name][label] for name, label in variations)]
        # All at once, so that no worker waits between them.
        self._grid.run(self._job(way, 0, True, change) for change in changes for way in (colocated, split))
        base, *gains = (self._gain(colocated, split, change) for change in changes)
        found: dict[str, dict[str, float]] = {}
        for (name, label), gain in zip(variations, gains, strict=True):
            found.setdefault(name, {})[label] = gain
        influences = [Influence(name, by_label, base) for name, by_label in found.items()]
        return tuple(sorted(influences, key=lambda one: one.strength, reverse=True))

    def _gain(self, colocated: Way, split: Way, changes: Mapping[str, Any]) -> float:
        times = self.times((colocated, split), seed=0, short=True, changes=changes)
        return times[colocated] / times[split]

    def _job(self, way: Way, seed: int, short: bool, changes: Mapping[str, Any]) -> Job:
        request = self._request
        data: dict[str, Any] = {
            "name": f"{way.profile}, {request.workload.name}",
            "seed": seed,
            "hardware": {"profile": way.profile, "decode_profile": way.decode_profile, "gpus": request.gpus},
            "workload": request.workload.model_dump(),
            "rollout": request.rollout.model_dump(),
        }
        if short:
            data["workload"]["max_context"] = self._short
        for key, value in changes.items():
            section, leaf = key.split(".")
            data[section][leaf] = value
        return Job(validated(Scenario, data), way.policy)


def short_context(section: WorkloadSection) -> int:
    """A longest context that ends most trajectories early: the first quartile of their lengths, and room for any prompt."""
    workload = build_workload(section, seed=0)
    count = SAMPLE if workload.questions is None else workload.questions
    scripts = [workload.script(question, question) for question in range(count)]
    lengths = [script.longest_context for script in scripts]
    quartile = round(quantiles(lengths, n=4)[0]) if len(lengths) > 1 else lengths[0]
    longest_prompt = max(script.prompt_tokens for script in scripts)
    return min(section.max_context, max(quartile, 2 * longest_prompt))


def exact(request: Request, advice: Advice) -> dict[str, Any]:
    """The advice as JSON values."""

    def bounds(one: Interval) -> dict[str, float | None]:
        return {name: _finite(getattr(one, name)) for name in ("mean", "low", "high")}

    return {
        "workload": request.workload.model_dump(),
        "rollout": request.rollout.model_dump(),
        "gpus": request.gpus,
        "seeds": request.seeds,
        "advice": _way(advice.way),
        "rollout_s": advice.rollout_s,
        "best_colocated": _way(advice.best_colocated),
        "best_split": None if advice.best_split is None else _way(advice.best_split),
        "gain_over_best_colocated": bounds(advice.gain),
        "gain_over_plain_colocated": bounds(advice.plain_gain),
        "tried": [_way(one.way) | {"short_s": one.short_s, "full_s": one.full_s} for one in advice.tried],
        "influences": [
            {"name": one.name, "gains": one.gains, "as_given": one.base, "strength": one.strength, "turns": one.turns}
            for one in advice.influences
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _way(way: Way) -> dict[str, Any]:
    policy = way.policy
    return {
        "policy": policy.name,
        "split": policy.split,
        "prefill_every": policy.prefill_every,
        "profile": way.profile,
        "decode_profile": way.decode_profile,
    }
