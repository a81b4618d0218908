"""What `prorsa train` lays out for the trainer and reads back of it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import yaml

from prorsa.config import Config, ConfigError, load_config, parse_config
from prorsa.integrations.verl import launch, loaded
from prorsa.integrations.verl.launch import HELD_OUT, REWARD, NewLines, complete, laid_out, read_steps
from prorsa.integrations.verl.overrides import agents_file, held_out_file, metrics_file, router_file, train_file
from prorsa.integrations.verl.router import ControlRouter, ProrsaRouter
from prorsa.integrations.verl.settings import Settings
from prorsa.report.opening import CannotContinue
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import read_steps as read_steps_of_run
from prorsa.rollout.tasks.arithmetic import ArithmeticTask


@pytest.fixture
def config(checkpoint: Path) -> Config:
    return parse_config(
        {
            "model": {"path": str(checkpoint)},
            "task": {"train_questions": 8, "test_questions": 4},
            "rollout": {"groups": 2, "group_size": 3},
            "train": {"mini_batch_groups": 2},
        }
    )


def test_the_data_are_the_questions_of_the_task(config: Config, tmp_path: Path) -> None:
    with laid_out(complete(config), tmp_path / "run") as settings:
        rows = [json.loads(line) for line in train_file(settings).read_text().splitlines()]
        held_out = [json.loads(line) for line in held_out_file(settings).read_text().splitlines()]
    questions = ArithmeticTask().questions("train", 8, config.seed)
    assert [row["extra_info"]["id"] for row in rows] == [question.id for question in questions]
    assert [row["prompt"] for row in rows] == [list(question.messages) for question in questions]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [question.answer for question in questions]
    assert len(held_out) == 4
    assert {row["extra_info"]["split"] for row in held_out} == {"test"}


def test_the_files_name_classes_that_exist(config: Config, tmp_path: Path) -> None:
    with laid_out(complete(config), tmp_path / "run") as settings:
        router = yaml.safe_load(router_file(settings).read_text())
        [agent] = yaml.safe_load(agents_file(settings).read_text())
        assert Settings.of(router) == settings
        assert load_config(settings.config_path).task == config.task
    module, _, name = router["router_class"].rpartition(".")
    assert getattr(sys.modules[module], name) is ProrsaRouter
    assert ProrsaRouter.__ray_metadata__.modified_class.__name__ == ControlRouter.__name__
    assert (agent["name"], agent["_target_"]) == ("prorsa", "prorsa.integrations.verl.agent.ProrsaAgentLoop")


def test_nothing_is_left_beside_the_run_directory(config: Config, tmp_path: Path) -> None:
    with laid_out(complete(config), tmp_path / "run") as settings:
        work = Path(settings.work_dir)
        assert work.is_dir()
    assert not work.exists()
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_paths_hold_in_every_process(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(config.model.path)
    monkeypatch.chdir(path.parent)
    relative = config.model_copy(update={"model": config.model.model_copy(update={"path": path.name})})
    assert complete(relative).model.path == str(path)


@pytest.mark.parametrize(("mode", "rollout"), [("sync", "sync"), ("separate_async", "async")])
def test_the_forecast_expects_new_trajectories_only_where_they_come(config: Config, mode: str, rollout: str) -> None:
    trained = config.model_copy(update={"train": config.train.model_copy(update={"mode": mode})})
    assert complete(trained).rollout.mode == rollout


def test_a_job_that_starts_again_finds_its_run_directory(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    first = f"load({loaded.expected('sync')})\n" + LOGGED % (1, 0.25) + LOGGED % (2, 0.5) + "raise SystemExit(1)"
    with pytest.raises(launch.TrainingFailed):
        train_with(config, run_dir, monkeypatch, first)
    with pytest.raises(loaded.NotLoaded):
        train_with(config, run_dir, monkeypatch, LOGGED % (2, 0.75))  # the marks of the first job are not its own
    again = f"load({loaded.expected('sync')})\n" + LOGGED % (2, 0.75)
    assert train_with(config, run_dir, monkeypatch, again).rewards == [0.75]
    assert [(step.step, step.reward) for step in read_steps_of_run(run_dir)] == [(1, 0.25), (2, 0.75)]
    logs = sorted(path.name for path in run_dir.glob("verl*.jsonl"))
    assert logs == ["verl-1.jsonl", "verl-2.jsonl", "verl.jsonl"]
    assert len((run_dir / "verl-1.jsonl").read_text().splitlines()) == 2


def test_a_run_directory_that_a_job_writes_is_refused(config: Config, tmp_path: Path) -> None:
    with (
        RunRecorder(tmp_path / "run"),
        pytest.raises(CannotContinue, match="a process writes this run"),
        laid_out(complete(config), tmp_path / "run"),
    ):
        pass


@pytest.mark.parametrize("mean", [None, float("nan"), float("inf")])
def test_a_mean_reward_that_is_no_number_ends_the_training(config: Config, mean: float | None) -> None:
    with pytest.raises(launch.TrainingFailed, match=rf"step 3: verl's critic/score/mean is {mean}; a mean reward is"):
        read_steps({"step": 3, "data": {REWARD: mean, "timing_s/step": 4.0}}, config, time=9.0)


def test_mini_batches_must_fill_the_batch(config: Config) -> None:
    broken = config.model_copy(update={"train": config.train.model_copy(update={"mini_batch_groups": 4})})
    with pytest.raises(ConfigError, match=r"train\.mini_batch_groups=4: does not divide rollout\.groups=2; set it to"):
        complete(broken)


def test_the_questions_must_fill_a_batch(config: Config) -> None:
    few = config.model_copy(update={"task": config.task.model_copy(update={"train_questions": 1})})
    with pytest.raises(
        ConfigError, match=r"task\.train_questions=1: a batch of rollout\.groups=2 questions does not fit"
    ):
        complete(few)


def test_a_line_of_verl_may_hold_a_batch_and_an_evaluation(config: Config) -> None:
    metrics = {REWARD: 0.5, HELD_OUT: 0.25, "timing_s/step": 4.0, "timing_s/testing": 2.0}
    batch, held_out = read_steps({"step": 3, "data": metrics}, config, time=9.0)
    assert (batch.step, batch.time, batch.seconds, batch.reward, batch.trajectories) == (3, 9.0, 4.0, 0.5, 6)
    assert (batch.split, held_out.split) == ("train", "test")
    assert (held_out.step, held_out.seconds, held_out.reward, held_out.trajectories) == (3, 2.0, 0.25, 4)


def test_the_evaluation_before_training_is_step_0(config: Config) -> None:
    [step] = read_steps({"step": 0, "data": {HELD_OUT: 0.25}}, config, time=9.0)
    assert (step.step, step.split, step.reward) == (0, "test", 0.25)


def test_new_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = NewLines(path)
    assert lines.read() == []
    path.write_bytes(b"one\ntw")
    assert lines.read() == [b"one"]
    assert lines.read() == []
    with open(path, "ab") as file:
        file.write(b"o\nthree\n")
    assert lines.read() == [b"two", b"three"]


def train_with(config: Config, run_dir: Path, monkeypatch: pytest.MonkeyPatch, trainer: str) -> launch.Summary:
    """`train` with a few lines of Python in the trainer's place; they get what it needs to log steps and to leave marks."""

    def command(_: Config, settings: Settings) -> list[str]:
        prelude = (
            f"import json, pathlib; log = open({str(metrics_file(settings))!r}, 'w', buffering=1)\n"
            f"marks = pathlib.Path({settings.run_dir!r}, 'loaded.txt')\n"
            f"load = lambda points: marks.write_text(' '.join(points))\n"
        )
        return [sys.executable, "-c", prelude + trainer]

    monkeypatch.setattr(launch, "trainer_command", command)
    return asyncio.run(launch.train(config, run_dir))


