"""The few chart forms that the report draws, as SVG text. Colours are CSS variables, so that they follow light and dark.

Every chart is `WIDTH` units wide and as high as it says; it scales to the room that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prorsa.report.legible import escape

Values = Sequence[float] | NDArray[np.float64]

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 78, 18, 34, 44
"""Margins around a plot: the legend stands above it, the axis labels left and below."""

LIGHT = {
    "paper": "#ffffff",
    "ink": "#1c2330",
    "soft": "#5d6779",
    "grid": "#e4e8ee",
    "prefill": "#2563c9",
    "decode": "#e07b1a",
    "mixed": "#7a5bc0",
    "flipping": "#f2cf4a",
    "dead": "#3b3f46",
    "sampled": "#c3c9d3",
    "sandbox": "#79c7cf",
    "ready": "#f2cf4a",
    "tool": "#3d9a50",
    "reward": "#b05cc4",
    "dropped": "#cf3434",
    "persistence": "#98a1b0",
    "measured": "#1c2330",
}
DARK = LIGHT | {
    "paper": "#151a22",
    "ink": "#e6eaf1",
    "soft": "#9aa5b6",
    "grid": "#2a3240",
    "prefill": "#5b93f0",
    "decode": "#f39a45",
    "mixed": "#a58be6",
    "dead": "#76808f",
    "sampled": "#566072",
    "reward": "#ca85dc",
    "dropped": "#ee5f5f",
    "persistence": "#78839a",
    "measured": "#e6eaf1",
}


def style() -> str:
    """The CSS of every chart, for a page or for a picture of its own."""
    light = "".join(f"--{name}:{value};" for name, value in LIGHT.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    return (
        f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "svg text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--soft)}"
        "svg text.title{font-size:15px;font-weight:600;fill:var(--ink)}"
        "svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--soft)}"
        "svg .mark{stroke:var(--soft);stroke-dasharray:1 4}"
    )


def tag(name: str, content: str = "", /, **attributes: str | float) -> str:
    """One element; `class_` and `text_anchor` become class and text-anchor. `content` is markup."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items())
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def text(content: str, x: float, y: float, anchor: str = "start", **attributes: str | float) -> str:
    return tag("text", escape(content), x=x, y=y, text_anchor=anchor, **attributes)


@dataclass(frozen=True, slots=True)
class Chart:
    body: str
    height: float

    def svg(self, css: str = "") -> str:
        """The element. With `css` it can be a file of its own."""
        defs = f"<style>{css}</style>" if css else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img">'
            f"{defs}{self.body}</svg>"
        )


def stack(charts: Sequence[tuple[str, Chart]]) -> Chart:
    """Charts below one another, each under its title, on a background of their own."""
    parts: list[str] = []
    y = 12.0
    for title, chart in charts:
        parts.append(text(title, LEFT, y + 14, class_="title"))
        parts.append(tag("g", chart.body, transform=f"translate(0 {y + 22:g})"))
        y += chart.height + 34
    background = tag("rect", width=WIDTH, height=y, rx=8, fill="var(--paper)")
    return Chart(background + "".join(parts), y)


def number(value: float) -> str:
    """Short and readable: 950, 1.5k, 20k, 3.2M, 0.05."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Scale:
    """Values in [low, high] to units in [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False
    """Ticks at whole numbers only."""

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, low)), math.log10(low), math.log10(high)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            ticks = nice_ticks(self.low, self.high)
            return [tick for tick in ticks if tick == round(tick)] if self.whole else ticks
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        fine = (1, 2, 5) if len(decades) <= 3 else (1,)
        ticks = [10.0**decade * factor for decade in decades for factor in fine]
        return [tick for tick in ticks if self.low <= tick <= self.high]


@dataclass(frozen=True, slots=True)
class Series:
    """A line through (x, y). `colour` is a name of the palette; `dots` marks every point."""

    name: str
    colour: str
    x: Values
    y: Values
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    start: float
    end: float
    colour: str
    title: str
    """What a reader sees on hovering."""


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: Sequence[Span]


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    height: float = 280,
    x_range: tuple[float, float] | None = None,
    y_top: float | None = None,
    log: bool = False,
    whole_x: bool = False,
    marks: Sequence[float] = (),
) -> Chart:
    """Lines over a common x axis. `marks` are x values of thin vertical lines; `log` is for the y axis."""
    xs = [value for one in series for value in one.x]
    ys = [value for one in series for value in one.y if value > 0 or not log]
    low_x, high_x = x_range or (min(xs, default=0.0), max(xs, default=1.0))
    low_y = 0.8 * min(ys, default=1.0) if log else min(0.0, min(ys, default=0.0))
    high_y = y_top if y_top is not None else 1.08 * max(ys, default=1.0) or 1.0
    x = Scale(low_x, high_x, LEFT, WIDTH - RIGHT, whole=whole_x)
    y = Scale(low_y, high_y, height - BOTTOM, TOP, log)
    legend = [(one.name, _swatch(one)) for one in series]
    body = (
        _legend(legend) + _grid(x, y, height) + _marks(marks, x, height) + "".join(_line(one, x, y) for one in series)
    )
    return Chart(body + _labels(x_label, y_label, height), height)


