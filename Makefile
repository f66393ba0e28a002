# A machine with Python 3.11, Java 17, make and git needs nothing else: every target sets up what it uses.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= $(shell for name in python3.11 python3; do command -v "$$name" && break; done)
BIN := .venv/bin
READY := .venv/.stamp
UV := build/uv/bin/uv
UV_READY := build/uv/.stamp
UV_VERSION := 0.13.8
LOWEST := build/lowest

SOURCES := $(wildcard marshal_dagster definitions.py jobs sensors tests benchmarks demo examples tools)
COMPILE = $(UV) pip compile pyproject.toml --quiet --all-extras
LOCK = $(COMPILE) --python-version 3.11 --no-header --generate-hashes --no-strip-extras \
	--no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)

# A compile that finds an older lock keeps its versions where it may; so what is lowest is asked afresh, without a lock.
LOWEST_DIRECT = rm -f $(LOWEST).txt && $(COMPILE) --group test --python-version 3.11 --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links --no-deps --resolution lowest-direct --output-file $(LOWEST).txt >/dev/null
LOWEST_LOCK = $(LOCK) --group test --constraint $(LOWEST).txt

# Two makes in one checkout take turns at an environment; where flock is missing they must not meet.
in_turn = $(if $(shell command -v flock),flock $(1))

define need_python
if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed and none was found: install it, or name it with PYTHON=..." >&2; exit 1; fi
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 or newer is needed, $(PYTHON) is $$("$(PYTHON)" -V 2>&1): name another with PYTHON=..." >&2; exit 1; }
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) lacks the venv module: install it (Debian: python3-venv), or name another with PYTHON=..." >&2; exit 1; }
endef

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: $(READY) ## the environment in .venv, exactly as requirements.lock says

$(READY): requirements.lock pyproject.toml | $(UV_READY)
	@$(need_python)
	@echo "Setting up .venv (a first time takes some minutes and 2 GB)"
	@mkdir -p .venv
	@[ -x $(BIN)/pip ] || $(call in_turn,.venv) "$(PYTHON)" -m venv .venv
	@$(call in_turn,.venv) $(UV) pip install --quiet --python .venv --require-hashes -r requirements.lock
	@$(call in_turn,.venv) $(UV) pip install --quiet --python .venv --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: java
java:
	@[ -x "$${JAVA_HOME:-/nowhere}/bin/java" ] || command -v java >/dev/null || { \
		echo "Java 17 or newer is needed and none was found: install it, or set JAVA_HOME." >&2; exit 1; }

# Root on a machine with apt gets it; others are told what to install.
.PHONY: chromium
chromium:
	@mkdir -p build
	@[ -x "$${CHROMIUM:-/nowhere}" ] || command -v chromium >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Chromium" && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >build/chromium.log; } || { \
		echo "Chromium is needed and none was found: install it, or name it with CHROMIUM=..." >&2; exit 1; }

# Each worker starts a Kafka and a Spark of its own, once, for the files that it takes. There is one more than the two cores of
# a small machine, as tests often wait for leases. The order is that of tests/real/conftest.py: by their number of tests, files of
# one long test each would come last. A worker that crashes ends the run: pytest-xdist 3.8 waits for ever for what it gave to a
# new one. An interrupted run still shows what has failed.
REAL_TESTS_WITHIN ?= 60m
REAL_TESTS = timeout --foreground --signal INT --kill-after 60 $(REAL_TESTS_WITHIN) \
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 15 --junitxml build/real-tests.xml tests/real

.PHONY: test
test: java $(READY) ## all tests: the fast ones, then those on a real Kafka, Spark, Dagster and Postgres
	$(BIN)/pytest -n auto tests/fast
	$(BIN)/python -m tests.simulator --seeds 10000
	$(BIN)/python -m tests.outbox_simulator --seeds 10000
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)
	$(REAL_TESTS)

.PHONY: test-fast
test-fast: $(READY) ## the tests that need no Java and no service, but for a few that take seconds each
	$(BIN)/pytest -n auto -m "not thorough" tests/fast

.PHONY: test-real
test-real: java $(READY) ## the tests on real services, which they start and stop themselves
	$(REAL_TESTS)

.PHONY: test-ui
test-ui: java chromium $(READY) ## Dagster's pages in a real Chromium; what they showed is in build/ui
	$(BIN)/pytest tests/ui

.PHONY: simulate simulate-outbox soak soak-faults soak-outbox soak-coordinator mutants
FIRST ?= 0
SEEDS ?= 10000
simulate: $(READY) ## whole groups under faults, on a virtual clock: FIRST=0 SEEDS=10000
	$(BIN)/python -m tests.simulator --first $(FIRST) --seeds $(SEEDS)

simulate-outbox: $(READY) ## the outbox's harvest and election under faults, on a virtual clock: FIRST=0 SEEDS=10000
	$(BIN)/python -m tests.outbox_simulator --first $(FIRST) --seeds $(SEEDS)

soak: $(READY) ## a million seeds, then 200 runs of each kind on real brokers; may be stopped, and goes on where it was
	$(BIN)/python -m tests.simulator --seeds 1000000 --results tests/results/simulator.jsonl
	@$(MAKE) --no-print-directory soak-faults
	@$(MAKE) --no-print-directory soak-outbox
	@$(MAKE) --no-print-directory soak-coordinator

RUNS ?= 200
soak-faults: java $(READY) ## groups of real members under faults, on three real brokers: RUNS=200
	$(BIN)/python -m tests.faults --seeds $(RUNS) --results tests/results/faults.jsonl
	$(BIN)/python -m tests.faults --table tests/results/faults.jsonl

