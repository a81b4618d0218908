"""Logs for machines: one JSON object a line."""

from __future__ import annotations

import json
import logging
import time

FIELDS = ("endpoint", "status", "seconds", "trajectory", "turn", "prompt_tokens", "output_tokens")
"""What a request's line says beside its message; a record has the ones that it knows."""


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
        return json.dumps(line, ensure_ascii=False)
