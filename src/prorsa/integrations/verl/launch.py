"""`prorsa train`: lay out the data, start the supervised trainer, follow its steps, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from prorsa.assembly import build_task, checkpoint
from prorsa.config import Config, ConfigError, dump_config
from prorsa.integrations.verl import loaded
from prorsa.integrations.verl.overrides import (
    DATA_SOURCE,
    agents_file,
    environment,
    held_out_file,
    metrics_file,
    router_file,
    tmp_dir,
    train_file,
    verl_overrides,
)
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.report.journal import Journal, RecordingFailed
from prorsa.report.opening import locked
from prorsa.report.rundir import STEPS, StepRecord, replace_file, shifted
from prorsa.rollout.tasks.base import Question, Split

LOG = "train.log"
LOOK_SECONDS = 0.2
"""verl's file logger gives no signal, so its file is looked at this often."""
LOG_LINES = 30
"""How much of the log a failure shows."""
LONGEST_TMP = 20
"""Ray's socket paths, which lie below the work directory, must stay under 108 bytes."""


class TrainingFailed(Exception):
    """The trainer ended before its last step; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Summary:
    steps: tuple[StepRecord, ...]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch."""
        return [step.reward for step in self.steps if step.split == "train"]

    @property
    def held_out(self) -> list[float]:
        """Mean reward on the held-out questions: before training, ..., after it."""
        return [step.reward for step in self.steps if step.split == "test"]


async def train(config: Config, run_dir: Path, on_step: Callable[[StepRecord], None] = lambda _: None) -> Summary:
    """Train as `config` says and write `run_dir`, `train.log` and `verl.jsonl` (verl's own metrics) included.

    Whatever ends it, also a cancellation or a SIGKILL of this process, no process, socket or temporary file is left.
    Raises `ConfigError`, `TrainingFailed` or `loaded.NotLoaded`.
    """
    config = complete(config)
    steps: list[StepRecord] = []
    with laid_out(config, run_dir) as settings, kept(run_dir, config) as journal:
        supervisor = await start_trainer(config, settings)
        try:
            async for step in follow(config, settings, supervisor):
                loaded.require(settings, loaded.expected(config.train.mode))
                journal.add_record(STEPS, asdict(shifted(run_dir, step)), f"step {step.step}")
                if journal.gave_up is not None:
                    raise RecordingFailed(journal.gave_up)
                steps.append(step)
                on_step(step)
        finally:
            await end(supervisor)
    if supervisor.returncode != 0:
        log = run_dir / LOG
        raise TrainingFailed(f"the trainer ended with status {supervisor.returncode}; {log} ends with\n{_tail(log)}")
    return Summary(tuple(steps))


@contextmanager
def kept(run_dir: Path, config: Config) -> Iterator[Journal]:
    """Where the steps go; the control plane's actor writes the rest of the run directory. Raises `RecordingFailed`."""
    recording = config.recording
    journal = Journal(run_dir, recording.memory_mb << 20, give_up_after=recording.give_up_after)
    journal.file(STEPS, shared=True)
    try:
        yield journal
    except BaseException:
        with suppress(RecordingFailed):  # it is in the log, and why the run ended counts more
            journal.close()
        raise
    journal.close()


def complete(config: Config) -> Config:
    """What the trainer's processes read: paths that hold in each of them, and the rollout mode that the trainer's implies.

    Raises `ConfigError`.
    """
    groups, mini_batch = config.rollout.groups, config.train.mini_batch_groups
    if groups % mini_batch:
        raise ConfigError(
            f"train.mini_batch_groups={mini_batch}: does not divide rollout.groups={groups}; set it to a divisor of that"
        )
    if config.task.train_questions < groups:
        raise ConfigError(
            f"task.train_questions={config.task.train_questions}: a batch of rollout.groups={groups} questions does not "
            f"fit in; set it to {groups} or more"
        )
    model = config.model.model_copy(update={"path": str(Path(checkpoint(config)).resolve())})
    mode = "sync" if config.train.mode == "sync" else "async"
    return config.model_copy(update={"model": model, "rollout": config.rollout.model_copy(update={"mode": mode})})


@contextmanager
def laid_out(config: Config, run_dir: Path) -> Iterator[Settings]:
    """Every file that the trainer's processes read; what is not of the run directory is gone afterwards."""
    run_dir.mkdir(parents=True, exist_ok=True)
    # The supervisor removes it first, so that it goes even where this process is killed.
    with TemporaryDirectory(prefix="prorsa-", dir=_short_tmp(), ignore_cleanup_errors=True) as work_dir:
        settings = Settings(str(run_dir.resolve()), work_dir)
        lay_out(config, settings)
        yield settings


