"""A run in which verl uses a stock part in place of one of ours is stopped, and says which and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorsa.integrations.verl.loaded import REMEDIES, NotLoaded, expected, mark, require
from prorsa.integrations.verl.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(str(tmp_path), str(tmp_path))


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_all_marks_pass(settings: Settings, mode: str) -> None:
    for point in expected(mode):
        mark(settings, point)
    require(settings, expected(mode))


@pytest.mark.parametrize("missing", expected("sync"))
def test_each_missing_point_is_named_with_its_remedy(settings: Settings, missing: str) -> None:
    for point in expected("sync"):
        if point != missing:
            mark(settings, point)
    with pytest.raises(NotLoaded) as error:
        require(settings, expected("sync"))
    assert str(error.value) == f"verl has not loaded Prorsa's {REMEDIES[missing]}"


def driver_check(code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The driver's check in a fresh process, as the trainer makes it, after `code`."""
    return subprocess.run(
        [sys.executable, "-c", f"{code}\nfrom prorsa.integrations.verl.main import check_plugin; check_plugin()"],
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def test_the_driver_finds_the_plugin() -> None:
    checked = driver_check(VERL_PLATFORM="cpu")
    assert checked.returncode == 0, checked.stderr


def test_the_driver_notices_a_plugin_that_verl_does_not_look_for() -> None:
    checked = driver_check(VERL_USE_EXTERNAL_PLUGINS="none")
    assert checked.stderr.splitlines()[-1] == (
        "prorsa.integrations.verl.loaded.NotLoaded: verl has not loaded Prorsa's " + REMEDIES["plugin"]
    )


def test_the_driver_shows_the_error_of_a_plugin_that_failed() -> None:
    broken = "import sys; sys.modules['prorsa.integrations.verl.platform_cpu'] = None"
    checked = driver_check(broken, VERL_PLATFORM="cpu")
    assert checked.returncode != 0
    assert "platform_cpu" in checked.stderr.splitlines()[-1]
