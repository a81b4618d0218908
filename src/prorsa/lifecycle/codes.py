"""Codes of the names in a trace, of which the writer remembers the latest."""

from __future__ import annotations

from collections.abc import Iterable

REMEMBERED = 32_768
"""Names whose codes are known at least; twice as many are in memory: some 8 MB."""


class NameCodes:
    """A name gets the next number, from 0. One that was not asked for in a long time is forgotten, and gets another number
    when it comes again."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """`names` have their numbers already."""
        self._latest: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self.next = 0
        """The number of the next new name."""
        for name in names:
            self.add(name)

    def get(self, name: str) -> int | None:
        code = self._latest.get(name)
        if code is None and (code := self._before.get(name)) is not None:
            self._remember(name, code)
        return code

    def add(self, name: str) -> None:
        self._remember(name, self.next)
        self.next += 1

    def _remember(self, name: str, code: int) -> None:
        if len(self._latest) >= REMEMBERED:
            self._before, self._latest = self._latest, {}
        self._latest[name] = code