def lay_out(config: Config, settings: Settings) -> None:
    task = build_task(config)
    tmp_dir(settings).mkdir()
    set_aside(settings)
    replace_file(settings.config_path, dump_config(config))
    write_questions(train_file(settings), task.questions("train", config.task.train_questions, config.seed), "train")
    write_questions(held_out_file(settings), task.questions("test", config.task.test_questions, config.seed), "test")
    router = {"router_class": "prorsa.integrations.verl.router.ProrsaRouter", **settings.mapping()}
    router_file(settings).write_text(yaml.safe_dump(router))
    agent = {"name": NAME, "_target_": "prorsa.integrations.verl.agent.ProrsaAgentLoop"}
    agents_file(settings).write_text(yaml.safe_dump([agent]))


def set_aside(settings: Settings) -> None:
    """What a job before has left in the run directory and this one would take for its own. Raises `CannotContinue` where that
    one still runs."""
    run_dir = Path(settings.run_dir)
    os.close(locked(run_dir))
    loaded.forget(settings)
    metrics = metrics_file(settings)
    if metrics.exists():
        earlier = len(list(run_dir.glob(f"{metrics.stem}-*{metrics.suffix}"))) + 1
        metrics.rename(metrics.with_stem(f"{metrics.stem}-{earlier}"))


def write_questions(path: Path, questions: Iterable[Question], split: Split) -> None:
    """The rows that verl's dataset reads; it hands each to the agent loop."""
    with open(path, "w") as file:
        for index, question in enumerate(questions):
            row = {
                "data_source": DATA_SOURCE,
                "prompt": list(question.messages),
                "reward_model": {"style": "rule", "ground_truth": question.answer},
                "extra_info": {"index": index, "split": split, "id": question.id},
            }
            file.write(json.dumps(row) + "\n")


async def start_trainer(config: Config, settings: Settings) -> asyncio.subprocess.Process:
    """Start the supervisor, which starts the trainer and outlives it. It ends both when its standard input does."""
    supervisor = [sys.executable, "-m", "prorsa.integrations.verl.supervisor"]
    return await asyncio.create_subprocess_exec(
        *supervisor,
        str(Path(settings.run_dir) / LOG),
        settings.work_dir,
        *trainer_command(config, settings),
        stdin=asyncio.subprocess.PIPE,
        # Ctrl-C in the terminal is for this process, which then ends the supervisor in order.
        start_new_session=True,
        env={**os.environ, **environment(settings, os.cpu_count() or 1)},
    )


def trainer_command(config: Config, settings: Settings) -> list[str]:
    main = [sys.executable, "-m", "prorsa.integrations.verl.main", f"{settings.work_dir}/ray"]
    return [*main, *verl_overrides(config, settings)]


async def end(supervisor: asyncio.subprocess.Process) -> None:
    """End the trainer if it still runs, and wait until everything of it has gone."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    await asyncio.shield(supervisor.wait())


async def follow(
    config: Config, settings: Settings, supervisor: asyncio.subprocess.Process
) -> AsyncIterator[StepRecord]:
    """Each step as verl logs it, until the trainer has ended."""
    ended = asyncio.create_task(supervisor.wait())
    lines = NewLines(metrics_file(settings))
    done: set[asyncio.Task[int]] = set()
    while not done:
        done, _ = await asyncio.wait([ended], timeout=LOOK_SECONDS)
        for line in lines.read():
            for step in read_steps(json.loads(line), config, asyncio.get_running_loop().time()):
                yield step


class NewLines:
    """The whole lines that a file has got since it was last read; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._position)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._position += len(whole) + len(newline)
        return whole.splitlines()


def read_steps(line: dict[str, Any], config: Config, time: float) -> list[StepRecord]:
    """What one line of verl's file logger holds: a trained batch, an evaluation, or both. Raises `TrainingFailed`."""
    metrics: dict[str, float] = line["data"]
    rollout = config.rollout
    steps = []
    for name in {REWARD, HELD_OUT} & metrics.keys():
        if not isinstance(metrics[name], float | int) or not math.isfinite(metrics[name]):
            raise TrainingFailed(
                f"step {line['step']}: verl's {name} is {metrics[name]}; a mean reward is a finite number"
            )
    if REWARD in metrics:
        batch = rollout.groups * rollout.group_size
        steps.append(StepRecord(line["step"], time, metrics["timing_s/step"], metrics[REWARD], batch, metrics=metrics))
    if HELD_OUT in metrics:
        seconds = metrics.get("timing_s/testing", 0.0)
        steps.append(
            StepRecord(line["step"], time, seconds, metrics[HELD_OUT], config.task.test_questions, split="test")
        )
    return steps


REWARD = "critic/score/mean"
HELD_OUT = f"val-core/{DATA_SOURCE}/reward/mean@1"
"""verl's names for the mean reward of a trained batch and of an evaluation."""


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def _short_tmp() -> str:
    default = tempfile.gettempdir()
    return default if len(default) <= LONGEST_TMP else "/tmp"
