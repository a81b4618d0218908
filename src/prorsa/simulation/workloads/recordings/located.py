"""Where in a file a value is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prorsa.simulation.workloads.recordings.fields import Wrong


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the place before the message of a `Wrong` that is raised inside."""
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{where}: {error}") from None
