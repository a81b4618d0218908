"""The live view of a run. It reads the run directory only, so it may sit in any process: the one of the rollout, or the
one that waits for a trainer while the control plane runs elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prorsa.report.legible import legible, plain_text
from prorsa.report.rundir import Status, StepRecord, read_status, read_steps

REFRESH = 4
"""Redraws a second on a terminal."""
LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""

_STATES = {
    "SAMPLED": "white",
    "SANDBOX_STARTING": "cyan",
    "READY": "yellow",
    "PREFILL": "blue",
    "DECODE": "dark_orange",
    "TOOL": "green",
    "REWARD": "magenta",
}
_ROLES = {"prefill": "blue", "decode": "dark_orange", "mixed": "magenta"}
_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 40


class RunView:
    """The present state of a run directory, drawn anew whenever rich asks."""

    def __init__(self, directory: str | Path, steps: int | None = None) -> None:
        """`steps` is how many the run will have, where that is known."""
        self._directory = Path(directory)
        self._steps = steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status, steps = read_status(self._directory), read_steps(self._directory)
        if status is None:
            yield plain_text(f"{self._directory}: starting", style="dim")
            return
        trouble = [Text(f"recording: {status.recording}", style="bold red")] if status.recording else []
        yield Group(self._headline(status, steps), _states(status), _instances(status), _counts(status), *trouble)

    def line(self) -> str:
        """The same in one line, for a log."""
        status, steps = read_status(self._directory), read_steps(self._directory)
        if status is None:
            return "starting"
        live = " ".join(f"{name.lower()} {count}" for name, count in status.states.items() if count)
        roles = " ".join(f"{name}={_role(*what)}" for name, what in status.instances.items())
        parts = [self._headline(status, steps).plain, f"live: {live or 'none'}", roles, _counts(status).plain]
        parts += [f"recording: {status.recording}"] if status.recording else []
        return " | ".join(part for part in parts if part)

    def _headline(self, status: Status, steps: list[StepRecord]) -> Text:
        # Evaluations of a training run are no steps of it; a rollout over held-out questions has nothing else.
        train = [step for step in steps if step.split == "train"] or steps
        number = train[-1].step if train else 0
        text = Text(f"{status.seconds:6.1f} s", style="bold")
        if train or self._steps:
            text.append(f"  step {number}" + (f"/{self._steps}" if self._steps else ""), style="bold")
        rewards = [step.reward for step in train]
        if rewards:
            text.append(f"  reward {rewards[0]:.3f} → {rewards[-1]:.3f} ", style="bold")
            text.append(sparkline(rewards[-40:]), style="green")
        elif status.reward is not None:
            text.append(f"  reward {status.reward:.3f}", style="bold")
        if status.ended:
            text.append("  ended", style="dim")
        return text


def _states(status: Status) -> Table:
    table = Table.grid(padding=(0, 1))
    most = max([*status.states.values(), 1])
    for name, count in status.states.items():
        bar = "━" * round(_BAR_WIDTH * count / most)
        table.add_row(Text(name.lower().replace("_", " "), style="dim"), f"{count:>5}", Text(bar, style=_STATES[name]))
    return table


def _instances(status: Status) -> Text:
    text = Text()
    for name, (role, state) in status.instances.items():
        routed = state == "routed"
        text.append(f"{legible(name)} ", style="dim")
        text.append(f" {_role(role, state)} ", style=f"reverse {_ROLES[role]}" if routed else "reverse yellow")
        text.append("  ")
    return text


def _counts(status: Status) -> Text:
    of = {name: status.totals.get(name, 0) for name in ("done", "dropped", "turns", "resends", "flips", "failed_flips")}
    failed = f" ({of['failed_flips']} failed)" if of["failed_flips"] else ""
    return Text(
        f"done {of['done']}  dropped {of['dropped']}  turns {of['turns']}  resends {of['resends']}  "
        f"flips {of['flips']}{failed}  {status.tokens_per_s:.0f} tokens/s"
    )


def _role(role: str, state: str) -> str:
    return role if state == "routed" else state


def sparkline(values: list[float]) -> str:
    """The values as a row of bars, the lowest to the highest over the whole height."""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


class LiveProgress:
    """Shows a run while the `with` block lasts: redrawn in place on a terminal, else a line now and then."""

    def __init__(self, directory: str | Path, steps: int | None = None, console: Console | None = None) -> None:
        self._view = RunView(directory, steps)
        self._console = console or Console()
        self._ended = Event()
        self._live: Live | None = None
        self._printer: Thread | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(self._view, console=self._console, refresh_per_second=REFRESH)
            self._live.start()
        else:
            self._printer = Thread(target=self._print_lines, name="progress", daemon=True)
            self._printer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
        if self._printer is not None:
            self._printer.join()
            self._print_line()

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY):
            self._print_line()

    def _print_line(self) -> None:
        with suppress(OSError):  # the output may go to a full disk, or to nobody any more
            self._console.print(plain_text(self._view.line()), highlight=False, soft_wrap=True)
