"""Forms of the log: lines for readers, or a JSON object a line for machines.

Invariant: what a client sent cannot look like another line, or steer the terminal that shows it.
"""

from __future__ import annotations

import json
import logging
import time

FIELDS = ("endpoint", "status", "seconds", "trajectory", "turn", "prompt_tokens", "output_tokens")
"""What a request's line says beside its message; a record has the ones that it knows."""


def printable(text: str) -> str:
    """`text` on one line; characters that control or format, and halves of characters, are escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return printable(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802
        """Its lines are indented: none looks like the beginning of another record."""
        lines = super().formatException(ei).split("\n")  # type: ignore[arg-type]
        return "\n".join("  " + printable(line) for line in lines)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        written = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {
            "time": written,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
