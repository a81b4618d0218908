"""A control plane over simulated engines that generate hashed tokens, for the tests of a whole simulated cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_bench import a_profile

from prorsa.allocation import Allocation, Policy, PrefillSpeed, Situation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.router import Limits
from prorsa.cluster.switcher import SwitchLimits
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, GenerateRequest, Role, SamplingParams
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle.events import Done, RewardStarted, Sampled, ToolStarted
from prorsa.profiles.profile import Profile
from prorsa.simulation.engines.cluster import SimulatedCluster, SimulatedEngine
from prorsa.simulation.workloads.pseudo_model import STOP, PseudoModel
from prorsa.simulation.workloads.scripts import Script, TurnScript

ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
GRID = """phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms
prefill,1,0,1,0,5,5,5
prefill,1,1000,1,0,5,5,5
prefill,101,0,101,0,5,5,5
prefill,101,1000,151,0,5,5,5
decode,1,0,2,0,5,5,5
decode,1,1024,4,0,5,5,5
decode,11,0,12,0,5,5,5
decode,11,1024,34,0,5,5,5
"""


def tiny(directory: Path, **changes: Any) -> Profile:
    """A prefill of 100 tokens takes 0.11 s, a decode step about 0.012 s. Written to `directory`."""
    (directory / "tiny.csv").write_text(GRID)
    fast: dict[str, Any] = {
        "directory": str(directory),
        "network_bytes_per_s": 100_000.0,
        "network_latency_s": 0.001,
        "flip_s": 0.4,
        "update_s": 0.5,
        "restart_s": 3.0,
    }
    return a_profile(**fast | changes)


@dataclass(frozen=True)
class Scripts:
    """Four turns whose lengths depend on the trajectory; members of a group share their first prompt."""

    name: str = "test"
    questions: int | None = None

    def script(self, question: int, seed: int) -> Script:
        lengths = [5 + (7 * seed + 13 * turn) % 60 for turn in range(4)]
        turns = [TurnScript(length, "tool", 0.1, 10 + length % 20) for length in lengths[:-1]]
        return Script(40 + 30 * (question % 5), (*turns, TurnScript(lengths[-1])))


def prompt_of(script: Script, question: int) -> tuple[int, ...]:
    return (question + 1, *range(100, 99 + script.prompt_tokens))


class Keep(Policy):
    def decide(self, situation: Situation) -> Allocation | None:
        return situation.current


class SimulatedBench:
    """Engines e0, e1, ... with the roles of its letters. As a context it stops the control plane and checks what is left."""

    def __init__(self, roles: str, prefill: Profile, decode: Profile | None = None, **cluster: Any) -> None:
        self.model = PseudoModel(Scripts(), hashed=True)
        self.cluster = SimulatedCluster(prefill, decode or prefill, self.model, **{"stream_s": 0.3} | cluster)
        engines = [self.cluster.start(f"e{index}", ROLES[letter]) for index, letter in enumerate(roles)]
        self.control = ControlPlane(
            engines,
            forecaster=LifecycleForecaster(None, 100.0),
            policy=Keep(),
            speed=PrefillSpeed(100.0),
            horizon=1.0,
            restarter=self.cluster,
            limits=Limits(cancel_timeout=1.0, stall_timeout=60.0),
            switch_limits=SwitchLimits(idle_timeout=3.0, flip_timeout=5.0),
            health_limits=HealthLimits(interval=1.0, timeout=2.0),
        )
        self.turns = 0

    async def __aenter__(self) -> SimulatedBench:
        await self.control.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.control.stop()
        await asyncio.sleep(5.0)
        self.check_nothing_left()

    def engine(self, name: str) -> SimulatedEngine:
        return self.cluster.engines[name]

    def roles(self) -> str:
        """The routed roles in order of the instances; a dot for one that is not in service."""
        return "".join(
            instance.role.value[0].upper() if instance.state is InstanceState.ROUTED else "."
            for instance in self.control.fleet
        )

    def check_nothing_left(self) -> None:
        assert (self.control.router.live, self.control.router.waiting) == (0, 0)
        assert [instance for instance in self.control.fleet if instance.rids or instance.load] == []
        for engine in self.cluster.engines.values():
            assert not engine.core.jobs, f"{engine.name} still has requests"
        self.cluster.check()

    def ask(self, number: int, question: int, turn: int, context: tuple[int, ...], budget: int = 1000) -> TurnRequest:
        """Of trajectory `number`, which is also its seed."""
        sampling = SamplingParams(budget, stop_token_ids=(STOP,), seed=number)
        return TurnRequest(f"t{number}", turn, context, sampling)

    def check_result(self, request: TurnRequest, result: TurnResult) -> None:
        """It is what a run that nothing disturbs gives."""
        whole = GenerateRequest(f"{request.trajectory}.{request.turn}.0", request.input_ids, request.sampling)
        tokens, logprobs = self.model.stream(whole).take(request.sampling.max_new_tokens)
        assert result.token_ids == tokens
        assert result.logprobs == logprobs
        assert len(result.versions) == len(tokens)
        assert list(result.versions) == sorted(result.versions)
        assert result.finish is (FinishReason.STOP if tokens[-1] == STOP else FinishReason.LENGTH)
        self.turns += 1

    async def trajectory(self, number: int) -> None:
        """All turns of a trajectory, each checked; one in four runs into its budget."""
        control, now, name, question = self.control, asyncio.get_running_loop().time, f"t{number}", number // 4
        script = self.model.script(question, number)
        context = prompt_of(script, question)
        await control.record(Sampled(now(), name, group=f"g{question}", task="test", version=control.version))
        for turn, spec in enumerate(script.turns):
            last = spec.tool is None
            budget = max(2, spec.output_tokens // 2) if last and number % 4 == 0 else 1000
            request = self.ask(number, question, turn, context, budget)
            result = await control.generate(request)
            self.check_result(request, result)
            context += (*result.token_ids, *range(spec.appended_tokens))
            if not last:
                await control.record(ToolStarted(now(), name, "tool", len(context)))
                await asyncio.sleep(0.1)
        await control.record(RewardStarted(now(), name, len(context)))
        await control.record(Done(now(), name, 1.0, True))
