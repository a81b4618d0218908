#!/usr/bin/env bash
# Build the wheel, install it in an empty environment and use it there: check_wheel.sh PYTHON BUILD_PYTHON LOCK
# PYTHON makes the environment, BUILD_PYTHON has the package `build`.
set -euo pipefail
python=$1 build_python=$(realpath --no-symlinks "$2") lock=$(realpath "$3")
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp --directory)
trap 'rm -rf "$scratch"' EXIT
"$build_python" -m build --outdir "$scratch" "$root" >"$scratch/build.log" || { cat "$scratch/build.log" >&2; exit 1; }
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install --quiet --progress-bar off --constraint "$lock" "$scratch"/*.whl
cd "$scratch" # away from the sources
"$scratch/venv/bin/python" - <<'PYTHON'
import importlib.util, pkgutil, sys
import prorsa

# What runs inside verl, inside SGLang's engines and inside a sandbox, and what needs the extra `otel`.
ELSEWHERE = (
    "prorsa.integrations.verl",
    "prorsa.engines.sglang_server.cpu",
    "prorsa.engines.sglang_server.draws",
    "prorsa.rollout.sandboxes.runner",
    "prorsa.gateway.traces",
)
modules = [module.name for module in pkgutil.walk_packages(prorsa.__path__, "prorsa.") if not module.name.endswith("__main__")]
for name in modules:
    if not name.startswith(ELSEWHERE):
        importlib.import_module(name)
assert importlib.util.find_spec("torch") is None
print(f"{len(modules)} modules, without PyTorch")
PYTHON
"$scratch/venv/bin/prorsa" rollout check rollout.steps=1 rollout.groups=2 run_dir="$scratch/runs" | tail -n 3
