"""Removing what hostile code has left, and knowing how much it is, whatever the tree looks like."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.rollout.sandboxes.directories import holds_more, remove_tree

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="flags that make a file unchangeable take root")


def deep(path: Path, levels: int) -> None:
    """Deeper than any path may be long."""
    path.mkdir()
    handle = os.open(path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("a name of some length", dir_fd=handle)
        inner = os.open("a name of some length", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    deep(tmp_path / "tree", 3000)
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_many_files_and_directories_are_removed(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / "tree" / f"d{number}").mkdir(parents=True)
        (tmp_path / "tree" / f"f{number}").touch()
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_permissions_do_not_stop_it(tmp_path: Path) -> None:
    """As the owner too, who is asked by them where he is not root."""
    inner = tmp_path / "tree" / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    for directory in (inner, inner.parent, inner.parent.parent):
        directory.chmod(0)
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


@ROOT_ONLY
def test_flags_do_not_stop_it(tmp_path: Path) -> None:
    inner = tmp_path / "tree" / "a"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (tmp_path / "tree" / "grows").touch()
    subprocess.run(["chattr", "+a", tmp_path / "tree" / "grows"], check=True)
    subprocess.run(["chattr", "+i", inner / "file", inner, tmp_path / "tree"], check=True)
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_what_a_link_points_at_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "directory").symlink_to(kept)
    (tree / "file").symlink_to(kept / "file")
    (tree / "nowhere").symlink_to("/nonexistent")
    os.mkfifo(tree / "pipe")
    remove_tree(tree)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept / "file").read_text() == "x"


NAMES = st.sampled_from(["a", "b", "-1", " ", "\n", "ü", "x" * 255, "00"])


@settings(deadline=None)
@given(st.lists(st.lists(NAMES, min_size=1, max_size=6), max_size=12))
def test_any_tree_is_removed_whatever_its_names(
    tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]]
) -> None:
    base = tmp_path_factory.mktemp("any")
    (base / "tree").mkdir()
    for path in paths:
        (base / "tree").joinpath(*path).mkdir(parents=True, exist_ok=True)
    remove_tree(base / "tree")
    assert list(base.iterdir()) == []


def test_it_stops_when_it_is_told_and_goes_on_later(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / "tree" / f"d{number}").mkdir(parents=True)
    answers = iter([True, True, False])
    with pytest.raises(OSError, match="stopped"):
        remove_tree(tmp_path / "tree", lambda: next(answers))
    assert len(list((tmp_path / "tree").iterdir())) == 8
    remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == []


def test_how_much_a_tree_holds(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    assert not holds_more(tmp_path, most_bytes=120_000, most_files=2)
    assert holds_more(tmp_path, most_bytes=90_000, most_files=2)
    assert holds_more(tmp_path, most_bytes=120_000, most_files=1)
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 40)
    assert not holds_more(tmp_path, most_bytes=120_000, most_files=3)


def test_a_tree_that_is_too_deep_to_look_into_holds_too_much(tmp_path: Path) -> None:
    deep(tmp_path / "tree", 300)
    assert holds_more(tmp_path, most_bytes=1 << 30, most_files=10_000)
    remove_tree(tmp_path / "tree")
