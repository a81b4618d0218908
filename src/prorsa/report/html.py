"""`report.html`: one file with everything a reader wants to see of a run, complete or cut off, and nothing to load."""

from __future__ import annotations

from pathlib import Path

import yaml

from prorsa.cluster.observers import Decision, Flip
from prorsa.report import charts
from prorsa.report.charts import Drawn
from prorsa.report.headline import headline
from prorsa.report.legible import escape
from prorsa.report.measures import Errors, Totals, forecast_errors, totals
from prorsa.report.page import page, section, table, tiles
from prorsa.report.rundir import Run, read_run, replace_file
from prorsa.report.svg import number

REPORT = "report.html"


def write_report(run_dir: str | Path) -> Path:
    """Read a run directory and write its report into it. Raises FileNotFoundError where there is no run."""
    return write_page(charts.prepare(read_run(run_dir)))


def write_page(drawn: Drawn) -> Path:
    """Write the report of a run that was read already."""
    path = drawn.run.directory / REPORT
    # A name may hold half a character.
    replace_file(path, render(drawn).encode("utf-8", "backslashreplace").decode())
    return path


def render(drawn: Drawn) -> str:
    """The whole page."""
    run = drawn.run
    summed = totals(run, drawn.replayed)
    errors = forecast_errors(drawn.replayed.windows)
    name = str(run.config.get("name", run.directory.name))
    body = [
        tiles([(figure.value, figure.words, figure.kind) for figure in headline(run, drawn.replayed)]),
        *(f"<p>Dropped {count}: {escape(reason)}</p>" for reason, count in summed.reasons.items()),
        *_sections(drawn, errors),
        _decisions(drawn),
        _flips(drawn),
        _configuration(run),
    ]
    return page(name, _subtitle(run, summed), run.problems, body)


def _subtitle(run: Run, summed: Totals) -> str:
    policy = run.config.get("policy", {})
    parts = [f"{summed.seconds:.1f} s, {summed.live_seconds:.1f} s of them with live trajectories"]
    if policy:
        parts.append(f"policy {policy.get('name')}, horizon {policy.get('horizon')} s")
    return "; ".join(parts)


def _sections(drawn: Drawn, errors: Errors) -> list[str]:
    latencies = drawn.latencies
    steps = " Dotted lines are the ends of training steps." if drawn.marks else ""
    shown = min(len(drawn.replayed.stays), charts.MOST_LANES)
    over = "over the steps" if drawn.run.steps else "in the order of finishing"
    return [
        section("Reward", charts.reward_chart(drawn), f"Mean reward of the trajectories, {over}."),
        section(
            "Roles over time",
            charts.roles_chart(drawn),
            "What every engine instance did: the roles follow the forecast demand. A flip lasts from leaving the old "
            f"pool until serving in the new one.{steps}",
        ),
        section(
            "Prefill share",
            charts.share_chart(drawn),
            "The share of the demand, counted in instances, that is prefill, and the share of the instances that did prefill "
            "at each decision. Flips bring the second to the first.",
        ),
        section(
            "Prefill forecast against what happened",
            charts.prefill_forecast_chart(drawn),
            f"Prompt tokens to prefill in each of {errors.windows} windows, at the time of the forecast. WAPE "
            f"{errors.prefill:.1%}; if every window were like the one before, {errors.persistence_prefill:.1%}.",
        ),
        section(
            "Decode admission forecast against what happened",
            charts.admissions_forecast_chart(drawn),
            "Prompt tokens of the requests that finish their prefill and enter decode in each window. WAPE "
            f"{errors.admitted:.1%}; if every window were like the one before, {errors.persistence_admitted:.1%}.",
        ),
        section(
            "Cumulative tokens",
            charts.tokens_chart(drawn),
            "Prompt tokens prefilled and tokens decoded so far. The dashed line leaves out what a prefix cache or the KV "
            "store had already.",
        ),
        section(
            "Inter-token latency",
            charts.latency_chart(drawn),
            "Time from one token of a turn to the next, in bins of time; tokens that arrive together share it, and a resend "
            f"in between counts. Over the whole run the median is {1000 * latencies.overall_p50:.1f} ms and the 99th "
            f"percentile {1000 * latencies.overall_p99:.1f} ms.",
        ),
        section(
            "Trajectories",
            charts.timeline_chart(drawn),
            f"{shown} of {len(drawn.replayed.stays)} trajectories, a lane each, coloured by state.",
        ),
    ]


def _decisions(drawn: Drawn) -> str:
    header = ["time, s", "live", "W, tokens", "theta, tokens/s", "a", "K, tokens", "b", "roles", "target"]
    rows = [_decision(decided.decision, drawn.start) for decided in drawn.run.decided]
    words = (
        "What the global manager saw and answered. W: forecast prefill tokens; theta: effective prefill speed; a: prefill "
        "demand in instances; K: decode KV cache, now and admitted; b: decode demand in instances; roles as prefill:decode."
    )
    return table("Decisions", words, header, rows)


def _decision(decision: Decision, start: float) -> list[str]:
    demand, current, target = decision.demand, decision.current, decision.target
    return [
        f"{decision.time - start:.2f}",
        f"{sum(decision.states.values())}",
        number(demand.prefill_tokens),
        number(demand.prefill_speed),
        f"{demand.prefill_instances:.2f}",
        number(demand.decode_tokens),
        f"{demand.decode_instances:.2f}",
        str(current),
        "as they are" if target is None else str(target),
    ]


def _flips(drawn: Drawn) -> str:
    header = ["time, s", "instance", "flip", "cancelled", "drain, s", "flip, s", "result"]
    rows = [_flip(flip, drawn.start) for flip in drawn.run.flips]
    words = "Every role switch: the requests that it cancelled, all of them resent, and how long it took."
    return table("Flips", words, header, rows)


def _flip(flip: Flip, start: float) -> list[str]:
    return [
        f"{flip.time - start:.2f}",
        flip.instance,
        f"{flip.before} → {flip.after}" + (", relaunched" if flip.relaunched else ""),
        f"{flip.cancelled}",
        f"{flip.drain_s:.3f}",
        f"{flip.flip_s:.3f}",
        flip.failure or "in service",
    ]


def _configuration(run: Run) -> str:
    text = escape(yaml.safe_dump(run.config, sort_keys=False), lines=True)
    return f"<details><summary>Configuration</summary><pre>{text}</pre></details>"
