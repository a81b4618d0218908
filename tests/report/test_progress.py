"""The live view, drawn from a run directory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from prorsa.report import recorder
from prorsa.report.progress import LiveProgress, RunView, sparkline
from prorsa.report.rundir import read_run, read_status


def drawn(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_shows_steps_reward_states_roles_flips_and_speed(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    run, status = read_run(directory), read_status(directory)
    assert status is not None
    shown = drawn(RunView(directory, steps=2))
    assert "step 2/2" in shown
    assert f"reward {run.steps[0].reward:.3f} → {run.steps[1].reward:.3f}" in shown
    assert "ended" in shown
    assert f"flips {len(run.flips)}" in shown
    assert f"turns {len(run.turns)}" in shown
    assert f"{status.tokens_per_s:.0f} tokens/s" in shown
    for name, (role, _) in status.instances.items():
        assert f"{name}  {role} " in shown


def test_it_counts_the_live_trajectories_by_state(
    synthetic: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "STATUS_EVERY", 0.0)
    directory = synthetic(until=101.0)
    status = read_status(directory)
    assert status is not None
    assert sum(status.states.values()) + status.totals["done"] == 32
    lines = {
        " ".join(line.split()[:-1]): line.split()[-1]
        for line in drawn(RunView(directory)).replace("━", "").splitlines()
    }
    for name, count in status.states.items():
        assert lines[name.lower().replace("_", " ")] == str(count)


def test_before_the_first_record_it_says_that_the_run_starts(tmp_path: Path) -> None:
    assert "starting" in drawn(RunView(tmp_path))
    assert RunView(tmp_path).line() == "starting"


def test_without_a_terminal_the_end_is_one_line(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    console = Console(file=io.StringIO(), width=40)
    with LiveProgress(directory, 2, console):
        pass
    assert isinstance(console.file, io.StringIO)
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith(RunView(directory, 2).line()[:20])
    assert "engine-3=decode" in line


def test_on_a_terminal_it_is_redrawn_in_place(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveProgress(directory, 2, console):
        pass
    assert isinstance(console.file, io.StringIO)
    assert "step 2/2" in console.file.getvalue()


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3]) == "▁"
