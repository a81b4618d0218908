"""Policies side by side: the figures by hand, and the page and the JSON as a reader gets them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from test_analysis import documented

from prorsa.forecast import Forecast, Measured
from prorsa.report.comparison import Comparison, PolicyOutcome, RoleCount, figures, to_json, write_json, write_page
from prorsa.report.measures import Window
from prorsa.report.volumes import Volume, distribution


def forecast(time: float, prefill: float, admitted: float) -> Forecast:
    return Forecast(time, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, prefill, admitted, 0.0, 0.0)


def window(time: float, made: float, persisted: float, measured: float) -> Window:
    return Window(
        forecast(time, made, made / 2),
        forecast(time, persisted, persisted / 2),
        Measured(measured, measured / 2, 0.0, 0.0, 0.0),
    )


ADAPTIVE = PolicyOutcome(
    name="adaptive",
    step_s=(40.0, 60.0),
    trajectory_s=distribution([10.0, 20.0, 30.0]),
    done=3,
    dropped=1,
    replaced_groups=0,
    output_tokens=9000,
    output_tokens_per_s=90.0,
    interference_idle=0.0,
    imbalance_idle=0.125,
    itl_p50=0.02,
    itl_p99=0.05,
    itl_over_time=((5.0, 0.02), (15.0, 0.03)),
    roles=(RoleCount(0.0, 4, 4, 0), RoleCount(50.0, 3, 5, 0)),
    flips=1,
    resends=2,
    windows=(window(0.0, 90.0, 0.0, 100.0), window(10.0, 220.0, 100.0, 200.0)),
    step_volumes=(Volume(0.0, 40.0, 4000.0, 400.0, 400.0), Volume(50.0, 110.0, 6000.0, 800.0, 1200.0)),
    window_volumes=(Volume(0.0, 10.0, 4000.0, 400.0, 0.0), Volume(10.0, 20.0, 6000.0, 800.0, 1600.0)),
    kv_use=((0.0, 0.25), (10.0, 0.75)),
)
COLOCATED = replace(
    ADAPTIVE, name="colocated", step_s=(100.0, 150.0), roles=(RoleCount(0.0, 0, 0, 8),), flips=0, windows=(), kv_use=()
)
BOTH = Comparison("two <policies>", (COLOCATED, ADAPTIVE), ("a note",))


def test_figures_by_hand() -> None:
    rows = {row[0]: row[1:] for row in figures(BOTH) if not row[0].startswith(" ")}
    assert rows["rollout of a step, s"] == ["125", "50"]
    assert rows["speed-up"] == ["1.00x", "2.50x"]
    assert rows["trajectory mean, s"] == ["20", "20"]
    assert rows["inter-token latency p99, ms"] == ["50", "50"]
    assert rows["WAPE of prefill"] == ["-", "10.0%"], "(10 + 20) / 300"
    assert rows["prefill:decode, full prompts"] == ["6.25", "6.25"]
    assert rows["prefill:decode, uncached"] == ["0.75", "0.75"]
    assert rows["KV use of decode, mean"] == ["-", "50.0%"]
    assert rows["KV use of decode, peak"] == ["-", "75.0%"]
    assert ADAPTIVE.ratio_spread == 2.0, "10 in the first step, 5 in the second"
    assert ADAPTIVE.errors is not None
    assert ADAPTIVE.errors.persistence_prefill == pytest.approx(200 / 300)


def test_the_table_shows_every_policy() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(BOTH)
    text = console.export_text()
    assert re.search(r"colocated +adaptive", text)
    assert re.search(r"speed-up +1.00x +2.50x", text)
    assert "a note" in text


def test_every_number_of_the_json_is_documented(tmp_path: Path) -> None:
    unknown = replace(COLOCATED, itl_p50=math.nan, step_s=())
    read = json.loads(write_json(Comparison("c", (COLOCATED, ADAPTIVE, unknown)), tmp_path / "c.json").read_text())
    assert documented(read, set()) == set()
    assert [outcome["speed_up"] for outcome in read["outcomes"]] == [1.0, 2.5, None]
    assert read["outcomes"][2]["itl_p50"] is None
    assert read["outcomes"][1]["windows"][1] == {
        "time": 10.0,
        "horizon": 10.0,
        "prefill": {"forecast": 220.0, "persistence": 100.0, "measured": 200.0},
        "admitted": {"forecast": 110.0, "persistence": 50.0, "measured": 100.0},
    }
    assert read["outcomes"][1] == to_json(BOTH)["outcomes"][1] | {
        "roles": [
            {"time": 0.0, "prefill": 4, "decode": 4, "mixed": 0},
            {"time": 50.0, "prefill": 3, "decode": 5, "mixed": 0},
        ],
        "itl_over_time": [[5.0, 0.02], [15.0, 0.03]],
    }


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    page = write_page(BOTH, tmp_path / "report.html").read_text()
    charts = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 10, "7 of all policies, 3 of the one that changes roles"
    assert not any("nan" in ElementTree.tostring(chart, encoding="unicode") for chart in charts)
    assert "<b>2.50x</b>" in page
    assert "two &lt;policies&gt;" in page
    assert re.findall(r"<(?:script|link|img|iframe)|(?:src|href)=|@import|url\(", page) == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_run_in_which_nothing_was_decoded_has_a_page(tmp_path: Path) -> None:
    empty = PolicyOutcome(
        "empty", (), distribution([]), 0, 0, 0, 0, 0.0, 0.0, 0.0, math.nan, math.nan, (), (), 0, 0, (), (), (), ()
    )
    page = write_page(Comparison("none", (empty,)), tmp_path / "report.html").read_text()
    assert "There is nothing to show here" in page
    assert "nan" not in page


def test_more_steps_than_bars_fit_are_lines(tmp_path: Path) -> None:
    many = Comparison("many", (replace(COLOCATED, step_s=(100.0,) * 30), replace(ADAPTIVE, step_s=(50.0,) * 20)))
    page = write_page(many, tmp_path / "report.html").read_text()
    steps = re.search(r"<h2>Rollout time by step</h2>(<svg.*?</svg>)", page, re.DOTALL)
    assert steps is not None
    assert "step 30" not in steps[1]
    assert steps[1].count("<path") == 4, "a line and its swatch for each"
