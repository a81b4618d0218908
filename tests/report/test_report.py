"""The page and the picture: complete, self-contained, and there for any run directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from prorsa.lifecycle import Sampled, Tracker
from prorsa.report import write_picture, write_report
from prorsa.report.measures import forecast_errors, replay, totals
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import read_run
from prorsa.report.svg import Scale, Series, line_chart, nice_ticks, number

SECTIONS = (
    "Reward",
    "Roles over time",
    "Prefill share",
    "Prefill forecast against what happened",
    "Decode admission forecast against what happened",
    "Cumulative tokens",
    "Inter-token latency",
    "Trajectories",
)
SVG = "{http://www.w3.org/2000/svg}"


def charts_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_complete_run_has_every_chart_and_its_figures(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    path = write_report(directory)
    assert path == directory / "report.html"
    page = path.read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == list(SECTIONS)
    assert len(charts_of(page)) == len(SECTIONS)
    run = read_run(directory)
    replayed = replay(run)
    summed, errors = totals(run, replayed), forecast_errors(replayed.windows)
    assert f"<b>{summed.done}</b><span>trajectories finished of 64; {summed.dropped} dropped" in page
    assert f"<b>{run.steps[0].reward:.2f} → {run.steps[-1].reward:.2f}</b>" in page
    assert f"<b>{len(run.flips)}</b><span>role flips, 0 failed" in page
    assert "<b>0</b><span>tokens lost" in page
    assert f"<b>{errors.prefill:.1%}</b><span>WAPE of the prefill forecast" in page
    assert f"{errors.persistence_admitted:.1%}." in page
    assert "Incomplete" not in page


def test_the_page_loads_nothing(synthetic: Callable[..., Path]) -> None:
    page = write_report(synthetic()).read_text()
    assert re.findall(r"<(?:script|link|img|iframe)|(?:src|href)=|@import|url\(", page) == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_roles_chart_shows_every_instance_from_the_start_to_the_end(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    run = read_run(directory)
    roles = charts_of(write_report(directory).read_text())[SECTIONS.index("Roles over time")]
    bars = [rect for rect in roles.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    # Without a flip an instance is one bar; each flip adds the flip itself and the new role.
    assert len(bars) == 4 + 2 * len(run.flips)
    rows: dict[str, float] = {}
    for bar in bars:
        rows[bar.attrib["y"]] = rows.get(bar.attrib["y"], 0.0) + float(bar.attrib["width"])
    assert list(rows.values()) == pytest.approx([960 - 78 - 18] * 4, abs=3.0)


@pytest.mark.parametrize("until", [100.0, 100.2, 101.0, 104.0])
def test_a_run_that_stopped_anywhere_has_a_report(synthetic: Callable[..., Path], until: float) -> None:
    page = write_report(synthetic(until=until)).read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == list(SECTIONS)
    for chart in charts_of(page):
        assert "nan" not in ElementTree.tostring(chart, encoding="unicode")


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    RunRecorder(tmp_path / "run").close()
    page = write_report(tmp_path / "run").read_text()
    assert page.count("nothing to show here") == len(SECTIONS)


def test_a_cut_off_trace_is_named_on_the_page(synthetic: Callable[..., Path]) -> None:
    directory = synthetic()
    trace = directory / "trace"
    trace.write_bytes(trace.read_bytes()[:-20])
    page = write_report(directory).read_text()
    assert "Incomplete: " in page
    assert "the file ends within this line" in page


def test_names_are_text_never_markup(tmp_path: Path) -> None:
    with RunRecorder(tmp_path / "run", "name: <script>alert(1)</script>\n") as recorder:
        tracker = Tracker()
        recorder.transition(tracker.apply(Sampled(0.0, "<b>t</b>", "g", "x")))
        recorder.transition(tracker.apply(Sampled(1.0, '"&', "g", "x")))
    page = write_report(tmp_path / "run").read_text()
    assert "<script>" not in page
    assert "<b>t</b>" not in page
    assert "&lt;script&gt;" in page


def test_the_picture_is_one_svg_file_with_its_own_style(synthetic: Callable[..., Path], tmp_path: Path) -> None:
    path = write_picture(synthetic(), tmp_path / "run.svg")
    root = ElementTree.fromstring(path.read_text())
    assert root.tag == f"{SVG}svg"
    titles = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "title"]
    assert titles[0] == "Roles over time"
    assert len(titles) == 3
    assert "prefers-color-scheme:dark" in path.read_text()


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    RunRecorder(tmp_path / "run").close()
    with pytest.raises(ValueError, match="give a run that got further"):
        write_picture(tmp_path / "run", tmp_path / "run.svg")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 13_400.0, [0, 5_000, 10_000]),
        (95.0, 107.0, [96, 98, 100, 102, 104, 106]),
        (3.0, 3.0, [3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0, 0.05, 7, 999, 1500, 20_000, 3_210_000)] == [
        "0",
        "0.05",
        "7",
        "999",
        "1.5k",
        "20k",
        "3.21M",
    ]


def test_a_line_goes_through_its_points() -> None:
    chart = line_chart([Series("s", "prefill", [0.0, 5.0, 10.0], [0.0, 4.0, 2.0])], "x", "y", height=278, y_top=4.0)
    path = [p for p in ElementTree.fromstring(chart.svg()).iter(f"{SVG}path") if "L" in p.attrib["d"]][-1]
    # The plot spans x 78..942 and y 234 (0) .. 34 (4).
    assert path.attrib["d"] == "M78.0 234.0L510.0 34.0L942.0 134.0"


def test_a_log_scale_spaces_decades_evenly() -> None:
    scale = Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])
    assert scale.ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100])
