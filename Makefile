# Two commands matter: `make demo` sets everything up and runs the main job; `make test` sets everything up and runs every check.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= examples/demo.yaml
LOCK   := requirements/lock.txt

FAST   ?= .venv-fast
SGLANG := .venv-sglang/.ready
PURE   := -m "not engine and not long and not sglang" --ignore tests/integrations

.PHONY: demo test test-sglang test-clients fast pythons setup sglang lint types pure tests wheel lock format clean

demo: setup
	$(BIN)/prorsa train $(CONFIG)

test: fast setup sglang tests wheel

# Every test with real SGLang engines, also those that `make test` leaves out because they take minutes more.
test-sglang: setup sglang
	$(BIN)/pytest -m sglang

# The tests of OpenAI's own client, against a gateway.
test-clients: setup
	$(BIN)/python scripts/client_suites.py

# What needs neither PyTorch nor an engine, in an environment of its own: some two minutes.
fast: lint types pure

setup: $(READY)

$(READY): pyproject.toml $(LOCK)
	@echo "== Setting up $(VENV) with $(PYTHON): PyTorch, verl and Ray are about 2 GB; a minute or two on a fast connection"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off --quiet --constraint $(LOCK) --editable '.[verl,clients,dev]'
	@touch $(READY)

$(FAST)/.ready: pyproject.toml $(LOCK)
	@echo "== Setting up $(FAST) with $(PYTHON): Prorsa without PyTorch"
	$(PYTHON) -m venv $(FAST)
	$(FAST)/bin/python -m pip install --progress-bar off --quiet --constraint $(LOCK) --editable '.[dev]'
	@touch $(FAST)/.ready

# Engines run in processes and an environment of their own: SGLang's requirements exclude verl's.
sglang: $(SGLANG)

$(SGLANG): scripts/install_sglang.sh requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt
	@echo "== Setting up .venv-sglang with $(PYTHON): 2 GB without a GPU, more with one; some minutes"
	scripts/install_sglang.sh $(PYTHON) .venv-sglang
	@touch $(SGLANG)

lint: $(FAST)/.ready
	@echo "== ruff"
	$(FAST)/bin/ruff check .
	$(FAST)/bin/ruff format --check .

types: $(FAST)/.ready
	@echo "== mypy --strict"
	$(FAST)/bin/mypy

pure: $(FAST)/.ready
	@echo "== pytest, without engines, on $$($(FAST)/bin/python --version)"
	$(FAST)/bin/pytest $(PURE)

tests: setup
	@echo "== pytest"
	$(BIN)/pytest -m "not sglang_long"

# The tests without engines on the other versions of Python that this machine has.
pythons:
	@for version in 3.12 3.13; do \
		if python=$$(scripts/find_python.sh $$version); then \
			$(MAKE) --no-print-directory pure PYTHON=$$python FAST=.venv-fast-$$version || exit 1; \
		else echo "== there is no Python $$version here"; fi; \
	done

# What users install: built, put into an empty environment, and tried there.
wheel: setup
	@echo "== wheel"
	scripts/check_wheel.sh $(PYTHON) $(BIN)/python $(LOCK)

# The newest versions that the ranges of pyproject.toml allow; PyTorch's is set here, for PyPI has several builds of each.
lock:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --editable '.[verl,clients,dev]' torch==2.13.0
	scripts/write_lock.sh build/lock/bin/python $(LOCK)

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-fast* .venv-sglang build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
