"""The API key: where it comes from, which requests need it, and where the gateway may not listen without one."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest
from gateway_bench import TOKEN, bench, configured, saying
from openai import AsyncOpenAI, AuthenticationError

from prorsa.config import ConfigError
from prorsa.gateway import serve
from prorsa.gateway.client import EventRefused, Trajectory
from prorsa.gateway.keys import KEY_VARIABLE, TOKEN_VARIABLE, admin_token, api_key

KEY = "an-api-key-for-tests"
QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
KEYED = ("/v1/chat/completions", "/v1/completions", "/generate", "/prorsa/events")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (KEY_VARIABLE, TOKEN_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def test_a_key_is_made_once_in_a_file_of_the_owner(tmp_path: Path) -> None:
    path = tmp_path / "new" / "api-key"
    key = api_key(str(path))
    assert key is not None
    assert len(key) > 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert api_key(str(path)) == key
    assert admin_token(tmp_path / "admin-token") != key


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert api_key(None) == api_key(str(tmp_path / "api-key")) == KEY
    assert list(tmp_path.iterdir()) == []
    assert admin_token(tmp_path / "admin-token") != KEY


def test_what_is_no_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "short"
    short.write_text("x" * 15 + "\n")
    with pytest.raises(ConfigError, match=f"gateway.api_key_file={short}: the secret is shorter than 16"):
        api_key(str(short))
    with pytest.raises(ConfigError, match=f"gateway.api_key_file={tmp_path}: cannot be read"):
        api_key(str(tmp_path))
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=f"the environment variable {KEY_VARIABLE}: the secret is shorter"):
        api_key(None)


def test_openais_client_with_the_key_is_served_and_another_is_not() -> None:
    async def main() -> None:
        async with bench(saying("It is 3."), api_key=KEY) as gateway:
            asked = {"model": "arithmetic", "messages": [QUESTION]}
            base = gateway.url + "/v1"
            async with AsyncOpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
                answer = await client.chat.completions.create(**asked)  # type: ignore[call-overload]
                assert answer.choices[0].message.content == "It is 3."
                assert [model.id async for model in client.models.list()] == ["arithmetic"]
            for wrong in (KEY[:-1], KEY + "x", TOKEN, "none"):
                async with AsyncOpenAI(base_url=base, api_key=wrong, max_retries=0) as client:
                    with pytest.raises(AuthenticationError, match="needs the header") as caught:
                        await client.chat.completions.create(**asked)  # type: ignore[call-overload]
                    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
            assert gateway.control.status().turns == 1

    asyncio.run(main())


def test_without_the_key_nothing_is_served_and_probes_and_admin_are_as_ever() -> None:
    async def main() -> None:
        async with bench(api_key=KEY) as gateway:
            for path in KEYED:
                status, answer = await gateway.post(path, b"not even JSON")
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert (await gateway.post(path, b"not even JSON", Authorization=f"Bearer {KEY}"))[0] == 400
            status, text = await gateway.get("/v1/models")
            assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
            for path in ("/health", "/metrics", "/"):
                assert (await gateway.get(path))[0] == 200
            assert (await gateway.get("/prorsa/status", Authorization=f"Bearer {KEY}"))[0] == 401
            assert (await gateway.get("/prorsa/status", Authorization=f"Bearer {TOKEN}"))[0] == 200

    asyncio.run(main())


def test_a_header_that_is_no_text_is_a_wrong_key() -> None:
    async def main() -> None:
        async with bench(api_key=KEY) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()

    asyncio.run(main())


def test_the_events_client_shows_the_key() -> None:
    async def main() -> None:
        async with bench(api_key=KEY) as gateway:
            with pytest.raises(EventRefused, match="needs the header"):
                await asyncio.to_thread(Trajectory(gateway.url, "t").sampled)
            assert await asyncio.to_thread(Trajectory(gateway.url, "t", api_key=KEY).sampled) == "sampled"

    asyncio.run(main())


class Starting(Exception):
    """The engines would be started now."""


def start(run_dir: Path, monkeypatch: pytest.MonkeyPatch, **gateway: str) -> None:
    """`serving` up to its engines. Always raises."""

    def starting(*args: object) -> None:
        raise Starting

    async def main() -> None:
        async with serve.serving(configured(**gateway), run_dir):
            pass

    monkeypatch.setattr(serve, "running_cluster", starting)
    asyncio.run(main())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_only_loopback_is_listened_at_without_a_key(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"gateway.host='{host}': without an API key .* set gateway.api_key_file or"):
        start(tmp_path, monkeypatch, host=host)
    with pytest.raises(Starting):
        start(tmp_path / "file", monkeypatch, host=host, api_key_file=str(tmp_path / "api-key"))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(Starting):
        start(tmp_path / "environment", monkeypatch, host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Starting):
        start(tmp_path, monkeypatch, host=host)


def test_a_host_that_there_is_not_is_refused_before_engines_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"gateway\.host='no\.such.host.invalid', gateway.port=0: cannot listen there"
    ):
        start(tmp_path, monkeypatch, host="no.such.host.invalid")
