"""`scripts/mutations.py` can be made on this source, and the list of promises names tests and mutations that there are."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts/mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_mutation_fits_the_source(mutations: ModuleType) -> None:
    """Each text stands exactly once in its file, the changed file is Python, and the tests named exist."""
    for mutation in mutations.MUTATIONS:
        for edit in mutation.edits:
            text = (ROOT / "src/prorsa" / edit.file).read_text()
            assert text.count(edit.before) == 1, f"{mutation.name}: {edit.before}"
            compile(text.replace(edit.before, edit.after), edit.file, "exec")
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file(), test


def test_every_promise_has_a_mutation(mutations: ModuleType) -> None:
    assert {mutation.promise for mutation in mutations.MUTATIONS} == set(range(1, 13))
    assert len({mutation.name for mutation in mutations.MUTATIONS}) == len(mutations.MUTATIONS)


def test_a_text_that_is_gone_is_told(mutations: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src/prorsa").mkdir(parents=True)
    (tmp_path / "src/prorsa/a.py").write_text("x = 1\n")
    with pytest.raises(mutations.Unusable, match=r"src/prorsa/a.py has 0 times 'y = 2'"):
        mutations.make([mutations.Edit("a.py", "y = 2", "y = 3")], tmp_path)


LISTED = (ROOT / "docs/reliability.md").read_text()


def test_every_test_that_the_list_of_promises_names_exists() -> None:
    named = set(re.findall(r"`(\w+/test_\w+\.py)(?:::(\w+))?`", LISTED))
    assert len(named) > 50
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not test or re.search(rf"^ *(async )?def {test}\(|^{test} = ", path.read_text(), re.MULTILINE), test


def test_the_list_of_promises_has_every_mutation_with_its_promise(mutations: ModuleType) -> None:
    sections = dict(re.findall(r"^## (\d+)\. (.*?)(?=^## )", LISTED, re.MULTILINE | re.DOTALL))
    assert [int(number) for number in sections] == list(range(1, 13))
    for number, text in sections.items():
        told = re.findall(r"`([\w-]+)`", text.partition("- Mutations: ")[2])
        assert told == [one.name for one in mutations.MUTATIONS if one.promise == int(number)]
    table = re.findall(r"^\| (\d+) \| ([\w-]+) \| ([^|]+) \| (.+) \|$", LISTED, re.MULTILINE)
    expected = [(str(one.promise), one.name, one.what) for one in mutations.MUTATIONS]
    assert [(promise, name, what) for promise, name, what, _ in table] == expected
    assert all(caught.startswith("`") for *_, caught in table)
