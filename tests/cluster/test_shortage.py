"""What this process runs out of is no engine's fault: a control plane that has no descriptors left, over real engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, json, os, resource, signal, sys
from pathlib import Path
from test_real_engines import TRAJECTORIES, cluster, generated, in_service, trajectory

async def main():
    async with cluster(Path(sys.argv[1]), Path(sys.argv[2])) as (control, launcher):
        before = {i.name: launcher.pid(i.name) for i in control.fleet}
        turns = [asyncio.create_task(trajectory(control, number)) for number in range(TRAJECTORIES)]
        await generated(control, 0.1)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # From here on no connection can be opened, and no process started.
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        victim = control.fleet["e3"] if sys.argv[3] == "a death" else None
        if victim is not None:
            os.kill(launcher.pid("e3"), signal.SIGKILL)
            while not (victim.problem or "").startswith("restart failed"):
                await asyncio.sleep(0.01)
        more = [asyncio.create_task(trajectory(control, 100 + number)) for number in range(4)]
        await asyncio.sleep(3.0)
        states = {i.name: i.state.value for i in control.fleet}
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        results = await asyncio.gather(*turns, *more)
        await in_service(control)
        after = {i.name: launcher.pid(i.name) for i in control.fleet}
        print(json.dumps({
            "states": states, "kept": [name for name in before if before[name] == after[name]],
            "lengths": [len(result.token_ids) for result in results], "errors": control.status().errors,
        }))

asyncio.run(main())
"""


@pytest.mark.engine
@pytest.mark.parametrize("event", ["nothing else", "a death"])
def test_an_engine_survives_that_our_descriptors_run_out(event: str, checkpoint: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path), event]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    dead = {"e3"} if event == "a death" else set()
    assert {name for name, state in told["states"].items() if state != "routed"} == dead
    assert set(told["kept"]) == {"e0", "e1", "e2", "e3"} - dead
    assert told["lengths"] == [150] * 20
    assert told["errors"] == []
