"""The router actor's class, outside Ray, over a control plane that keeps a real tracker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import RequestLoadBalancer

from prorsa.cluster.turns import TurnFailed, TurnRequest, TurnResult
from prorsa.config import dump_config, parse_config
from prorsa.engines.protocol import FinishReason
from prorsa.integrations.verl import router as router_module
from prorsa.integrations.verl.router import ControlRouter, ServedTurn
from prorsa.integrations.verl.settings import Settings
from prorsa.lifecycle import State, Tracker
from prorsa.lifecycle import events as e
from prorsa.report.recorder import recorder_of
from prorsa.report.rundir import read_run

MODEL = Path(__file__).parents[2] / "models" / "arithmetic"
CONTEXT = 96


class FakeControl:
    """Serves every turn with the same three tokens, the last two of newer weights."""

    version = 4

    def __init__(self) -> None:
        self.tracker = Tracker()
        self.requests: list[TurnRequest] = []
        self.states: list[State] = []
        self.updates: list[tuple[str, int]] = []
        self.failure: Exception | None = None

    async def record(self, event: e.Event) -> None:
        self.states.append(self.tracker.apply(event).after)

    async def generate(self, request: TurnRequest) -> TurnResult:
        self.requests.append(request)
        now, name = asyncio.get_running_loop().time(), request.trajectory
        await self.record(e.Ready(now, name, len(request.input_ids)))
        await self.record(e.PrefillStarted(now, name, "p"))
        if self.failure is not None:
            raise self.failure
        await self.record(e.DecodeStarted(now, name, "d"))
        return TurnResult((7, 8, 9), (-0.1, -0.2, -0.3), (4, 5, 5), FinishReason.STOP, 2, 1)

    async def update_weights(self, path: str, version: int) -> None:
        self.updates.append((path, version))


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def router(tmp_path: Path, control: FakeControl) -> ControlRouter:
    config = parse_config({"model": {"path": str(MODEL), "max_context": CONTEXT}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    router = ControlRouter({}, Settings(str(tmp_path), str(tmp_path)).mapping())
    router._control = control  # type: ignore[assignment]
    return router


def generate(router: ControlRouter, prompt: list[int], **params: Any) -> ServedTurn:
    return asyncio.run(router.generate("turn-1", prompt_ids=prompt, sampling_params=params, image_data=None))


def test_it_has_every_method_that_verl_calls_of_a_router() -> None:
    for name, method in inspect.getmembers(RequestLoadBalancer, inspect.isfunction):
        if not name.startswith("_"):
            ours = inspect.signature(getattr(ControlRouter, name))
            required = [p for p in ours.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
            assert {p.name for p in required} <= set(inspect.signature(method).parameters), name


def test_a_turn_of_any_agent_loop_is_a_whole_trajectory(router: ControlRouter, control: FakeControl) -> None:
    served = generate(router, [1, 2, 3], temperature=0.5, top_p=0.9, max_tokens=10)
    assert control.states == [
        State.SAMPLED,
        State.READY,
        State.PREFILL,
        State.DECODE,
        State.REWARD,
        State.DONE,
    ]
    assert len(control.tracker) == 0
    assert (served.token_ids, served.log_probs, served.stop_reason) == ([7, 8, 9], [-0.1, -0.2, -0.3], "completed")
    assert served.extra_fields["global_steps"] == 5
    assert (served.extra_fields["min_global_steps"], served.extra_fields["max_global_steps"]) == (4, 5)
    [request] = control.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.max_new_tokens) == (0.5, 0.9, 10)


def test_verl_can_read_a_served_turn_like_its_own(router: ControlRouter) -> None:
    served = generate(router, [1, 2, 3])
    for field in TokenOutput.model_fields:
        assert hasattr(served, field)


@pytest.mark.parametrize(
    ("params", "budget"), [({}, CONTEXT - 3), ({"max_new_tokens": 5}, 5), ({"max_tokens": 1000}, CONTEXT - 3)]
)
def test_a_turn_keeps_to_the_context(
    router: ControlRouter, control: FakeControl, params: dict[str, Any], budget: int
) -> None:
    generate(router, [1, 2, 3], **params)
    assert control.requests[0].sampling.max_new_tokens == budget


def test_each_turn_has_a_seed_of_its_own_or_the_one_that_it_brings(router: ControlRouter, control: FakeControl) -> None:
    for number, params in enumerate(({}, {}, {"seed": None}, {"seed": 7}, {"seed": 7})):
        asyncio.run(router.generate(f"turn-{number}", prompt_ids=[1, 2, 3], sampling_params=params))
    *drawn, fourth, fifth = [request.sampling.seed for request in control.requests]
    assert len(set(drawn)) == 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in drawn)
    assert (fourth, fifth) == (7, 7)


def test_a_failed_turn_leaves_no_trajectory(router: ControlRouter, control: FakeControl) -> None:
    control.failure = TurnFailed("no engine is left")
    with pytest.raises(TurnFailed, match="no engine is left"):
        generate(router, [1, 2, 3])
    assert control.states[-1] is State.DROPPED
    assert len(control.tracker) == 0
    assert router.get_total_inflight() == 0


def test_events_happen_on_the_clock_of_the_router(router: ControlRouter, control: FakeControl) -> None:
    """Another process's clock may be behind; the tracker refuses what goes back in time."""

    async def main() -> None:
        now = asyncio.get_running_loop().time()
        await router.record(e.Sampled(now + 100, "t", "g", "task"))
        await router.record(e.SandboxStarting(now - 100, "t", e.SandboxMode.COLD, "image", "node"))

    asyncio.run(main())
    assert control.states == [State.SAMPLED, State.SANDBOX_STARTING]


