"""A run in which verl uses a stock part in place of one of ours is stopped, and says which and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorsa.integrations.verl import main
from prorsa.integrations.verl.loaded import REMEDIES, NotLoaded, expected, mark, refuse, require
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


def test_the_driver_finds_the_plugin_that_import_verl_loads() -> None:
    refuse(main.missing_here())


def test_the_driver_notices_a_plugin_that_did_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    monkeypatch.delitem(RolloutReplicaRegistry._registry, "prorsa")
    with pytest.raises(NotLoaded, match=r"entry point prorsa of the group verl\.plugins: install prorsa"):
        refuse(main.missing_here())


def test_the_driver_notices_a_missing_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setattr(PlatformRegistry, "_platforms", {})
    with pytest.raises(NotLoaded, match="platform cpu: set VERL_PLATFORM=cpu"):
        refuse(main.missing_here())
