#!/usr/bin/env bash
# Print the path of a Python of the version given, such as 3.12; exit with 1 where this machine has none.
set -euo pipefail
version=$1
for python in "$(command -v "python$version" || true)" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    # One that pyenv only stands in for says so when it is run.
    if [ -x "$python" ] && "$python" -c 'import venv' 2>/dev/null; then
        echo "$python"
        exit
    fi
done
exit 1