soak-outbox: java $(READY) ## outboxes under faults, on three real brokers and a real PostgreSQL: RUNS=200
	$(BIN)/python -m tests.outbox_faults --seeds $(RUNS) --results tests/results/outbox_faults.jsonl
	$(BIN)/python -m tests.outbox_faults --table tests/results/outbox_faults.jsonl

soak-coordinator: java $(READY) ## coordinated groups under faults, on three real brokers: RUNS=200
	$(BIN)/python -m tests.coordinator_faults --seeds $(RUNS) --results tests/results/coordinator_faults.jsonl
	$(BIN)/python -m tests.coordinator_faults --table tests/results/coordinator_faults.jsonl

mutants: $(READY) ## the library broken in one way after another: the simulator must catch each
	$(BIN)/python -m tests.simulator.mutants
	$(BIN)/python -m tests.outbox_simulator.mutants

.PHONY: fuzz fuzz-soak
FUZZ_SECONDS ?= 60
fuzz: $(READY) ## arbitrary bytes against the parser, the world state and the reader of snapshots: FUZZ_SECONDS=60
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

fuzz-soak: $(READY) ## the same for a hundred million records; may be stopped, and goes on where it was
	$(BIN)/python -m tests.fuzz --seconds 600 --records 100000000 --results tests/results/fuzz.jsonl

.PHONY: demo
demo: java $(READY) ## the whole thing on 336,776 real flights: a run is killed, found and redone
	$(BIN)/python -m demo

.PHONY: dev
dev: java $(READY) ## the Dagster UI on this deployment, with a Kafka beside it
	$(BIN)/python -m demo.dev

.PHONY: bench
bench: $(READY) ## lists the benchmarks (python -m benchmarks NAME --json runs one)
	@$(BIN)/python -m benchmarks

.PHONY: lint lint-style lint-types lint-layers lint-tree
lint: lint-style lint-types lint-layers lint-tree ## style, types, the layers of the house, what must not be committed

lint-style: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

lint-types: $(READY)
	$(BIN)/mypy $(SOURCES)

lint-layers: $(READY)
	$(BIN)/lint-imports

lint-tree: $(READY)
	$(BIN)/python -m tools.check_tree
	$(BIN)/python -m tools.check_citations

# Not part of lint yet: the texts that it finds are being written again.
.PHONY: lint-language
lint-language: $(READY) ## words that the texts do not use, and public docstrings that lack a part
	$(BIN)/python -m tools.check_language
	$(BIN)/python -m tools.check_docstrings
	$(BIN)/ruff check --preview --select D417,DOC102,DOC202,DOC403 --config 'lint.pydocstyle.convention = "google"' marshal_dagster

.PHONY: format
format: $(READY) ## formats the code and mends what ruff can mend
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: docs
docs: $(READY) ## the documentation in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

.PHONY: wheel
wheel: $(READY) ## the wheel in build/wheel, checked to hold nothing but the library
	@rm -rf build/wheel && mkdir -p build
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(BIN)/python -m tools.check_wheel build/wheel

$(UV_READY): Makefile
	@$(need_python)
	@mkdir -p build
	@$(call in_turn,build) "$(PYTHON)" -m venv build/uv
	@$(call in_turn,build) build/uv/bin/pip install --quiet uv==$(UV_VERSION)
	@touch $@

.PHONY: lock
lock: $(UV_READY) ## makes both locks again from pyproject.toml (UPGRADE=1: with the newest versions)
	$(LOCK) --group dev --output-file requirements.lock >/dev/null
	$(LOWEST_DIRECT)
	$(LOWEST_LOCK) --output-file requirements-lowest.lock >/dev/null

.PHONY: lock-check
lock-check: $(UV_READY) ## the locks are what pyproject.toml asks for, which also resolves on 3.12 and 3.13
	@mkdir -p build/locks
	@cp requirements.lock requirements-lowest.lock build/locks/
	@$(LOCK) --group dev --output-file build/locks/requirements.lock >/dev/null
	@$(LOWEST_DIRECT)
	@$(LOWEST_LOCK) --output-file build/locks/requirements-lowest.lock >/dev/null
	@for lock in requirements.lock requirements-lowest.lock; do \
		diff -u $$lock build/locks/$$lock || { echo "$$lock is out of date: make lock" >&2; exit 1; }; done
	@for version in 3.12 3.13; do $(COMPILE) --group dev --python-version $$version >/dev/null; done
	@echo "The locks are up to date; the dependencies resolve on 3.12 and 3.13 too"

.PHONY: test-lowest
test-lowest: $(UV_READY) ## the fast tests with the lowest versions that pyproject.toml allows
	@$(need_python)
	@$(UV) venv --quiet --clear --python "$(PYTHON)" $(LOWEST)
	@$(UV) pip install --quiet --python $(LOWEST) --require-hashes -r requirements-lowest.lock
	@$(UV) pip install --quiet --python $(LOWEST) --no-deps .
	$(LOWEST)/bin/python -m tools.import_all
	@# import-linter is not there: its own needs would raise the versions that are to be low.
	@# Old packages may call what newer ones beneath them deprecate.
	$(LOWEST)/bin/python -m pytest -n auto -m "not thorough" -W ignore::DeprecationWarning tests/fast --ignore tests/fast/test_import_contracts.py

.PHONY: clean
clean: ## removes what was built and cached here, but not .venv
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
