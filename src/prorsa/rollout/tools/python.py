"""The tool `python(code)`: runs code in the trajectory's sandbox, whose variables live on from call to call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prorsa.rollout.sandboxes.base import Sandbox


class PythonTool:
    """Implements `Tool`."""

    name = "python"

    async def use(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        code = arguments.get("code")
        if not isinstance(code, str):
            return 'Error: python needs one argument, "code", a string.'
        return await sandbox.run(code)
