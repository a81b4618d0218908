"""Puts the rooms together as a configuration says. `prorsa rollout`, `prorsa verify` and the verl plugin all build here."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from prorsa.allocation import Adaptive, Colocated, EngineCosts, Planned, Policy, PrefillSpeed, Static
from prorsa.cluster import switcher
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.observers import Observer
from prorsa.cluster.router import Limits
from prorsa.cluster.switcher import Relaunches, Restarter, SwitchLimits
from prorsa.config import Batches, Config, ConfigError, ForecastKind, Planning, PolicyName
from prorsa.engines.descriptors import raise_open_files
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import SPLIT_ROLES, Engine, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.flags import EngineFlags, Mooncake
from prorsa.engines.sglang_server.launcher import SGLangLauncher, gpu_here
from prorsa.forecast.durations import Floats
from prorsa.forecast.forecast import Forecaster
from prorsa.forecast.forecaster import LifecycleForecaster
from prorsa.forecast.injection import FixedRate, GroupReplenishment, Injection, ReplaceOnReward
from prorsa.forecast.survival import SurvivalForecaster
from prorsa.lifecycle import Event
from prorsa.profiles import load_profile
from prorsa.profiles.instance import ProfileCosts
from prorsa.rollout.episode import Bounds, Environment
from prorsa.rollout.rewards.exact import ExactReward
from prorsa.rollout.sandboxes.base import Sandboxes
from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.rollout.tasks.arithmetic import ArithmeticTask
from prorsa.rollout.tasks.base import Task
from prorsa.rollout.tokenizer import ChatTokenizer
from prorsa.rollout.tools.python import PythonTool

CANARY_SECONDS = 30.0
"""An SGLang engine that has flipped serves a request within so many seconds, or is restarted."""
TASKS: dict[str, type[Task]] = {"arithmetic": ArithmeticTask}


def instance_roles(config: Config) -> dict[str, Role]:
    """The instances by name, with the roles that they start in."""
    prefill, decode = config.policy.initial_split(config.cluster.instances)
    if (prefill, decode) == (0, 0):
        roles = [Role.MIXED] * config.cluster.instances
    else:
        roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return {f"engine-{index}": role for index, role in enumerate(roles)}


class Launcher(switcher.Launcher, Protocol):
    """Who owns the engine processes of this machine."""

    async def start(self, name: str, role: Role) -> SGLangEngine: ...
    async def close(self) -> None: ...


def build_launcher(config: Config, log_dir: Path) -> Launcher:
    return _sglang_launcher(config, log_dir) if config.cluster.engine == "sglang" else _embedded(config, log_dir)


def _embedded(config: Config, log_dir: Path) -> EmbeddedLauncher:
    cluster = config.cluster
    return EmbeddedLauncher(
        checkpoint(config),
        kv_tokens=cluster.kv_tokens,
        block_tokens=cluster.block_tokens,
        prefill_chunk=cluster.prefill_chunk,
        max_running=cluster.max_running,
        max_waiting=cluster.max_waiting,
        kv_store_tokens=cluster.kv_store_tokens,
        log_dir=log_dir,
    )


def _sglang_launcher(config: Config, log_dir: Path) -> SGLangLauncher:
    cluster, sglang = config.cluster, config.sglang
    if not Path(sglang.python).is_file():
        raise ConfigError(
            f"sglang.python={sglang.python!r}: no such file; `make sglang` makes that environment, or name one that has "
            f"SGLang (a relative path starts at {os.getcwd()})"
        )
    device = sglang.device
    flags = EngineFlags(
        checkpoint(config),
        device=("cuda" if gpu_here() else "cpu") if device == "auto" else device,
        kv_tokens=cluster.kv_tokens,
        block_tokens=cluster.block_tokens,
        prefill_chunk=cluster.prefill_chunk,
        max_running=cluster.max_running,
        max_waiting=cluster.max_waiting,
        gpus_per_prefill=cluster.gpus_per_prefill,
        gpus_per_decode=cluster.gpus_per_decode,
        kv_store=Mooncake(sglang.kv_store_master) if sglang.kv_store_master else None,
        extra=tuple(sglang.flags),
    )
    return SGLangLauncher(
        sglang.python,
        flags,
        start_seconds=sglang.start_timeout,
        log_dir=log_dir,
        kv_store_dir=Path(sglang.kv_store_dir or config.run_dir) if sglang.kv_store == "file" else None,
        mooncake_gb=sglang.kv_store_gb if sglang.kv_store == "mooncake" and not sglang.kv_store_master else None,
        gpus=cluster.budget,
    )


def checkpoint(config: Config) -> str:
    """The model's directory. Raises `ConfigError` where there is none."""
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path={config.model.path!r}: no config.json there; give the directory of a Hugging Face checkpoint "
            f"(a relative path starts at {os.getcwd()})"
        )
    return str(path)


def build_policy(config: Config) -> Policy:
    cluster, policy = config.cluster, config.policy
    costs = None
    if policy.name == "planned":
        assert policy.profile is not None
        costs = ProfileCosts(load_profile(policy.profile))
    return role_policy(
        policy.name,
        policy.planning,
        split=policy.initial_split(cluster.instances),
        gpus=(cluster.gpus_per_prefill, cluster.gpus_per_decode, cluster.budget),
        costs=costs,
        prefill_slots=Limits().prefill_slots,
        flips_to_mixed=cluster.engine != "sglang",
    )


