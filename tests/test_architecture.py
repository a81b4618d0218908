"""The house keeps its order: a room imports only rooms above it, and the core needs neither torch nor Ray."""

import ast
import subprocess
import sys
from pathlib import Path

import prorsa

SOURCE = Path(prorsa.__file__).parent
ROOMS = [
    "lifecycle",
    "forecast",
    "allocation",
    "engines",
    "cluster",
    "rollout",
    "config",
    "profiles",
    "assembly",
    "report",
]
ROOMS += ["gateway", "simulation", "integrations", "commands", "cli"]
PURE = {"lifecycle", "forecast", "allocation"}
"""They decide: numpy and the standard library's data structures are all that they use."""
FORBIDDEN_TO_PURE = {"asyncio", "socket", "subprocess", "threading", "time", "aiohttp", "torch", "random"}


def imports(room: str) -> set[str]:
    """Full names of the modules that a room imports, anywhere in its files."""
    path = SOURCE / room
    files = list(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_room_imports_only_rooms_above_it() -> None:
    for index, room in enumerate(ROOMS):
        ours = {name.split(".")[1] for name in imports(room) if name.startswith("prorsa.")}
        below = ours - {*ROOMS[: index + 1]}
        assert not below, f"{room} imports {below}"


def test_the_deciding_rooms_have_no_io_and_no_clock() -> None:
    for room in PURE:
        used = {name.split(".")[0] for name in imports(room)}
        assert not used & FORBIDDEN_TO_PURE, room


def test_cluster_and_rollout_take_their_time_from_the_event_loop() -> None:
    for room in ("cluster", "rollout"):
        names = imports(room)
        assert not {"time", "threading"} & {name.split(".")[0] for name in names} - {"prorsa"}, room


def test_the_commands_start_without_torch_ray_and_verl() -> None:
    code = "import sys, prorsa.cli; print([m for m in ('torch', 'ray', 'verl', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