def test_weights_reach_the_control_plane(router: ControlRouter, control: FakeControl) -> None:
    asyncio.run(router.update_weights("/w/version-5", 5))
    assert control.updates == [("/w/version-5", 5)]


def test_verl_is_given_this_actor_as_its_server(router: ControlRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    class Context:
        current_actor = "this actor"

    monkeypatch.setattr(router_module.ray, "get_runtime_context", Context)
    fields: Callable[[], list[str]] = router.require_acquire_fields
    assert fields() == router.require_release_fields() == []
    assert router.acquire_server("request") == ("prorsa", "this actor")


@pytest.mark.parametrize(
    "change", [lambda router: router.add_servers({"x": None}), lambda router: router.remove_servers(["x"])]
)
def test_elastic_servers_are_refused(router: ControlRouter, change: Callable[[ControlRouter], Awaitable[None]]) -> None:
    with pytest.raises(NotImplementedError, match=r"verl adds or removes the servers \['x'\]"):
        change(router)


def test_a_job_that_starts_again_goes_on_with_the_records(router: ControlRouter, tmp_path: Path) -> None:
    config, before, after = router._config, Tracker(), Tracker()
    first = recorder_of(config, tmp_path, "train", now=5000.0)
    for event in (e.Sampled(5000.0, "t", "g", "task"), e.Ready(5001.0, "t", 5)):
        first.transition(before.apply(event))
    first.close()
    again = recorder_of(config, tmp_path, "train", now=20.0)  # the machine was started anew: its clock is another
    past = again.past_events()
    assert past == [
        e.Sampled(19.0, "t", "g", "task"),
        e.Ready(20.0, "t", 5),
        e.Dropped(20.0, "t", "the run was cut off"),
    ]
    for event in [*past, e.Sampled(21.0, "u", "g", "task")]:
        transition = after.apply(event)
    again.transition(transition)
    again.close()
    assert read_run(tmp_path).events[-2:] == [
        e.Dropped(5001.0, "t", "the run was cut off"),
        e.Sampled(5002.0, "u", "g", "task"),
    ]


def test_use_before_the_start_is_a_clear_error(router: ControlRouter) -> None:
    router._control = None
    with pytest.raises(RuntimeError, match="before its replica had started it"):
        router.version()
