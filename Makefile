# `make demo` and `make test` are the two commands; everything they need is installed into $(VENV) once.

PYTHON ?= python3
VENV ?= .venv
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
# The jax of a new environment, JAX_VERSION=0.11.2; none: the newest that pyproject.toml allows. Of one on Python 3.12, the folder's name
# says the version.
JAX_VERSION ?=
# The target's weights (fetched once, 93 MB), converted checkpoints and compiled test programs.
export JAXSPEC_CACHE ?= $(HOME)/.cache/jaxspec
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
PINNED := $(if $(JAX_VERSION),jax==$(JAX_VERSION) jaxlib==$(JAX_VERSION))
STAMPS := $(VENV)/.stamps
ACCELERATOR := $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.NOTPARALLEL:
.PHONY: help demo fetch test test-slow test-fuzz test-gpu test-312 test-h200-aot compile-for-h200 need-python312 find-python312 lint format types clean

help:
	@echo "make demo       generate with speculation on the default target (DEMO_ARGS='--help' for the options)"
	@echo "make test       the tests, in $(VENV); PYTEST_ARGS='-k name' selects"
	@echo "make test-slow  the tests marked slow        make test-gpu   the tests marked gpu"
	@echo "make test-fuzz  damaged input of all kinds, for FUZZ_SECONDS (3600) from FUZZ_SEED (the time)"
	@echo "make test-312   the tests on Python 3.12 with the newest supported jax, in .venv-3.12; JAX_VERSION=0.11.2 takes another"
	@echo "make test-h200-aot  compile kernels and rounds for an H200 and look at the result; no GPU, 1 GB more in .venv-3.12"
	@echo "make lint       ruff check and format check  make types      pyright        make format   apply ruff's fixes"
	@echo "make fetch      download the default target  make clean      remove environments and build files"
	@echo "PYTHON=python3.11 chooses the interpreter (3.11 or newer)."

# --- environments -----------------------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "jaxspec needs Python 3.11 or newer, got $$($(PYTHON) --version 2>/dev/null || echo none) from '$(PYTHON)': run make with PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/package-$(ACCELERATOR): $(STAMPS)/venv pyproject.toml
	$(PIP) -e $(if $(filter cuda,$(ACCELERATOR)),'.[cuda]',.) $(PINNED)
	@touch $@

$(STAMPS)/pytest: $(STAMPS)/venv pyproject.toml
	$(PIP) -e '.[test,train]' $(PINNED)
	@touch $@

$(STAMPS)/aot: $(STAMPS)/pytest
	$(PIP) $(if $(JAX_VERSION),$(PINNED) jax-cuda13-plugin==$(JAX_VERSION),-e '.[aot]')
	@touch $@

# The oracles' pins were checked on Python 3.11; on another version their tests skip with a reason.
$(STAMPS)/oracles: $(STAMPS)/venv requirements-oracle.txt requirements-oracle-nodeps.txt
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then \
	  set -ex; \
	  $(PIP) -r requirements-oracle.txt; \
	  $(PIP) --no-deps -r requirements-oracle-nodeps.txt; \
	else \
	  echo "not Python 3.11: the oracles are not installed, and their tests will skip"; \
	fi
	@touch $@

$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml
	$(PIP) -e '.[dev]'
	@touch $@

# --- the two commands -------------------------------------------------------------------------------------------------------------

demo: $(STAMPS)/package-$(ACCELERATOR)
	$(BIN)/python scripts/generate.py $(DEMO_ARGS)

# A test that hangs ends its worker, with the stacks of all threads; the longest takes 2 minutes on a slow machine.
MOST_SECONDS := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

# The target is fetched before the tests start, so that parallel workers do not race for it.
test: $(STAMPS)/pytest $(STAMPS)/oracles
	$(BIN)/python -m jaxspec.loading.default_target
	$(PYTEST) -m "not slow" $(MOST_SECONDS) $(PYTEST_ARGS)

# --- the rest ---------------------------------------------------------------------------------------------------------------------

fetch: $(if $(wildcard $(STAMPS)/pytest),$(STAMPS)/pytest,$(STAMPS)/package-$(ACCELERATOR))
	$(BIN)/python -m jaxspec.loading.default_target

test-slow: $(STAMPS)/pytest $(STAMPS)/oracles
	$(BIN)/python -m jaxspec.loading.default_target
	$(PYTEST) -m slow $(PYTEST_ARGS)

# Other cases each time: FUZZ_SEED repeats a run. A failure prints the command that repeats it alone.
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?= $(shell date +%s)
test-fuzz: $(STAMPS)/pytest $(STAMPS)/oracles
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED)

# One process, as the device's memory is not shared; no oracles, whose torch may bring CUDA libraries of another version.
test-gpu: $(STAMPS)/package-$(ACCELERATOR) $(STAMPS)/pytest
	JAXSPEC_TEST_GPU=1 $(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

# python3.12 from the path, else the newest 3.12 that pyenv holds. A shim that answers nothing does not count.
PYTHON312 ?= $(shell for p in python3.12 $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3.12 2>/dev/null | sort -rV); do \
  "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

VENV312 := .venv-3.12$(if $(JAX_VERSION),-$(JAX_VERSION))

find-python312:
	@echo "$(PYTHON312)"

need-python312:
	@test -n "$(PYTHON312)" || { echo "no Python 3.12 found: say PYTHON312=/path/to/python3.12" >&2; exit 1; }

test-312: need-python312
	@$(MAKE) test VENV=$(VENV312) PYTHON="$(PYTHON312)"

# Optional, so not in .ci/run: the compiler for CUDA is 1 GB to fetch. JAX runs on the CPU; nothing here talks to a GPU.
test-h200-aot: need-python312
	@$(MAKE) compile-for-h200 VENV=$(VENV312) PYTHON="$(PYTHON312)"

compile-for-h200: $(STAMPS)/aot
	JAX_PLATFORMS=cpu $(PYTEST) tests/aot $(PYTEST_ARGS)

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests are checked too, so what they import must be installed. torch and the oracles may be missing.
types: $(STAMPS)/dev $(STAMPS)/pytest
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-3.12* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
