"""Requests that a browser makes for a page that is not ours.

A page can point a name of its own at this server (DNS rebinding): its requests then count as its own in the browser, and
their `Host` is that name. So `Host` must be an address, `localhost`, or a name that is this machine's or is configured. Its
port is not looked at: tunnels and containers change it. Any other page shows itself by `Sec-Fetch-Site` or `Origin`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from prorsa.gateway.errors import ApiError

FOREIGN = ("cross-site", "same-site")
"""Pages of other sites, and of other ports or names of this one."""


class Hosts:
    def __init__(self, host: str, allowed: Sequence[str]) -> None:
        """`host`: what the gateway listens at; `allowed`: further names."""
        machine = socket.gethostname()
        names = ("localhost", host, machine, machine.partition(".")[0], *allowed)
        self._names = {name.lower().rstrip(".") for name in names}

    def check(self, request: web.Request) -> None:
        """Raises `ApiError` (403)."""
        given = request.headers.getall("Host", [])
        if len(given) > 1 or not all(self._ours(host) for host in given):
            problem = "is no name of this server; add it to gateway.allowed_hosts, or use its address"
            raise ApiError(403, f"Host={', '.join(given)!r}: {problem}")
        follows_link = request.method == "GET" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        if request.headers.get("Sec-Fetch-Site") in FOREIGN and not follows_link:
            raise ApiError(403, "requests that a page of another site makes are refused")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] not in given:
            raise ApiError(403, f"Origin={origin!r}: requests that a page of another site makes are refused")

    def _ours(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
