"""The rate at which agents elsewhere begin is that of the last minute."""

from __future__ import annotations

import asyncio

import pytest

from prorsa.gateway.arrivals import ObservedRate
from prorsa.lifecycle import Sampled, Tracker
from prorsa.simulation import clock


def test_new_trajectories_are_expected_as_they_came_lately() -> None:
    async def main() -> None:
        rate, tracker = ObservedRate(), Tracker()
        assert rate.launches(5.0, 10.0) == 0.0
        for number in range(100):
            now = asyncio.get_running_loop().time()
            rate.observe(tracker.apply(Sampled(now, f"t{number}", "g", "agent")))
            if number == 0:
                assert rate.launches(0.0, 10.0) == 1.0, "one burst in the first horizon"
            await asyncio.sleep(0.5)
        # 100 in 50 s, and nothing says that what is rewarded brings more.
        assert rate.launches(0.0, 10.0) == rate.launches(9.0, 10.0) == pytest.approx(20.0)
        await asyncio.sleep(34.9)
        # At 84.9 s the last minute began at 24.9 s: 50 came since.
        assert rate.launches(0.0, 6.0) == pytest.approx(5.0)
        await asyncio.sleep(60.0)
        assert rate.launches(0.0, 10.0) == 0.0

    clock.run(main())
