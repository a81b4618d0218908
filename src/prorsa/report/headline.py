"""The figures of a run that come first: on its page, and on the terminal when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prorsa.report.measures import Replay, forecast_errors, integrity, totals
from prorsa.report.rundir import Run
from prorsa.report.svg import number


@dataclass(frozen=True, slots=True)
class Figure:
    value: str
    words: str
    kind: str = ""
    """`good` or `bad` where it is a verdict."""


def headline(run: Run, replayed: Replay) -> list[Figure]:
    """What was rolled out, what it was worth, what it took, and whether anything was lost."""
    summed, errors = totals(run, replayed), forecast_errors(replayed.windows)
    checked = integrity(run, replayed.contexts)
    figures = [
        Figure(f"{summed.done}", f"trajectories finished of {summed.sampled}; {summed.dropped} dropped"),
        *_rewards(run),
        Figure(number(summed.turns), f"model turns, {summed.resends} times cancelled and resent"),
        Figure(f"{summed.flips}", f"role flips, {summed.failed_flips} failed"),
        Figure(number(summed.output_tokens), f"tokens generated, {summed.tokens_per_s:.0f} per second"),
        Figure(number(summed.prompt_tokens), f"prompt tokens, {summed.cached_share:.0%} of them cached"),
    ]
    if checked.turns:
        words = (
            f"tokens lost: streams and episodes compared over {checked.turns} turns, {number(checked.tokens)} tokens"
        )
        figures.append(Figure(f"{checked.lost}", words, "bad" if checked.lost else "good"))
    if errors.windows:
        for share, baseline, what in (
            (errors.prefill, errors.persistence_prefill, "prefill"),
            (errors.admitted, errors.persistence_admitted, "decode admission"),
        ):
            figures.append(Figure(f"{share:.1%}", f"WAPE of the {what} forecast; persistence {baseline:.1%}"))
    return figures


def _rewards(run: Run) -> Iterator[Figure]:
    for split, words in (("train", "mean reward, first and last step"), ("test", "held-out reward, first and last")):
        rewards = [step.reward for step in run.steps if step.split == split]
        if rewards:
            yield Figure(f"{rewards[0]:.2f} → {rewards[-1]:.2f}", words)
