"""What clients show as `Authorization: Bearer ...`: the token of the admin endpoints, and the API key of the others.

Each comes from an environment variable, or else from a file, which is made where it is missing.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from aiohttp import web

from prorsa.config import ConfigError

TOKEN_VARIABLE = "PRORSA_ADMIN_TOKEN"
TOKEN_FILE = "admin-token"
KEY_VARIABLE = "PRORSA_API_KEY"
LEAST = 16
"""Characters of a secret."""


def admin_token(path: Path) -> str:
    """Raises `ConfigError`."""
    return _from_environment(TOKEN_VARIABLE) or _from_file("gateway.admin_token_file", path)


def api_key(path: str | None) -> str | None:
    """None where neither the environment nor a file has one: then requests need none. Raises `ConfigError`."""
    known = _from_environment(KEY_VARIABLE)
    return known if known is not None or path is None else _from_file("gateway.api_key_file", Path(path))


def shows(request: web.Request, secret: str) -> bool:
    """Whether the request has the header `Authorization: Bearer SECRET`; how long that takes tells nothing of the secret."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Bytes of a header that are not UTF-8 are surrogates in its string.
    shown = given.strip().encode(errors="surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(shown, secret.encode())


def _from_environment(variable: str) -> str | None:
    secret = os.environ.get(variable)
    return None if secret is None else _long_enough(secret, f"the environment variable {variable}")


def _from_file(key: str, path: Path) -> str:
    source = f"{key}={path}"
    try:
        if not path.exists():
            _write_new(path)
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read or made ({error.strerror}); name a file that can be") from error
    return _long_enough(secret, source)


def _long_enough(secret: str, source: str) -> str:
    if len(secret) < LEAST:
        raise ConfigError(f"{source}: the secret is shorter than {LEAST} characters; use a longer one")
    return secret


def _write_new(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
