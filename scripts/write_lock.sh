#!/usr/bin/env bash
# Write what an environment has as a file of constraints: write_lock.sh PYTHON FILE
set -euo pipefail
python=$1 file=$2
{
    echo "# The exact versions that Prorsa is tested with, as constraints for pip; made by \`make lock\`."
    "$python" -m pip freeze --exclude-editable --local | sed 's/ @ .*//; s/+cpu$//' | grep -v '^pip=='
} >"$file"
