"""`prorsa analyze`: the command, its page and its JSON, on a run directory and on a bare trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from prorsa.cli import main
from prorsa.lifecycle import Ready, Sampled, TraceWriter
from prorsa.report.analysis import analyse, to_json
from prorsa.report.characterise import PARTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "analysis.md"


def keys(value: Any, data: set[str]) -> Iterator[str]:
    """Every key; what stands below a key in `data` is a name of the run's own."""
    if isinstance(value, list):
        for item in value:
            yield from keys(item, data)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys(list(item.values()) if key in data else item, data)


def documented(value: Any, data: set[str]) -> set[str]:
    """The keys that the page of documentation lacks."""
    text = DOCUMENT.read_text()
    return {key for key in keys(value, data) if f"`{key}`" not in text}


def test_a_run_directory_and_its_bare_trace(synthetic: Callable[..., Path], tmp_path: Path) -> None:
    directory = synthetic(groups=4, steps=2)
    run, trace = analyse(directory, 1.0), analyse(directory / "trace", 1.0)
    assert (run.described.cache, trace.described.cache) == ("measured", "ideal")
    assert (len(run.described.steps), len(trace.described.steps)) == (2, 1)
    assert run.described.total.prompt_tokens == trace.described.total.prompt_tokens
    assert run.described.trajectories == trace.described.trajectories
    assert trace.described.reuse.uncached_tokens == run.described.reuse.ideal_tokens


def test_the_command_prints_and_writes(
    synthetic: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, numbers, page = synthetic(), tmp_path / "numbers.json", tmp_path / "page.html"
    assert main(["analyze", str(directory), "--step-windows", "0.5", "--json", str(numbers), "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    for title in ("Trajectories that are done", "Tool times, s", "Prefix reuse", "in windows of 0.5 s"):
        assert title in printed
    read = json.loads(numbers.read_text())
    assert read == to_json(analyse(directory, 0.5))
    assert list(read["time"]) == list(PARTS)
    assert documented(read, {"tasks", "time", "tools"}) == set()
    windows = read["steps"][0]["windows"]
    assert windows[0]["seconds"] == pytest.approx(0.5)
    assert windows[3]["ratio"] == windows[3]["prompt_tokens"] / windows[3]["decoded_tokens"]


def test_the_page_is_whole_and_loads_nothing(synthetic: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["analyze", str(synthetic()), "--step-windows", "1", "--out", str(path)]) == 0
    page = path.read_text()
    charts = [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 5
    assert not any("nan" in ElementTree.tostring(chart, encoding="unicode") for chart in charts)
    assert re.findall(r"<(?:script|link|img|iframe)|(?:src|href)=|@import|url\(", page) == []
    assert set(re.findall(r"https?://[^\"' <]+", page)) == {"http://www.w3.org/2000/svg"}


def test_a_trace_that_ends_within_a_line_is_described_up_to_there(
    synthetic: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.write_bytes((synthetic() / "trace").read_bytes()[:-20])
    assert main(["analyze", str(cut), "--out", str(tmp_path / "page.html")]) == 0
    assert "the file ends within this line" in " ".join(capsys.readouterr().out.split())
    assert "Incomplete: " in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("until", [100.1, 100.2, 101.0])
def test_a_run_that_stopped_anywhere_can_be_analysed(
    synthetic: Callable[..., Path], until: float, tmp_path: Path
) -> None:
    assert main(["analyze", str(synthetic(until=until)), "--out", str(tmp_path / "page.html")]) == 0


def test_bad_input_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no trace\n")
    with TraceWriter(tmp_path / "empty"):
        pass
    with TraceWriter(tmp_path / "impossible") as trace:
        trace.write(Sampled(1.0, "a", "g", "x"))
        trace.write(Ready(0.5, "a", 10))
    for name, words in (
        ("nothing", "no such run directory or trace"),
        (".", "it has no 'trace'; give a run directory or a trace file"),
        ("text", "not a trace, it does not start with 'prorsa-trace'"),
        ("empty", "there is no event to describe"),
        ("impossible", "event 2, .*its time is before the trajectory's last event, 1.0"),
    ):
        assert main(["analyze", str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(words, line)


def test_an_output_that_cannot_be_written_is_status_2(
    synthetic: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(synthetic()), "--json", str(tmp_path / "no" / "such.json")]) == 2
    assert "such.json" in capsys.readouterr().err


@pytest.mark.parametrize("window", ["0", "-1", "inf", "nan", "x"])
def test_windows_have_a_length(window: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", "run", f"--step-windows={window}"])
    assert stopped.value.code == 2
    assert "--step-windows" in capsys.readouterr().err