def role_policy(
    name: PolicyName,
    planning: Planning,
    *,
    split: tuple[int, int],
    gpus: tuple[int, int, int],
    costs: EngineCosts | None,
    prefill_slots: int,
    flips_to_mixed: bool = True,
    prefill_every: int = 0,
) -> Policy:
    """`split` is the roles to start in, `gpus` are those of a prefill and of a decode instance and the budget. `costs` may be
    None where the policy does not plan."""
    match name:
        case "colocated":
            return Colocated()
        case "static":
            return Static(*split)
        case "adaptive":
            return Adaptive(*gpus)
        case "planned":
            assert costs is not None
            return Planned(
                costs,
                mixed=planning.mixed and flips_to_mixed,
                prefill_slots=prefill_slots,
                prefill_every=prefill_every,
                gain=planning.gain,
                mixed_gain=planning.mixed_gain,
                even_out=planning.even_out,
                patience=planning.patience,
                at_syncs=planning.at_syncs,
            )


def build_injection(rollout: Batches) -> Injection | None:
    """The rule that launches trajectories; None in synchronous rollout."""
    if rollout.mode == "sync":
        return None
    match rollout.injection:
        case "replace_on_reward":
            return ReplaceOnReward()
        case "fixed_rate":
            return FixedRate(rollout.injection_rate)
        case "group_replenishment":
            return GroupReplenishment(rollout.group_size)


def build_forecaster(
    kind: ForecastKind,
    injection: Injection | None,
    prefill_tokens_per_s: float,
    kv_footprint: Callable[[Floats], Floats] = lambda tokens: tokens,
) -> Forecaster:
    """`prefill_tokens_per_s` and `kv_footprint` as `LifecycleForecaster` takes them."""
    if kind == "survival":
        return SurvivalForecaster(injection, prefill_tokens_per_s, kv_footprint)
    return LifecycleForecaster(injection, prefill_tokens_per_s, kv_footprint, decode_returns=kind == "decode-returns")


def build_control(
    config: Config,
    engines: Sequence[Engine],
    restarter: Restarter | None,
    observers: Sequence[Observer],
    injection: Injection | None,
    relaunches: Relaunches | None = None,
) -> ControlPlane:
    """The control plane over engines that run already."""
    return ControlPlane(
        engines,
        forecaster=build_forecaster(
            config.policy.forecaster,
            injection,
            config.policy.prefill_tokens_per_s,
            # What a decode instance sets aside for a request, so that admission and allocation count alike.
            lambda tokens: tokens + config.sampling.max_new_tokens,
        ),
        policy=build_policy(config),
        speed=PrefillSpeed(config.policy.prefill_tokens_per_s),
        horizon=config.policy.horizon,
        restarter=restarter,
        relaunches=relaunches,
        observers=observers,
        limits=Limits(decode_slots=config.cluster.max_running, decode_headroom=config.sampling.max_new_tokens),
        switch_limits=SwitchLimits(canary_timeout=CANARY_SECONDS if config.cluster.engine == "sglang" else None),
        health_limits=HealthLimits.within(config.cluster.hang_timeout, config.cluster.restart_within),
    )


@asynccontextmanager
async def running_cluster(
    config: Config,
    log_dir: Path,
    observers: Sequence[Observer],
    injection: Injection | None,
    past: Sequence[Event] = (),
) -> AsyncIterator[ControlPlane]:
    """Engines in processes of their own and the control plane over them; leaving it ends them all. `past` is what a run that
    goes on has recorded, on the event loop's clock."""
    raise_open_files()
    launcher = build_launcher(config, log_dir)
    try:
        begun = asyncio.get_running_loop().time()
        engines = await asyncio.gather(*(launcher.start(*instance) for instance in instance_roles(config).items()))
        launch_s = asyncio.get_running_loop().time() - begun
        alone = any(engine.roles < SPLIT_ROLES for engine in engines)
        relaunches = Relaunches(launcher, launch_s) if alone else None
        control = build_control(config, engines, launcher, observers, injection, relaunches)
        control.learn(past)
        await control.start()
        try:
            yield control
        finally:
            await control.stop()
    finally:
        await launcher.close()


def build_task(config: Config) -> Task:
    return TASKS[config.task.name]()


def build_sandboxes(config: Config) -> SandboxPool:
    sandbox = config.sandbox
    return SandboxPool(
        sandbox.prewarmed,
        sandbox.timeout,
        sandbox.memory_mb,
        sandbox.file_mb,
        home_mb=sandbox.home_mb,
        home_files=sandbox.home_files,
    )


def build_tokenizer(config: Config) -> ChatTokenizer:
    return ChatTokenizer(checkpoint(config))


def sampling_params(config: Config) -> SamplingParams:
    """Those of every turn; stop tokens and seed are the episode's."""
    sampling = config.sampling
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )


def build_environment(config: Config, sandboxes: Sandboxes) -> Environment:
    task = build_task(config)
    python = PythonTool()
    return Environment(
        task=task,
        tokenizer=build_tokenizer(config),
        sandboxes=sandboxes,
        tools={python.name: python},
        reward=ExactReward(task),
        bounds=Bounds(
            sampling=sampling_params(config),
            max_turns=config.task.max_turns,
            max_context=config.model.max_context,
        ),
    )


def new_run_dir(config: Config) -> Path:
    """A fresh directory `run_dir/name-DATE-TIME`, with a number behind where that exists. Raises `ConfigError`, or OSError
    where the disk is full or the like."""
    base = Path(config.run_dir) / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = base, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.exists():
                number += 1
                path = base.with_name(f"{base.name}-{number}")
            else:
                raise _unusable(config, "a file is in the way") from None
        except (PermissionError, NotADirectoryError) as error:
            raise _unusable(config, error.strerror) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise _unusable(config, error.strerror) from error
            raise
        else:
            return path


def _unusable(config: Config, why: str | None) -> ConfigError:
    return ConfigError(f"run_dir={config.run_dir!r}: no directory can be made there ({why}); give another")
