"""Names that somebody else chose, in tools, tasks, trajectories, files and directories: text wherever they are shown."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table

from prorsa.cli import main, runs
from prorsa.cli.common import PlainConsole, say
from prorsa.config import load_config
from prorsa.lifecycle import TraceWriter
from prorsa.lifecycle import events as e
from prorsa.report.analysis import analyse
from prorsa.report.legible import escape, legible, shortened

EXAMPLE = Path(__file__).parents[1] / "examples" / "check.yaml"
NAMES = [
    "[/bash]",
    "[bash]",
    "[red]x[/red]",
    ":smile:",
    "run \ud83d",
    "\udcff",
    "\x1b[31mred\x1b]0;title\x07",
    "\x9b2J",
    "a\nb\r\tc",
    "\u202egnp.exe",
    "\u2028\ufeff",
    "<script>&\"'",
    "]]>",
    "n" * 5000,
    "",
    "\\",
]
VISIBLE = [name for name in NAMES if name.isprintable() and 0 < len(name) < 100]
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


def events(name: str, number: int, tool: str, task: str) -> list[e.Event]:
    group = f"{number} {name}"
    return [
        e.Sampled(0.0, f"{number}{name}", group, task, 0, 10),
        e.SandboxStarting(0.0, f"{number}{name}", e.SandboxMode.COLD, name, name),
        e.Ready(1.0, f"{number}{name}", 10),
        e.PrefillStarted(1.0, f"{number}{name}", name),
        e.DecodeStarted(2.0, f"{number}{name}", name),
        e.ToolStarted(3.0, f"{number}{name}", tool, 20),
        e.Ready(4.0, f"{number}{name}", 15, 10),
        e.PrefillStarted(4.0, f"{number}{name}", name),
        e.DecodeStarted(5.0, f"{number}{name}", name),
        e.RewardStarted(6.0, f"{number}{name}", 20),
        e.Done(7.0, f"{number}{name}", 1.0, True),
    ]


def trace(path: Path) -> Path:
    """A trajectory for each name, which is that of its task, tool, group, image and instance too."""
    with TraceWriter(path) as writer:
        for number, name in enumerate(NAMES):
            for event in events(name, number, name, name):
                writer.write(event)
        for event in events("dropped", 99, "t", "t")[:3]:
            writer.write(event)
        writer.write(e.Dropped(9.0, "99dropped", "\x1b[31m[/bash]<b>\ud83d"))
    return path


def place(directory: Path) -> Path:
    """A directory with a name to fear."""
    made = directory / "[/x] [red]\x1b[31m:smile:"
    made.mkdir(parents=True)
    return made


def checked_page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    assert not UNSAFE.search(text)
    assert "<script>&" not in text
    assert "<b>" not in text.replace("<b>", "", text.count('"><b>'))
    return text


def test_analyze(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page, numbers = trace(place(tmp_path) / "trace"), tmp_path / "[/p].html", tmp_path / "[n].json"
    assert main(["analyze", str(path), "--out", str(page), "--json", str(numbers)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert not UNSAFE.search(printed.out)
    for name in VISIBLE:
        assert name in printed.out
    assert str(page) in printed.out
    assert str(numbers) in printed.out
    assert r"\x1b[31mred" in printed.out
    # Every number is there under the very name.
    assert set(json.loads(numbers.read_text())["tools"]) == set(NAMES)
    checked_page(page)


def test_a_report_and_its_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place(tmp_path)
    trace(run / "trace")
    (run / "config.yaml").write_text(
        yaml.safe_dump({"name": "[/run] \x1b[31m", "policy": {"name": "[/p]", "horizon": 1}})
    )
    instances = [{"time": 0.0, "name": name, "role": "mixed", "state": "routed"} for name in NAMES]
    (run / "instances.jsonl").write_text("".join(json.dumps(line) + "\n" for line in instances))
    flip = {"time": 2.0, "instance": "[/e]\ud83d<b>", "before": "mixed", "after": "decode", "cancelled": 0}
    flip |= {"drain_s": 0.0, "flip_s": 0.0, "failure": "\x1b[31m<b>", "relaunched": False}
    (run / "flips.jsonl").write_text(json.dumps(flip) + "\n")
    (run / "steps.jsonl").write_text("[/broken\n")
    picture = tmp_path / "[/picture].svg"
    assert main(["report", str(run), "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert not UNSAFE.search(printed)
    assert str(picture) in printed
    assert legible(f"{run / 'report.html'}") in printed
    checked_page(run / "report.html")
    ElementTree.parse(picture)


def scenario(directory: Path) -> Path:
    (directory / "tiny.csv").write_text(
        "phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms\nprefill,500,0,100,0,0,0,0\ndecode,1,0,10,0,0,0,0\n"
    )
    profile = {"name": "[/tiny]", "model": "none", "gpu": "none", "source": "made up", "gpus": 1, "ranks": 1}
    profile |= {"grid": "tiny.csv", "chunk": 500, "kv_tokens": 100000, "kv_bytes": 1000, "max_running": 16}
    profile |= {"network_bytes_per_s": 1e6, "store_bytes_per_s": 1e9, "flip_s": 1, "update_s": 2}
    (directory / "[tiny].yaml").write_text(yaml.safe_dump(profile))
    told = {
        "name": "[/scenario] \x1b[31m",
        "hardware": {"profile": str(directory / "[tiny].yaml"), "gpus": 2},
        "workload": {"name": "trace", "path": str(trace(directory / "trace")), "max_context": 4096},
        "rollout": {"groups": 4, "group_size": 1, "steps": 1},
        "policies": {"[/one]": {"name": "colocated"}, "[two]": {"name": "static"}},
    }
    (directory / "scenario.yaml").write_text(yaml.safe_dump(told))
    return directory / "scenario.yaml"


def test_simulate_and_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = place(tmp_path)
    told = scenario(directory)
    page, numbers = directory / "page.html", directory / "numbers.json"
    asked = ["simulate", str(told), "--out", str(page), "--json", str(numbers), "--workers", "1"]
    assert main([*asked, "--record", str(directory / "runs")]) == 0
    printed = capsys.readouterr().out
    assert not UNSAFE.search(printed)
    for shown in ("[/one]", "[two]", r"[/scenario] \x1b[31m", legible(str(page)), legible(str(numbers))):
        assert shown in printed
    checked_page(page)
    assert main(["simulate", str(told), "--dry-run"]) == 0
    assert not UNSAFE.search(capsys.readouterr().out)
    asked = ["plan", "--trace", str(directory / "trace"), "--profile", str(directory / "[tiny].yaml"), "--gpus", "2"]
    assert main([*asked, "--seeds", "2", "--concurrency", "4", "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "[tiny].yaml" in printed
    assert not UNSAFE.search(printed)


@pytest.mark.parametrize("name", ["[/x]", "[red]y", ":smile:", "\x1b[31m"])
def test_a_run_directory_is_told_as_it_is(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(str(EXAMPLE), [f"run_dir={json.dumps(str(tmp_path / name))}"])
    run = runs.begin(config)
    assert run.parent == tmp_path / name
    assert capsys.readouterr().out == f"run directory {legible(str(run))}\n"


@pytest.mark.engine
def test_a_rollout_into_such_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "[/x]"
    command = [sys.executable, "-m", "prorsa.cli", "rollout", str(EXAMPLE), f"run_dir={directory}", "rollout.steps=1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    [run] = directory.iterdir()
    assert done.stdout.startswith(f"run directory {run}\n")
    assert f"report {run / 'report.html'}\n" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "/none/[/x]\x1b[31m\udcff"],
        ["trace", "/none/[/x]\x1b[31m", "no-such-trace"],
        ["report", "/none/[/x]\x1b[31m"],
        ["simulate", "/none/[/x]\x1b[31m.yaml"],
        ["simulate", "deepseek-v3.2-general-agent", "--policy", "[/x]\x1b[31m"],
        ["plan", "--trace", "/none/[/x]\x1b[31m", "--profile", "qwen3-235b-h200-ep4", "--gpus", "8"],
        ["rollout", "/none/[/x]\x1b[31m.yaml"],
        ["verify", "/none/[/x]\x1b[31m"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_an_error_is_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert r"[/x]\x1b[31m" in told
    assert not UNSAFE.search(told)


def test_arguments_that_are_not_understood_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze", "x", "--\x1b[31m"])
    assert r"unrecognized arguments: --\x1b[31m" in capsys.readouterr().err


def test_what_a_terminal_cannot_show_is_an_escape(tmp_path: Path) -> None:
    path = trace(tmp_path / "trace")
    command = [sys.executable, "-m", "prorsa.cli", "analyze", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert b"[/bash]" in done.stdout


@given(st.text() | st.sampled_from(NAMES))
def test_any_name_is_legible(name: str) -> None:
    shown = legible(name)
    assert not UNSAFE.search(shown)
    assert "\n" not in shown
    shown.encode()
    assert legible(shown) == shown
    assert len(shortened(name, 20)) <= 20
    ElementTree.fromstring(f"<t a='{escape(name)}'>{escape(name)}</t>")
    file = io.StringIO()
    console = PlainConsole(file=file, width=10_000, force_terminal=False)
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    console.print(name, soft_wrap=True, highlight=False)
    console.print(table)
    assert not UNSAFE.search(file.getvalue())
    assert file.getvalue().startswith(legible(name, lines=True))


def test_a_plain_text_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert legible("naïve 中文 😀 [a] :b: 'c'") == "naïve 中文 😀 [a] :b: 'c'"
    say("path /tmp/[red]/:smile: " + "x" * 300)
    assert capsys.readouterr().out == "path /tmp/[red]/:smile: " + "x" * 300 + "\n"


def test_an_analysis_prints_on_any_console(tmp_path: Path) -> None:
    file = io.StringIO()
    Console(file=file, width=200).print(analyse(trace(tmp_path / "trace")))
    assert not UNSAFE.search(file.getvalue())
    assert "[/bash]" in file.getvalue()
