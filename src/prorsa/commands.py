"""What the commands do, once their arguments are understood."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from prorsa.assembly import (
    build_environment,
    build_injection,
    build_launcher,
    build_sandboxes,
    build_task,
    build_tokenizer,
    instance_roles,
    running_cluster,
    sampling_params,
)
from prorsa.config import Config, dump_config, load_config
from prorsa.engines.protocol import Role
from prorsa.engines.sglang import SGLangEngine
from prorsa.profiles.profile import RESTART_S
from prorsa.report.journal import RecordingFailed
from prorsa.report.legible import plain_text
from prorsa.report.opening import CannotContinue
from prorsa.report.recorder import RunRecorder, recorder_of
from prorsa.report.rundir import CONFIG, LOGS, StepRecord, read_steps, read_trajectories
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.resume import left as unfinished
from prorsa.rollout.sampler import Group, Sampler
from prorsa.rollout.verify import differences, recorded_turns
from prorsa.simulation.measure import Facts, Limits, Measured, kv_bytes_of, measure, write_profile

SHOWN = 10
"""Differences that `verify` prints."""


class CommandFailed(Exception):
    """The command did its work and the answer is bad; the message says what was found."""


async def rollout(config: Config, run_dir: Path) -> None:
    """`rollout.steps` batches of complete groups, recorded in `run_dir`; where that holds a part of them already, the rest.

    Raises `CannotContinue`, `RecordingFailed`, and what the engines and the rollout raise.
    """
    rollout, injection = config.rollout, build_injection(config.rollout)
    count = config.task.train_questions if rollout.split == "train" else config.task.test_questions
    questions = build_task(config).questions(rollout.split, count, config.seed)
    sampler = Sampler(questions, rollout.group_size, config.seed)
    plan = Plan(rollout.groups, injection, rollout.max_staleness)
    now = asyncio.get_running_loop().time
    with recorder_of(config, run_dir, "rollout", now(), dump_config(config)) as recorder:
        history = recorder.history
        versions = {record.version for record in history.records}
        handed_over = [group for step in history.steps for group in step.groups]
        left = unfinished(history.all_events, history.records, handed_over, rollout.group_size)
        history.records.clear()  # what is needed of them is in `left`
        async with (
            stopping(recorder, run_dir),
            build_sandboxes(config) as sandboxes,
            running_cluster(config, run_dir / LOGS, [recorder], injection, recorder.past_events()) as control,
            Controller(control, build_environment(config, sandboxes), sampler, plan, recorder.trajectory) as controller,
        ):
            _refuse_other_weights(run_dir, versions, control.version)
            controller.resume(left)
            done = max((step.step for step in history.steps), default=0)
            start = recorder.step_began(now())
            for step in range(done + 1, rollout.steps + 1):
                groups = await controller.batch()
                recorder.step(_step(step, start, now(), groups, rollout.split))
                start = now()


@asynccontextmanager
async def stopping(recorder: RunRecorder, run_dir: Path) -> AsyncIterator[None]:
    """The block is cancelled when the recorder gives up. Leaving it waits until everything is written.

    Raises `RecordingFailed`.
    """
    task, loop, recovered = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    assert task is not None
    recorder.watch(lambda: loop.call_soon_threadsafe(task.cancel), lambda: loop.call_soon_threadsafe(recovered.set))
    try:
        yield
        while recorder.failing and recorder.patient:
            recovered.clear()
            if recorder.failing:
                await recovered.wait()
    except asyncio.CancelledError:
        if recorder.gave_up is None:
            raise
        task.uncancel()
        raise RecordingFailed(
            f"{recorder.gave_up}; the run was stopped, go on with `prorsa rollout --resume {run_dir}`"
        ) from None


def _refuse_other_weights(run_dir: Path, recorded: set[int], version: int) -> None:
    """Raises `CannotContinue`."""
    if others := recorded - {version}:
        raise CannotContinue(
            f"{run_dir}: its trajectories are of weights {sorted(others)}, the engines have {version}; start a new run"
        )


def is_complete(config: Config, run_dir: Path) -> bool:
    """Whether all steps of a rollout are recorded."""
    return max((step.step for step in read_steps(run_dir)), default=0) >= config.rollout.steps


async def train(config: Config, run_dir: Path) -> None:
    """`rollout.steps` training steps by verl, recorded in `run_dir`. Raises `CommandFailed`."""
    try:
        from prorsa.integrations.verl import launch, loaded
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}; training needs the `verl` extra: pip install 'prorsa[verl]'") from error
    try:
        await launch.train(config, run_dir)
    except (launch.TrainingFailed, loaded.NotLoaded) as error:
        raise CommandFailed(str(error)) from error


def _step(step: int, start: float, end: float, groups: list[Group], split: str) -> StepRecord:
    return StepRecord(
        step=step,
        time=end,
        seconds=end - start,
        reward=mean_reward(groups),
        trajectories=sum(len(group.records) for group in groups),
        split=split,
        groups=[group.id for group in groups],
    )


def mean_reward(groups: list[Group]) -> float:
    """Over all members. A handed over group is complete, so each has a reward."""
    return fmean(record.reward for group in groups for record in group.records if record.reward is not None)


async def verify(run_dir: Path, console: Console) -> int:
    """Compare a rollout with a replay of each turn on one engine that never flips. Raises `CommandFailed`."""
    config = load_config(run_dir / CONFIG)
    turns = [turn for record in read_trajectories(run_dir) for turn in recorded_turns(record)]
    if not turns:
        raise CommandFailed(f"{run_dir}: no trajectories are recorded there; give the directory of a `prorsa rollout`")
    launcher = build_launcher(config, run_dir / LOGS)
    try:
        engine = await launcher.start("verify", Role.MIXED)
        version = (await engine.info()).weights_version
        checkable = [turn for turn in turns if turn.versions == {version}]
        sampling = replace(sampling_params(config), stop_token_ids=build_tokenizer(config).eos_ids)
        found = await differences(engine, checkable, sampling, config.model.max_context, config.cluster.max_running)
    finally:
        await launcher.close()
    for difference in found[:SHOWN]:
        console.print(
            f"turn {difference.turn}, token {difference.index}: recorded {difference.recorded}, "
            f"generated {difference.generated}"
        )
    if found:
        raise CommandFailed(f"{len(found)} of {len(checkable)} turns differ from the replay without flips")
    skipped = len(turns) - len(checkable)
    console.print(
        f"{len(checkable)} turns, {sum(len(turn.output) for turn in checkable)} tokens: equal to a replay without flips"
        + (f"; {skipped} turns of other weights than {config.model.path} were not checked" if skipped else "")
    )
    return 0


Show = Callable[[str], None]
ENGINES = "engines.json"
"""In the run directory of `prorsa engines launch`: where each engine listens, for scripts."""


@dataclass(frozen=True)
class LaunchedEngine:
    name: str
    role: Role
    url: str
    bootstrap_port: int


@asynccontextmanager
async def launched_engines(config: Config, run_dir: Path) -> AsyncIterator[list[LaunchedEngine]]:
    """The engines of a configuration, which serve; leaving it ends them. Raises `EngineError`."""
    roles = instance_roles(config)
    launcher = build_launcher(config, run_dir / LOGS)
    try:
        started = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
        engines = [LaunchedEngine(e.name, roles[e.name], e.url, e.bootstrap_port) for e in started]
        (run_dir / ENGINES).write_text(json.dumps([asdict(engine) for engine in engines], indent=2) + "\n")
        yield engines
    finally:
        await launcher.close()


@dataclass(frozen=True)
class Description:
    """What the user says of the engines that `profile` measures; None is read off their checkpoint."""

    gpu: str
    gpus: int
    kv_bytes: int | None
    weights: str | None


async def profile(
    engines: Sequence[SGLangEngine], limits: Limits, told: Description, out: Path, console: Console
) -> None:
    """Measure running engines and write their profile."""
    try:
        await _profile(engines, limits, told, RESTART_S, out, console)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def profile_embedded(config: Config, rounds: int, told: Description, out: Path, console: Console) -> None:
    """Start the embedded engines of a configuration, one of each role, and write their profile."""
    now = asyncio.get_running_loop().time
    limits = Limits(config.model.max_context, config.cluster.prefill_chunk, config.cluster.max_running, rounds)
    with tempfile.TemporaryDirectory() as log_dir:
        launcher = build_launcher(config, Path(log_dir))
        try:
            start = now()
            engines = [await launcher.start(role.value, role) for role in Role]
            await _profile(engines, limits, told, (now() - start) / len(engines), out, console)
        finally:
            await launcher.close()


async def _profile(
    engines: Sequence[SGLangEngine], limits: Limits, told: Description, restart_s: float, out: Path, console: Console
) -> None:
    model_path = (await engines[0].info()).model_path
    facts = Facts(
        model=Path(model_path).name,
        gpu=told.gpu,
        gpus=told.gpus,
        kv_bytes=kv_bytes_of(model_path) if told.kv_bytes is None else told.kv_bytes,
        source="measured by prorsa profile",
        restart_s=restart_s,
    )
    with console.status("measuring") as status:
        measured = await measure(engines, limits, lambda words: status.update(plain_text(words)), told.weights)
    write_profile(out, measured, limits, facts)
    for line in _summary(measured):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"profile {out}", highlight=False, soft_wrap=True)


def _summary(measured: Measured) -> list[str]:
    new = max(tokens for tokens, _ in measured.prefill)
    batch, context = max(measured.decode)
    lines = [
        f"{new / measured.prefill[new, 0]:>13,.0f}  tokens/s prefill, {new} tokens at once",
        f"{1000 * measured.decode[1, min(c for _, c in measured.decode)]:>13.2f}  ms a token, one request",
        f"{1000 * measured.decode[batch, context]:>13.2f}  ms a token, {batch} requests of {context} tokens",
        f"{1000 * measured.request_s:>13.2f}  ms on the way, a request",
    ]
    if measured.link is not None:
        lines.append(
            f"{measured.link.tokens_per_s:>13,.0f}  tokens/s KV transfer, after {1000 * measured.link.latency_s:.2f} ms"
        )
    if measured.flip_s is not None:
        lines.append(f"{1000 * measured.flip_s:>13.2f}  ms a role switch")
    return lines