def lane_chart(
    lanes: Sequence[Lane],
    legend: Sequence[tuple[str, str]],
    x_label: str,
    y_label: str,
    *,
    lane_height: float,
    x_range: tuple[float, float],
    marks: Sequence[float] = (),
) -> Chart:
    """One row for each lane, coloured by what it did when. Lanes of 10 units or more are named."""
    height = TOP + lane_height * len(lanes) + BOTTOM
    x = Scale(*x_range, LEFT, WIDTH - RIGHT)
    gap = 0.2 * lane_height if lane_height >= 10 else 0.0
    parts = [_legend([(name, _square(colour)) for name, colour in legend]), _marks(marks, x, height)]
    for row, lane in enumerate(lanes):
        top = TOP + row * lane_height + gap / 2
        if lane_height >= 10:
            parts.append(text(lane.name, LEFT - 8, top + (lane_height - gap) / 2 + 4, "end"))
        parts += [_bar(span, x, top, lane_height - gap) for span in lane.spans]
    bottom = height - BOTTOM
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts += [text(number(tick), x(tick), bottom + 16, "middle") for tick in x.ticks()]
    named = lane_height >= 10
    return Chart("".join(parts) + _labels(x_label, "" if named else y_label, height), height)


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar in every group; None leaves its place empty."""

    name: str
    colour: str
    values: Sequence[float | None]


def bar_chart(
    groups: Sequence[str], bars: Sequence[Bars], y_label: str, *, height: float = 260, level: float | None = None
) -> Chart:
    """Groups of bars side by side, each group named below. `level` is the y value of a thin horizontal line."""
    values = [value for one in bars for value in one.values if value is not None]
    y = Scale(0.0, 1.08 * max([*values, level or 0.0], default=1.0) or 1.0, height - BOTTOM, TOP)
    x = Scale(0.0, len(groups), LEFT, WIDTH - RIGHT)
    width = 0.8 * (x(1) - x(0)) / max(len(bars), 1)
    parts = [_legend([(one.name, _square(one.colour)) for one in bars]), _rungs(y)]
    for column, one in enumerate(bars):
        for group, value in enumerate(one.values):
            if value is not None:
                left = x(group + 0.1) + column * width
                parts.append(_column(one, groups[group], value, left, width, y))
    parts += [text(name, x(group + 0.5), height - BOTTOM + 16, "middle") for group, name in enumerate(groups)]
    if level is not None:
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(level), y2=y(level), class_="mark"))
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=height - BOTTOM, y2=height - BOTTOM, class_="axis"))
    return Chart("".join(parts) + _labels("", y_label, height), height)


def _column(bars: Bars, group: str, value: float, left: float, width: float, y: Scale) -> str:
    title = tag("title", escape(f"{group}: {bars.name} {number(value)}"))
    top = y(value)
    return tag("rect", title, x=left, y=top, width=0.92 * width, height=y.start - top, fill=f"var(--{bars.colour})")


def _bar(span: Span, x: Scale, top: float, height: float) -> str:
    left, right = x(span.start), x(span.end)
    return tag(
        "rect",
        tag("title", escape(span.title)),
        x=left,
        y=top,
        width=max(right - left, 0.4),
        height=height,
        fill=f"var(--{span.colour})",
    )


def _line(series: Series, x: Scale, y: Scale) -> str:
    points = [(x(a), y(b)) for a, b in zip(series.x, series.y, strict=True)]
    if not points:
        return ""
    drawn = _path(series, "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points))
    if not series.dots:
        return drawn
    colour = f"var(--{series.colour})"
    dots = [
        tag(
            "circle", tag("title", escape(f"{series.name}: {number(b)} at {number(a)}")), cx=px, cy=py, r=3, fill=colour
        )
        for (px, py), a, b in zip(points, series.x, series.y, strict=True)
    ]
    return drawn + "".join(dots)


def _path(series: Series, path: str) -> str:
    dash = {"stroke_dasharray": "5 4"} if series.dashed else {}
    colour = f"var(--{series.colour})"
    return tag("path", d=path, fill="none", stroke=colour, stroke_width=1.8, stroke_linejoin="round", **dash)


def _swatch(series: Series) -> str:
    """A short piece of the line, as a legend shows it at its origin."""
    return _path(series, "M0 15H20")


def _square(colour: str) -> str:
    return tag("rect", x=4, y=9, width=12, height=12, rx=2, fill=f"var(--{colour})")


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """(name, swatch) side by side above the plot."""
    parts: list[str] = []
    left = float(LEFT)
    for name, swatch in entries:
        parts.append(tag("g", swatch, transform=f"translate({left:g} 0)"))
        parts.append(text(name, left + 26, 19))
        left += 26 + 6.4 * len(name) + 18
    return "".join(parts)


def _grid(x: Scale, y: Scale, height: float) -> str:
    bottom = height - BOTTOM
    parts = [_rungs(y)]
    parts += [text(number(tick), x(tick), bottom + 16, "middle") for tick in x.ticks()]
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    return "".join(parts)


def _rungs(y: Scale) -> str:
    """Horizontal grid lines, labelled."""
    parts: list[str] = []
    for tick in y.ticks():
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(tick), y2=y(tick), class_="grid"))
        parts.append(text(number(tick), LEFT - 8, y(tick) + 4, "end"))
    return "".join(parts)


def _marks(marks: Sequence[float], x: Scale, height: float) -> str:
    inside = [x(mark) for mark in marks if x.low <= mark <= x.high]
    return "".join(tag("line", x1=at, x2=at, y1=TOP - 4, y2=height - BOTTOM, class_="mark") for at in inside)


def _labels(x_label: str, y_label: str, height: float) -> str:
    middle = (TOP + height - BOTTOM) / 2
    across = text(x_label, (LEFT + WIDTH - RIGHT) / 2, height - 8, "middle")
    up = text(y_label, 14, middle, "middle", transform=f"rotate(-90 14 {middle:g})") if y_label else ""
    return across + up
