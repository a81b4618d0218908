#!/usr/bin/env bash
# Make an environment for SGLang engines: install_sglang.sh PYTHON DIRECTORY
# With an NVIDIA GPU it is SGLang with all that it requires. Without, it is what a CPU needs: no CUDA and no GPU kernels.
# Nothing is installed outside DIRECTORY, and root is not needed.
set -euo pipefail
python=$1 directory=$2
root=$(cd "$(dirname "$0")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$python" -m venv "$directory"
directory=$(cd "$directory" && pwd)
pip() { "$directory/bin/python" -m pip install --quiet --progress-bar off "$@"; }

if [ -e /dev/nvidiactl ]; then
    pip sglang==0.5.23
else
    pip --requirement "$root/requirements/sglang-cpu.txt"
    pip --no-deps --requirement "$root/requirements/sglang-cpu-nodeps.txt"
fi
# Of Prorsa the engines need one package without requirements, and its entry point. The distribution is not complete here.
pip --no-deps --editable "$root"

# The KV transfer is linked to a library for InfiniBand, also where it goes over TCP. Where the system has none, Debian's is
# unpacked beside the library that wants it.
if ! "$directory/bin/python" -c 'import mooncake.engine' 2>/dev/null; then
    libraries=$("$directory/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mooncake_transfer_engine_non_cuda.libs
    scratch=$(mktemp --directory)
    trap 'rm -rf "$scratch"' EXIT
    cd "$scratch"
    mkdir -p state/lists/partial cache/archives/partial
    apt=(apt-get -qq -o APT::Sandbox::User= -o Acquire::Retries=3 -o "Dir::State=$scratch/state" -o "Dir::Cache=$scratch/cache"
        -o "Dir::State::status=/var/lib/dpkg/status")
    "${apt[@]}" update
    "${apt[@]}" download libibverbs1 libnl-3-200 libnl-route-3-200
    for package in *.deb; do dpkg-deb --extract "$package" unpacked; done
    find unpacked -name '*.so.*' -exec cp --no-dereference {} "$libraries" \;
    "$directory/bin/python" -c 'import mooncake.engine' || {
        echo "The KV transfer does not load; install libibverbs (Debian: apt-get install libibverbs1)" >&2
        exit 1
    }
fi
