"""`prorsa train`: lay out the data, start the supervised trainer, follow its steps, and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from prorsa.config import Config, dump_config
from prorsa.integrations.verl import loaded
from prorsa.integrations.verl.overrides import (
    DATA_SOURCE,
    agents_file,
    environment,
    metrics_file,
    router_file,
    test_file,
    train_file,
    verl_overrides,
)
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.rollout.tasks.arithmetic import ArithmeticTask
from prorsa.rollout.tasks.base import Question

LOG = "train.log"
STEPS = "steps.jsonl"
LOOK_SECONDS = 0.2
"""verl's file logger gives no signal, so its file is looked at this often."""


class TrainingFailed(Exception):
    """The trainer ended before its last step; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Step:
    """What verl logged for one step; step 0 is the evaluation before training."""

    step: int
    reward: float | None
    """Mean reward of the trained batch."""
    held_out: float | None
    """Mean reward of the held-out questions, where they were evaluated after this step."""
    metrics: dict[str, float]
    """Everything verl logged, by its own names."""


@dataclass(frozen=True, slots=True)
class Summary:
    steps: tuple[Step, ...]

    @property
    def held_out(self) -> tuple[float | None, float | None]:
        """Mean held-out reward before and after training."""
        values = [step.held_out for step in self.steps if step.held_out is not None]
        return (values[0], values[-1]) if values else (None, None)


async def train(config: Config, run_dir: Path, on_step: Callable[[Step], None] = lambda _: None) -> Summary:
    """Train as `config` says, writing to `run_dir`: `config.yaml`, `steps.jsonl`, `verl.jsonl`, `train.log`, and the records
    of the rollout. Whatever happens, no process, socket or temporary file is left.

    Raises `TrainingFailed` or `loaded.NotLoaded`.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="prorsa-", dir=_short_tmp(), ignore_cleanup_errors=True) as work_dir:
        settings = Settings(str(run_dir.resolve()), work_dir)
        lay_out(config, settings)
        steps: list[Step] = []
        supervisor = await start_trainer(config, settings)
        try:
            with open(run_dir / STEPS, "w") as file:
                async for step in follow(settings, supervisor):
                    if not steps:
                        loaded.require(settings, loaded.expected(config.train.mode))
                    steps.append(step)
                    file.write(json.dumps(asdict(step)) + "\n")
                    file.flush()
                    on_step(step)
        finally:
            await end(supervisor)
    if supervisor.returncode != 0:
        raise TrainingFailed(f"the trainer ended with status {supervisor.returncode}; its log {run_dir / LOG} ends with\n"
                             + "\n".join(_tail(run_dir / LOG)))
    return Summary(tuple(steps))


def lay_out(config: Config, settings: Settings) -> None:
    """Write every file that the trainer's processes read."""
    settings.config_path.write_text(dump_config(config))
    task = ArithmeticTask()
    write_questions(train_file(settings), task.questions("train", config.task.train_questions, config.seed), "train")
    write_questions(test_file(settings), task.questions("test", config.task.test_questions, config.seed), "test")
    router = {"router_class": "prorsa.integrations.verl.router.ProrsaRouter", **settings.mapping()}
    router_file(settings).write_text(yaml.safe_dump(router))
    agents_file(settings).write_text(
        yaml.safe_dump([{"name": NAME, "_target_": "prorsa.integrations.verl.agent.ProrsaAgentLoop"}])
    )


def write_questions(path: Path, questions: Iterable[Question], split: str) -> None:
    """The rows that verl's dataset reads."""
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
    python = [sys.executable, "-m"]
    supervisor = [*python, "prorsa.integrations.verl.supervisor", str(Path(settings.run_dir) / LOG), settings.work_dir]
    trainer = [*python, "prorsa.integrations.verl.main", *verl_overrides(config, settings)]
    return await asyncio.create_subprocess_exec(
        *supervisor,
        *trainer,
        stdin=asyncio.subprocess.PIPE,
        # Ctrl-C in the terminal is for this process, which then ends the supervisor in order.
        start_new_session=True,
        env={**os.environ, **environment(settings, os.cpu_count() or 1)},
    )


async def end(supervisor: asyncio.subprocess.Process) -> None:
    """End the trainer if it still runs, and wait until everything of it has gone."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    await asyncio.shield(supervisor.wait())


async def follow(settings: Settings, supervisor: asyncio.subprocess.Process) -> AsyncIterator[Step]:
    """Each step as verl logs it, until the trainer ends."""
    ended = asyncio.create_task(supervisor.wait())
    path, position = metrics_file(settings), 0
    while True:
        done, _ = await asyncio.wait([ended], timeout=LOOK_SECONDS)
        if path.exists():
            with open(path, "rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    yield read_step(json.loads(line))
        if done:
            return


def read_step(line: dict[str, Any]) -> Step:
    data: dict[str, float] = line["data"]
    return Step(
        step=line["step"],
        reward=data.get("critic/score/mean"),
        held_out=data.get(f"val-core/{DATA_SOURCE}/reward/mean@1"),
        metrics=data,
    )


def _tail(log: Path, lines: int = 30) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-lines:]


def _short_tmp() -> str:
    """Ray's socket paths must stay below 108 bytes."""
    return tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
