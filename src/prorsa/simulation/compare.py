"""The policies of a scenario side by side: each run's outcome in the terms of the comparison report."""

from __future__ import annotations

from prorsa.report.comparison import PolicyOutcome
from prorsa.report.measures import Window
from prorsa.report.volumes import distribution
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.statistics import BIN_S


def compared(outcome: RunOutcome) -> PolicyOutcome:
    statistics = outcome.statistics
    busy = statistics.step_s or 1.0
    return PolicyOutcome(
        name=outcome.policy,
        step_s=tuple(step.rollout_s for step in outcome.steps),
        trajectory_s=distribution(outcome.trajectory_s),
        done=outcome.done,
        dropped=outcome.dropped,
        replaced_groups=outcome.lost_groups,
        output_tokens=statistics.decoded_tokens,
        output_tokens_per_s=statistics.decoded_tokens / outcome.seconds if outcome.seconds else 0.0,
        interference_idle=statistics.interference_s / busy,
        imbalance_idle=statistics.imbalance_s / busy,
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
    )
