# Two commands matter: `make demo` sets everything up and runs the main job; `make test` sets everything up and runs every check.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= examples/demo.yaml

SGLANG := .venv-sglang/.ready

.PHONY: demo test test-sglang setup sglang lint types tests format clean

demo: setup
	$(BIN)/prorsa train $(CONFIG)

test: setup sglang lint types tests

# Every test with real SGLang engines, also those that `make test` leaves out because they take minutes more.
test-sglang: setup sglang
	$(BIN)/pytest -m sglang

setup: $(READY)

$(READY): pyproject.toml
	@echo "== Setting up $(VENV) with $(PYTHON): PyTorch, verl and Ray are about 2 GB; a minute or two on a fast connection"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off --quiet --editable '.[train,clients,dev]'
	@touch $(READY)

# Engines run in processes and an environment of their own: SGLang's requirements exclude verl's.
sglang: $(SGLANG)

$(SGLANG): scripts/install_sglang.sh requirements/sglang-cpu.txt requirements/sglang-cpu-nodeps.txt
	@echo "== Setting up .venv-sglang with $(PYTHON): 2 GB without a GPU, more with one; some minutes"
	scripts/install_sglang.sh $(PYTHON) .venv-sglang
	@touch $(SGLANG)

lint:
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	@echo "== mypy --strict"
	$(BIN)/mypy

tests:
	@echo "== pytest"
	$(BIN)/pytest -m "not sglang_long"

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-sglang build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
