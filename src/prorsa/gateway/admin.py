"""The admin endpoints: what the cluster is and does, and orders to it. Each request needs the token.

    GET  /prorsa/status                     counts of everything
    GET  /prorsa/engines                    role, state and load of each engine
    GET  /prorsa/decisions?last=N           the last decisions with all their inputs, and the last flips
    POST /prorsa/roles                      {"prefill": 3, "decode": 1}: flip as many engines as that takes
    POST /prorsa/engines/NAME/flip          {"role": "decode"}
    POST /prorsa/engines/NAME/drain         out of service; what it serves goes on elsewhere
    POST /prorsa/engines/NAME/undrain       back into service

The policy goes on deciding: under `adaptive` its next decision may undo a flip. `static` would put its split back as well.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from aiohttp import web

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.observers import Flip
from prorsa.cluster.switcher import FlipRefused
from prorsa.engines.protocol import EngineError, Role
from prorsa.gateway import accepted, fields
from prorsa.gateway.bodies import read_body
from prorsa.gateway.errors import ApiError
from prorsa.gateway.keys import shows
from prorsa.report.rundir import dump_decision

DECISIONS = 20
"""How many are shown unless more are asked for."""


class Admin:
    def __init__(self, control: ControlPlane, token: str) -> None:
        self._control = control
        self._token = token

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/prorsa/status", self.status),
            web.get("/prorsa/engines", self.engines),
            web.get("/prorsa/decisions", self.decisions),
            web.post("/prorsa/roles", self.roles),
            web.post("/prorsa/engines/{name}/flip", self.flip),
            web.post("/prorsa/engines/{name}/drain", self.drain),
            web.post("/prorsa/engines/{name}/undrain", self.undrain),
        ]

    async def status(self, request: web.Request) -> web.Response:
        self._authorise(request)
        status = self._control.status()
        states = {state.name.lower(): count for state, count in status.states.items()}
        return web.json_response(asdict(status) | {"states": states})

    async def engines(self, request: web.Request) -> web.Response:
        self._authorise(request)
        return web.json_response({"engines": self._engines()})

    async def decisions(self, request: web.Request) -> web.Response:
        self._authorise(request)
        asked = request.query.get("last", str(DECISIONS))
        if not re.fullmatch("[1-9][0-9]{0,8}", asked):
            raise fields.wrong("last", asked, "must be a whole number of at least 1, and of at most 9 digits")
        last, made = int(asked), len(self._control.decisions)
        decisions = [dump_decision(decision, 0) for decision in self._control.decisions[-last:]]
        for decision in decisions:
            del decision["after_events"]  # that is of a run directory
        return web.json_response(
            {"made": made, "decisions": decisions, "flips": [asdict(flip) for flip in self._control.flips[-last:]]}
        )

    async def roles(self, request: web.Request) -> web.Response:
        self._authorise(request)
        body = await read_body(request)
        accepted.ROLES.check(body)
        prefill, decode, mixed = (fields.whole(body, name, 0, 0) or 0 for name in ("prefill", "decode", "mixed"))
        target, now = Allocation(prefill, decode, mixed), self._control.fleet.in_service
        if not now.total:
            raise ApiError(409, "every engine is out of service; there are no roles to set")
        if bool(prefill) != bool(decode) or target.total != now.total:
            remedy = (
                f"give prefill and decode at least one each, or mixed all; {now.total} in all: so many are in service"
            )
            raise fields.wrong("prefill, decode, mixed", [prefill, decode, mixed], remedy)
        if mixed != now.mixed and not all(Role.MIXED in instance.engine.roles for instance in self._control.fleet):
            raise ApiError(
                409, f"mixed={mixed}: {now.mixed} are, and these engines neither become mixed nor cease to be"
            )
        flips = await self._control.switcher.apply(target)
        return web.json_response({"flips": [asdict(flip) for flip in flips], "engines": self._engines()})

    async def flip(self, request: web.Request) -> web.Response:
        self._authorise(request)
        name, body = self._named(request), await read_body(request)
        accepted.FLIP.check(body)
        role = fields.typed(body, "role", str, "")
        if role not in list(Role):
            raise fields.wrong("role", role, "must be prefill, decode or mixed")
        flip = await self._obeyed(self._control.switcher.flip(name, Role(role)))
        return self._flipped(flip)

    async def drain(self, request: web.Request) -> web.Response:
        self._authorise(request)
        resent = await self._obeyed(self._control.switcher.take_out(self._named(request)))
        return web.json_response({"resent": resent, "engines": self._engines()})

    async def undrain(self, request: web.Request) -> web.Response:
        self._authorise(request)
        await self._obeyed(self._control.switcher.put_back(self._named(request)))
        return web.json_response({"engines": self._engines()})

    def _authorise(self, request: web.Request) -> None:
        if not shows(request, self._token):
            raise ApiError(401, "admin endpoints need the header `Authorization: Bearer TOKEN` with the admin token")

    def _named(self, request: web.Request) -> str:
        name = request.match_info["name"]
        names = [instance.name for instance in self._control.fleet]
        if name not in names:
            raise ApiError(404, f"engine={name!r}: there is none of that name; there are {', '.join(names)}", "engine")
        return name

    async def _obeyed(self, work: Any) -> Any:
        try:
            return await work
        except FlipRefused as error:
            raise ApiError(409, str(error)) from error
        except (EngineError, TimeoutError) as error:
            raise ApiError(502, str(error)) from error

    def _flipped(self, flip: Flip) -> web.Response:
        if flip.failure is not None:
            raise ApiError(502, f"engine {flip.instance}: {flip.failure}; it is taken out and restarted")
        return web.json_response({"flip": asdict(flip), "engines": self._engines()})

    def _engines(self) -> list[dict[str, Any]]:
        return [asdict(instance) for instance in self._control.status().instances]
