"""Run the test suite of OpenAI's client against a gateway: are our answers of the types that the client expects?

    python scripts/client_suites.py

The suite of the version that is installed here comes from its source distribution. It wants a server at an address, which is
a gateway with the small model; in a copy of the suite the names of models are replaced by that model's. What is known not
to work is named below with its reason: a test that fails and is not, or does not fail and is, ends this with exit status 1.
(The suites of litellm and mini-swe-agent have no tests that talk to a server, those of verifiers ask a hosted model.)
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "clients"
NEEDED = [
    "pytest",
    "pytest-asyncio",
    "pytest-xdist",
    "respx",
    "dirty-equals",
    "inline-snapshot",
    "httpx-aiohttp",
    "rich",
]
FILES = ["chat/test_completions.py", "test_completions.py", "test_models.py", "test_responses.py"]
ASKS = r"::test_(method|raw_response|streaming_response)_"
NOT_SERVED = {
    r"with_all_params": "some of all the fields cannot be served, and are refused by name",
    rf"chat.*{ASKS}(retrieve|update|list|delete)\b": "completions are not stored",
    rf"test_responses.*{ASKS}(retrieve_overload|delete|cancel|compact)": "responses are neither stored nor compacted",
    rf"test_models.*{ASKS}delete\b": "models are not deleted",
}
"""Patterns of tests -> why they fail."""


def suite() -> tuple[Path, Path]:
    """An interpreter that has the client and what its tests need, and the unpacked source distribution."""
    client = f"openai=={version('openai')}"
    python = PLACE / "venv" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", str(PLACE / "venv"))
        run(str(python), "-m", "pip", "install", "--quiet", client, *NEEDED, "hatchling", "hatch-fancy-pypi-readme")
    sources = PLACE / client.replace("==", "-")
    if not sources.exists():
        as_sources = ["--no-deps", "--no-binary=openai", "--no-build-isolation"]
        run(str(python), "-m", "pip", "download", "--quiet", *as_sources, f"--dest={PLACE}", client)
        with tarfile.open(PLACE / f"{sources.name}.tar.gz") as archive:
            archive.extractall(PLACE, filter="data")
        for file in (sources / "tests" / "api_resources").rglob("test_*.py"):
            file.write_text(adapted(file.read_text()))
    return python, sources


def adapted(tests: str) -> str:
    """With the name of our model, and with a question where the suite asks for a response to nothing."""
    named = re.sub(r'(model=|models\.\w+\(\s*|retrieve\(\s*)"(?!")[^"]+"', r'\1"arithmetic"', tests)
    asked = re.sub(r"(responses(\.\w+_response)?\.create\()\)", r'\1input="x")', named)
    return re.sub(r"(responses(\.\w+_response)?\.create\(\s*stream=True)(,?\s*\))", r'\1, input="x"\3', asked)


@contextmanager
def gateway() -> Iterator[str]:
    """The URL of one, which ends with the block."""
    with tempfile.TemporaryDirectory() as runs:
        settings = ["gateway.port=0", f"run_dir={runs}", "sampling.max_new_tokens=16", "cluster.instances=2"]
        serve = [sys.executable, "-m", "prorsa.cli", "serve", "serve", *settings]
        process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    yield found[0]
                    break
            else:
                raise SystemExit("client_suites: the gateway did not start")
        finally:
            process.terminate()
            process.communicate()


def outcomes(python: Path, sources: Path, url: str) -> dict[str, str]:
    """Test -> why it failed, "" where it did not."""
    report = PLACE / "report.xml"
    report.unlink(missing_ok=True)
    files = [f"tests/api_resources/{name}" for name in FILES]
    pytest = [str(python), "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    subprocess.run(pytest, cwd=sources, env={"TEST_API_BASE_URL": f"{url}/v1"}, stdout=subprocess.DEVNULL, check=False)
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = case.find("failure") if case.find("failure") is not None else case.find("error")
        if case.find("skipped") is None:
            found[f"{case.get('classname')}::{case.get('name')}"] = (
                "" if trouble is None else str(trouble.get("message"))
            )
    return found


def reason(test: str) -> str | None:
    return next((why for pattern, why in NOT_SERVED.items() if re.search(pattern, test)), None)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main() -> int:
    PLACE.mkdir(parents=True, exist_ok=True)
    python, sources = suite()
    with gateway() as url:
        found = outcomes(python, sources, url)
    shutil.rmtree(sources / ".pytest_cache", ignore_errors=True)
    counts, wrong = Counter[str](), list[str]()
    for test, trouble in found.items():
        why = reason(test)
        counts["passed" if not trouble else why or "FAILED"] += 1
        if bool(trouble) != (why is not None):
            wrong.append(f"{test}: {trouble[:200] or f'passed, though {why}'}")
    print(f"openai-python {version('openai')}: {len(found)} tests")
    for what, count in counts.most_common():
        print(f"{count:>6}  {what}")
    print("\n".join(wrong))
    return 1 if wrong or not found else 0


if __name__ == "__main__":
    sys.exit(main())
