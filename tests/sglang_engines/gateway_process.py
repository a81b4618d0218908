"""A gateway over three SGLang engines as a user runs it, and what can be seen of it from outside."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_bench import command


@dataclass(frozen=True)
class GatewayProcess:
    url: str
    token: str
    run: Path

    def metrics(self) -> Counter[str]:
        """Every sample of `/metrics` by its name and labels, once no request is in service."""
        while (samples := self._samples())["prorsa_requests_in_flight"]:
            time.sleep(0.05)
        return samples

    def _samples(self) -> Counter[str]:
        lines = [line for line in self._ask("/metrics").decode().splitlines() if not line.startswith("#")]
        return Counter({name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)})

    def set_roles(self, prefill: int, decode: int) -> list[dict[str, Any]]:
        """The flips that it took."""
        flips: list[dict[str, Any]] = json.loads(
            self._ask("/prorsa/roles", json.dumps({"prefill": prefill, "decode": decode}).encode())
        )["flips"]
        return flips

    def engines(self) -> list[dict[str, Any]]:
        engines: list[dict[str, Any]] = json.loads(self._ask("/prorsa/engines"))["engines"]
        return engines

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request) as answer:
            data: bytes = answer.read()
        return data


@contextmanager
def gateway_process(directory: Path, model: Path) -> Iterator[GatewayProcess]:
    """With one prefill and two decode engines, which nothing but the test flips."""
    overrides = (f"model.path={model}", "policy.name=static", "policy.horizon=3600", "gateway.port=0")
    with command("serve", directory, "gateway.json", *overrides) as address:
        told = json.loads(address.read_text())
        yield GatewayProcess(told["url"], Path(told["admin_token_file"]).read_text().strip(), address.parent)


def total(samples: Counter[str], name: str) -> float:
    """Over all labels."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)
