"""`prorsa simulate`: the policies of a scenario side by side, each a run in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import as_completed
from pathlib import Path

from prorsa.report.comparison import Comparison, Fault, PolicyOutcome, Toll
from prorsa.report.measures import Window
from prorsa.report.volumes import distribution
from prorsa.simulation.engines.statistics import BIN_S
from prorsa.simulation.experiments.grid import ExperimentFailed, Job, Progress, explained
from prorsa.simulation.experiments.reproduce import pool
from prorsa.simulation.faults import FaultSchedule
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.run import check_scenario, run_scenario
from prorsa.simulation.scenario import Scenario

Run = tuple[str, FaultSchedule | None]
"""A policy, and what fails meanwhile."""


def compare(
    scenario: Scenario,
    names: Sequence[str],
    workers: int,
    progress: Progress,
    record_to: str | None = None,
    faults: FaultSchedule | None = None,
) -> Comparison:
    """Run the policies `names` of the scenario, or all of them; with `faults` each without and with them. `record_to` gets a
    run directory for each.

    Raises `ConfigError`, and `ExperimentFailed` where a run fails.
    """
    chosen = list(names) or list(scenario.policies)
    # What cannot be built is one error here, not one of every process.
    for name in chosen:
        check_scenario(scenario, name, faults)
    profiles = scenario.prefill_profile(), scenario.decode_profile()
    runs: list[Run] = [(name, failing) for name in chosen for failing in ([None, faults] if faults else [None])]
    with pool(workers) as executor:
        running = {
            executor.submit(
                run_scenario, scenario, name, faults=failing, record_to=_directory(record_to, name, failing)
            ): (name, failing)
            for name, failing in runs
        }
        for done, future in enumerate(as_completed(running), 1):
            progress(Job(scenario, scenario.policies[running[future][0]]), done, len(runs))
    failures = [
        (Job(scenario, scenario.policies[name]), error)
        for future, (name, _) in running.items()
        if (error := future.exception()) is not None
    ]
    if failures:
        raise ExperimentFailed(f"{len(failures)} runs failed\n{explained(failures)}") from failures[0][1]
    outcomes = {run: future.result() for future, run in running.items()}
    notes = [f"simulated, from the profile {profile.name}: {profile.source}" for profile in dict.fromkeys(profiles)]
    if faults is not None:
        notes.append(f"faults: seed {faults.seed}, {len(faults.faults)} entries in the schedule")
    shown = tuple(compared(outcomes[run], outcomes[run[0], None] if faults else None) for run in runs)
    return Comparison(scenario.name, shown, tuple(notes))


def _directory(record_to: str | None, name: str, failing: FaultSchedule | None) -> Path | None:
    return None if record_to is None else Path(record_to) / (name if failing is None else f"{name}-faults")


def _toll(outcome: RunOutcome, undisturbed: RunOutcome) -> Toll:
    disturbance = outcome.disturbance
    return Toll(
        faults=tuple(Fault(fault.time, fault.kind, fault.target) for fault in disturbance.faults),
        restarts=disturbance.restarts,
        recomputed_tokens=disturbance.recomputed_tokens,
        unread_tokens=disturbance.unread_tokens,
        lost=disturbance.lost,
        slowdown=outcome.rollout_s / undisturbed.rollout_s,
    )


def compared(outcome: RunOutcome, undisturbed: RunOutcome | None = None) -> PolicyOutcome:
    """`undisturbed`: the run without faults that this one, or the same one, is held against."""
    statistics = outcome.statistics
    return PolicyOutcome(
        name=outcome.policy if undisturbed is None or undisturbed is outcome else f"{outcome.policy}, faults",
        step_s=tuple(step.rollout_s for step in outcome.steps),
        trajectory_s=distribution(outcome.trajectory_s),
        done=outcome.done,
        dropped=outcome.dropped,
        replaced_groups=outcome.lost_groups,
        output_tokens=statistics.decoded_tokens,
        output_tokens_per_s=statistics.decoded_tokens / outcome.seconds if outcome.seconds else 0.0,
        interference_idle=outcome.idle_share,
        imbalance_idle=statistics.imbalance_s / (statistics.step_s or 1.0),
        itl_p50=statistics.itl.percentile(0.5),
        itl_p99=statistics.itl.percentile(0.99),
        itl_over_time=tuple(
            ((index + 0.5) * BIN_S, seconds / tokens)
            for index, (seconds, tokens) in sorted(statistics.itl_over_time.items())
            if tokens
        ),
        roles=tuple(outcome.roles),
        flips=len(outcome.flips),
        resends=outcome.resends,
        windows=tuple(
            Window(window.made, window.baselines["persistence"], window.measured) for window in outcome.forecasts
        ),
        step_volumes=tuple(outcome.step_tokens(step) for step in outcome.steps),
        window_volumes=tuple(outcome.tokens),
        kv_use=tuple(outcome.kv_use),
        toll=None if undisturbed is None else _toll(outcome, undisturbed),
    )
