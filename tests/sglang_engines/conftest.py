from __future__ import annotations

from collections.abc import Iterator

import pytest
from sglang_bench import Served, launched


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three engines that the tests of this directory share; each test puts them into the roles that it needs."""
    with launched(tmp_path_factory.mktemp("engines")) as engines:
        yield engines