LOGGED = "log.write(json.dumps({'step': %d, 'data': {'critic/score/mean': %f, 'timing_s/step': 1.0}}) + '\\n')\n"


def test_steps_are_recorded(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = f"load({loaded.expected('sync')})\n" + LOGGED % (1, 0.25) + LOGGED % (2, 0.75)
    summary = train_with(config, tmp_path / "run", monkeypatch, trainer)
    assert summary.rewards == [0.25, 0.75]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in recorded] == [(1, 0.25), (2, 0.75)]


def test_a_crash_shows_the_end_of_the_log(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = f"load({loaded.expected('sync')})\n" + LOGGED % (1, 0.25) + "raise SystemExit('the loss is not a number')"
    with pytest.raises(launch.TrainingFailed, match=r"(?s)status 1; .*train\.log ends with.*the loss is not a number"):
        train_with(config, tmp_path / "run", monkeypatch, trainer)
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 1


def test_a_run_without_our_parts_is_stopped_at_its_first_step(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = (
        f"load({[p for p in loaded.expected('sync') if p != 'router']})\n"
        + LOGGED % (1, 0.25)
        + "import time; time.sleep(60)"
    )
    with pytest.raises(loaded.NotLoaded, match="verl has not loaded Prorsa's router class: set actor_rollout_ref"):
        train_with(config, tmp_path / "run", monkeypatch, trainer)
