"""What the commands do, once their arguments are understood."""

from __future__ import annotations

import asyncio
from dataclasses import replace
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
    running_cluster,
    sampling_params,
)
from prorsa.config import Config, dump_config, load_config
from prorsa.engines.protocol import Role
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import CONFIG, LOGS, StepRecord, read_trajectories
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.sampler import Group, Sampler
from prorsa.rollout.verify import differences, recorded_turns

SHOWN = 10
"""Differences that `verify` prints."""


class CommandFailed(Exception):
    """The command did its work and the answer is bad; the message says what was found."""


async def rollout(config: Config, run_dir: Path) -> None:
    """`rollout.steps` batches of complete groups, recorded in `run_dir`."""
    rollout, injection = config.rollout, build_injection(config)
    count = config.task.train_questions if rollout.split == "train" else config.task.test_questions
    questions = build_task(config).questions(rollout.split, count, config.seed)
    sampler = Sampler(questions, rollout.group_size, config.seed)
    plan = Plan(rollout.groups, injection, rollout.max_staleness)
    with RunRecorder(run_dir, dump_config(config)) as recorder:
        async with (
            build_sandboxes(config) as sandboxes,
            running_cluster(config, run_dir / LOGS, [recorder], injection) as control,
            Controller(control, build_environment(config, sandboxes), sampler, plan) as controller,
        ):
            for step in range(1, rollout.steps + 1):
                await _step(step, controller, recorder, rollout.split)


async def train(config: Config, run_dir: Path) -> None:
    """`rollout.steps` training steps by verl, recorded in `run_dir`. Raises `CommandFailed`."""
    try:
        from prorsa.integrations.verl import launch, loaded
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error}; training needs the `train` extra: pip install 'prorsa[train]'") from error
    try:
        await launch.train(config, run_dir)
    except (launch.TrainingFailed, loaded.NotLoaded) as error:
        raise CommandFailed(str(error)) from error


async def _step(step: int, controller: Controller, recorder: RunRecorder, split: str) -> None:
    now = asyncio.get_running_loop().time
    start = now()
    groups = await controller.batch()
    records = [record for group in groups for record in group.records]
    for record in records:
        recorder.trajectory(record)
    recorder.step(
        StepRecord(
            step=step,
            time=now(),
            seconds=now() - start,
            reward=mean_reward(groups),
            trajectories=len(records),
            split=split,
        )
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
