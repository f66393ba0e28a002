# Needs Python 3.11, Java 17, make and git. Every target sets up what else it uses.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# Without stored bytecode each of the tests' hundreds of Python processes would compile Dagster and Spark's client again (2 s).
unexport PYTHONDONTWRITEBYTECODE

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

# uv keeps the versions of an existing lock if possible. The lowest versions are therefore resolved without a lock.
LOWEST_DIRECT = rm -f $(LOWEST).txt && $(COMPILE) --group test --python-version 3.11 --no-header --no-annotate \
	--no-emit-index-url --no-emit-find-links --no-deps --resolution lowest-direct --output-file $(LOWEST).txt >/dev/null
LOWEST_LOCK = $(LOCK) --group test --constraint $(LOWEST).txt

# Concurrent makes in one checkout take turns at an environment. Without flock, do not run them concurrently.
in_turn = $(if $(shell command -v flock),flock $(1))

define need_python
if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed, but was not found: install it, or set PYTHON=..." >&2; exit 1; fi
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 or newer is needed, but $(PYTHON) is $$("$(PYTHON)" -V 2>&1): set PYTHON=... to another one" >&2; exit 1; }
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) lacks the venv module: install it (Debian: python3-venv), or set PYTHON=... to another one" >&2; exit 1; }
endef

.PHONY: help
help: ## prints this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: venv
venv: $(READY) ## creates the environment .venv, exactly as requirements.lock specifies

$(READY): requirements.lock pyproject.toml | $(UV_READY)
	@$(need_python)
	@echo "Setting up .venv (the first time takes some minutes and 2 GB)"
	@mkdir -p .venv
	@[ -x $(BIN)/pip ] || $(call in_turn,.venv) "$(PYTHON)" -m venv .venv
	@$(call in_turn,.venv) $(UV) pip install --quiet --python .venv --require-hashes -r requirements.lock
	@$(call in_turn,.venv) $(UV) pip install --quiet --python .venv --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: java
java:
	@[ -x "$${JAVA_HOME:-/nowhere}/bin/java" ] || command -v java >/dev/null || { \
		echo "Java 17 or newer is needed, but was not found: install it, or set JAVA_HOME." >&2; exit 1; }

# Installs Chromium if the user is root and apt exists; otherwise prints what to install.
.PHONY: chromium
chromium:
	@mkdir -p build
	@[ -x "$${CHROMIUM:-/nowhere}" ] || command -v chromium >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Chromium" && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >build/chromium.log; } || { \
		echo "Chromium is needed, but was not found: install it, or set CHROMIUM=..." >&2; exit 1; }

# Installs MariaDB's server in the same way. Debian's small package has no service, so nothing is started.
.PHONY: mariadb
mariadb:
	@mkdir -p build
	@[ -x "$${MARIADBD:-/nowhere}" ] || command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing MariaDB" && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends mariadb-server-core >build/mariadb.log; } || { \
		echo "MariaDB's server is needed, but was not found: install mariadb-server-core, or set MARIADBD=..." >&2; exit 1; }

# Fetches promtool out of Debian's package of Prometheus. It is not installed, because its service would start.
.PHONY: promtool
PROMTOOL_AT = $${PROMTOOL:-$$(command -v promtool || echo build/prometheus/promtool)}
promtool:
	@mkdir -p build/prometheus
	@[ -x "$(PROMTOOL_AT)" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Fetching promtool" && \
		apt-get update -qq && cd build/prometheus && apt-get download -qq prometheus >download.log 2>&1 && \
		dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin/promtool && rm prometheus_*.deb; } || { \
		echo "promtool is needed, but was not found: install Prometheus, or set PROMTOOL=..." >&2; exit 1; }

# Each worker starts its own Kafka and Spark once, for all files that it runs. There are three workers for the two cores of a
# small machine, because tests often wait for leases. tests/real/conftest.py sets the order of the files: sorted by their number
# of tests, files with a single long test would run last. A worker that crashes ends the run, because pytest-xdist 3.8 would wait
# forever for the tests that it gives to a new one. An interrupted run still shows which tests have failed.
REAL_TESTS_WITHIN ?= 60m
REAL_TESTS = timeout --foreground --signal INT --kill-after 60 $(REAL_TESTS_WITHIN) \
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 15 --junitxml build/real-tests.xml \
	$(call tests_in,real)

# With PART=sinks only the tests of that part of the library run (tests/parts.py lists the parts).
PART ?=
tests_in = $(if $(PART),$(or $(shell $(BIN)/python -m tests.parts $(PART) $(1)),$(error PART is not a part: see tests/parts.py)),tests/$(1))
in_part = $(or $(if $(PART),,all),$(filter $(1),$(PART)))

# Each mutant is caught within these seeds (docs/verification/proof.md). `make soak` and `make fuzz-soak` run for hours.
TESTED_SEEDS := 6100
TESTED_OUTBOX_SEEDS := 2500
TESTED_FUZZ_SECONDS := 20

.PHONY: test test-without-services
test: java mariadb promtool test-without-services test-real ## runs all tests, or those of a part: PART=sinks (the fast ones, then those with real services)

test-without-services: $(READY) ## runs all fast tests, the simulators and the fuzzer
	$(BIN)/pytest -n auto --dist worksteal --junitxml build/fast-tests.xml $(call tests_in,fast)
	$(if $(call in_part,coordination batches),$(BIN)/python -m tests.simulator --seeds $(TESTED_SEEDS))
	$(if $(call in_part,outbox),$(BIN)/python -m tests.outbox_simulator --seeds $(TESTED_OUTBOX_SEEDS))
	$(if $(call in_part,coordination coordinator outbox),$(BIN)/python -m tests.fuzz --seconds $(TESTED_FUZZ_SECONDS))

.PHONY: test-fast
test-fast: $(READY) ## runs the tests that need neither Java nor a service, except those that take 0.1 s or more each
	$(BIN)/pytest -n auto --dist worksteal -m "not slow and not thorough" $(call tests_in,fast)

.PHONY: test-real
test-real: java mariadb promtool $(READY) ## runs the tests with real services, which they start and stop themselves
	$(REAL_TESTS)

ROUNDS ?= 20
.PHONY: test-stress
test-stress: java promtool $(READY) ## runs each test twenty times beside four busy processes: ROUNDS=20 PART=... FREEZE=1; continues after an interruption
	$(BIN)/python -m tests.stress fast --rounds $(ROUNDS) $(if $(PART),--part $(PART)) $(if $(FREEZE),--freeze)
	$(BIN)/python -m tests.stress real --rounds $(ROUNDS) $(if $(PART),--part $(PART)) $(if $(FREEZE),--freeze)

# Each version has an environment of its own in build/platforms. PySpark is built from source once for each version.
PLATFORMS = UV=$(CURDIR)/$(UV) $(BIN)/python -m tests.platforms
.PHONY: test-platforms test-pythons test-dagsters test-brokers docs-platforms
test-platforms: java mariadb $(READY) $(UV_READY) ## runs tests on each Spark version, then the tutorial: VERSIONS="3.5 4.2" SHORT=1
	$(PLATFORMS) spark $(VERSIONS) $(if $(SHORT),--short) $(if $(CI),--keep-results)
	$(if $(VERSIONS)$(SHORT),,$(PLATFORMS) tutorial)

test-pythons: $(READY) $(UV_READY) ## runs the fast tests on each Python from 3.11 on that is installed: VERSIONS=3.13 SHORT=1
	$(PLATFORMS) python $(VERSIONS) $(if $(SHORT),--short) $(if $(CI),--keep-results)

test-dagsters: $(READY) $(UV_READY) ## runs the fast tests with the lowest Dagster that is allowed, and the newest
	$(PLATFORMS) dagster $(VERSIONS)

test-brokers: java $(READY) ## runs a smoke test on brokers from Kafka 2.8 on: VERSIONS=2.8.2
	$(PLATFORMS) broker $(VERSIONS)

docs-platforms: $(READY) ## writes docs/reference/platforms.md from the results of the four targets above
	$(PLATFORMS) page

.PHONY: test-ui
test-ui: java chromium $(READY) ## runs the tests of Dagster's pages in a real Chromium; screenshots are in build/ui
	$(BIN)/pytest tests/ui

.PHONY: simulate simulate-outbox soak soak-faults soak-outbox soak-coordinator soak-sinks mutants
FIRST ?= 0
SEEDS ?= 10000
simulate: $(READY) ## simulates whole groups under faults, with a virtual clock: FIRST=0 SEEDS=10000
	$(BIN)/python -m tests.simulator --first $(FIRST) --seeds $(SEEDS)

simulate-outbox: $(READY) ## simulates the outbox and its election under faults, with a virtual clock: FIRST=0 SEEDS=10000
	$(BIN)/python -m tests.outbox_simulator --first $(FIRST) --seeds $(SEEDS)

soak: $(READY) ## a million seeds, then 200 runs of each kind with real brokers; continues after an interruption
	$(BIN)/python -m tests.simulator --seeds 1000000 --results tests/results/simulator.jsonl
	@$(MAKE) --no-print-directory soak-faults
	@$(MAKE) --no-print-directory soak-outbox
	@$(MAKE) --no-print-directory soak-coordinator

RUNS ?= 200
soak-faults: java $(READY) ## runs groups of real members under faults, with three real brokers: RUNS=200
	$(BIN)/python -m tests.faults --seeds $(RUNS) --results tests/results/faults.jsonl
	$(BIN)/python -m tests.faults --table tests/results/faults.jsonl

soak-outbox: java $(READY) ## runs outboxes under faults, with three real brokers and a real PostgreSQL: RUNS=200
	$(BIN)/python -m tests.outbox_faults --seeds $(RUNS) --results tests/results/outbox_faults.jsonl
	$(BIN)/python -m tests.outbox_faults --table tests/results/outbox_faults.jsonl

soak-coordinator: java $(READY) ## runs coordinated groups under faults, with three real brokers: RUNS=200
	$(BIN)/python -m tests.coordinator_faults --seeds $(RUNS) --results tests/results/coordinator_faults.jsonl
	$(BIN)/python -m tests.coordinator_faults --table tests/results/coordinator_faults.jsonl

SINKS ?= files postgres mariadb delta delta-upsert iceberg kafka
soak-sinks: java $(READY) ## runs groups that write to each sink with Spark under faults: RUNS=200 SINKS="files iceberg"
	@for sink in $(SINKS); do \
		$(BIN)/python -m tests.sink_faults $$sink --seeds $(RUNS) --results tests/results/sinks/$$sink.jsonl && \
		$(BIN)/python -m tests.sink_faults $$sink --table tests/results/sinks/$$sink.jsonl || exit 1; \
	done

mutants: $(READY) ## breaks the library in many ways, each of which the simulators must detect
	$(BIN)/python -m tests.simulator.mutants
	$(BIN)/python -m tests.outbox_simulator.mutants

.PHONY: fuzz fuzz-soak
FUZZ_SECONDS ?= 60
fuzz: $(READY) ## fuzzes the parser, the world state and the reader of snapshots: FUZZ_SECONDS=60
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

fuzz-soak: $(READY) ## fuzzes with a hundred million records; continues after an interruption
	$(BIN)/python -m tests.fuzz --seconds 600 --records 100000000 --results tests/results/fuzz.jsonl

.PHONY: demo
demo: java $(READY) ## runs a whole deployment with 336,776 real flights, in which a run is killed and repeated
	$(BIN)/python -m demo

.PHONY: dev
dev: java $(READY) ## starts the Dagster UI for this deployment, and a Kafka
	$(BIN)/python -m demo.dev

.PHONY: bench
bench: $(READY) ## lists the benchmarks (python -m benchmarks NAME --json runs one)
	@$(BIN)/python -m benchmarks

.PHONY: lint lint-style lint-types lint-layers lint-language lint-tree lint-alerts
lint: lint-style lint-types lint-layers lint-language lint-tree lint-alerts ## checks style, types, layers, language, alerts, and what must not be committed

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

# Checks for terms to avoid, long sentences and wide code in the pages, incomplete documentation of public names, and docstrings that do not match the code.
lint-language: $(READY)
	$(BIN)/python -m tools.check_language --docs
	$(BIN)/python -m tools.check_pages
	$(BIN)/python -m tools.check_docstrings
	$(BIN)/ruff check --preview --select D417,DOC102,DOC202,DOC403 --config 'lint.pydocstyle.convention = "google"' marshal_dagster

lint-alerts: $(READY) promtool
	$(BIN)/python -m tools.check_alerts "$(PROMTOOL_AT)"

.PHONY: format
format: $(READY) ## formats the code and fixes what ruff can fix
	$(BIN)/ruff check --fix-only --quiet $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: dashboards
dashboards: $(READY) ## writes the dashboards in observability/ and the tables of docs/reference/metrics.md from their source
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.metrics_tables

.PHONY: diagrams
diagrams: $(UV_READY) ## renders the Mermaid diagrams of the pages as SVG files
	@$(need_python)
	$(UV) run --quiet --no-project --python "$(PYTHON)" --with mermaidx==0.10.1 python -m tools.diagrams

.PHONY: docs
docs: $(READY) ## builds the documentation in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

.PHONY: wheel
wheel: $(UV_READY) ## builds the wheel in build/wheel, and checks that it contains only the library
	@$(need_python)
	@rm -rf build/wheel && mkdir -p build
	$(UV) build --quiet --wheel --python "$(PYTHON)" --out-dir build/wheel .
	"$(PYTHON)" -m tools.check_wheel build/wheel

# Publishing is a separate step, by hand: see CONTRIBUTING.md.
.PHONY: release
release: $(READY) $(UV_READY) ## builds wheel and sdist in build/release, checks them, installs both on each Python that is installed: VERSIONS=3.12 DRAFT=1
	@rm -rf build/release && mkdir -p build/release
	$(UV) build --quiet --python "$(PYTHON)" --out-dir build/release .
	$(BIN)/python -m tools.release $(if $(DRAFT),--draft) $(UV) build/release $(VERSIONS)

.PHONY: extras
extras: wheel ## measures the installation of the core and of each extra, and writes the table into docs/how-to/install.md
	"$(PYTHON)" -m tools.measure_extras $(UV) build/wheel

$(UV_READY): Makefile
	@$(need_python)
	@mkdir -p build
	@$(call in_turn,build) "$(PYTHON)" -m venv build/uv
	@$(call in_turn,build) build/uv/bin/pip install --quiet uv==$(UV_VERSION)
	@touch $@

.PHONY: free-disk
free-disk: $(UV_READY) ## removes what uv's cache keeps of PySpark, which is built again when it is needed
	$(UV) cache clean pyspark
	$(UV) cache prune

.PHONY: lock
lock: $(UV_READY) ## writes both locks from pyproject.toml (UPGRADE=1: with the newest versions)
	$(LOCK) --group dev --output-file requirements.lock >/dev/null
	$(LOWEST_DIRECT)
	$(LOWEST_LOCK) --output-file requirements-lowest.lock >/dev/null

.PHONY: lock-check
lock-check: $(UV_READY) ## checks that the locks match pyproject.toml, and that it resolves on 3.12 and 3.13
	@mkdir -p build/locks
	@cp requirements.lock requirements-lowest.lock build/locks/
	@$(LOCK) --group dev --output-file build/locks/requirements.lock >/dev/null
	@$(LOWEST_DIRECT)
	@$(LOWEST_LOCK) --output-file build/locks/requirements-lowest.lock >/dev/null
	@for lock in requirements.lock requirements-lowest.lock; do \
		diff -u $$lock build/locks/$$lock || { echo "$$lock is out of date: run make lock" >&2; exit 1; }; done
	@for version in 3.12 3.13; do $(COMPILE) --group dev --python-version $$version >/dev/null; done
	@echo "The locks are up to date; the dependencies resolve on 3.12 and 3.13 too"

PURE := cut_log log_generator
.PHONY: test-lowest
test-lowest: $(UV_READY) ## runs the fast tests with the lowest versions that pyproject.toml allows
	@$(need_python)
	@$(UV) venv --quiet --clear --python "$(PYTHON)" $(LOWEST)
	@$(UV) pip install --quiet --python $(LOWEST) --require-hashes -r requirements-lowest.lock
	@$(UV) pip install --quiet --python $(LOWEST) --no-deps .
	$(LOWEST)/bin/python -m tools.import_all
	@# import-linter is not installed, because its requirements would raise the lowest versions. Those in PURE need no package.
	@# Old packages may call functions that newer packages deprecate.
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal -m "not thorough" -W ignore::DeprecationWarning tests/fast --ignore tests/fast/test_import_contracts.py $(PURE:%=--ignore tests/fast/test_%.py)

.PHONY: clean
clean: ## removes build results and caches, but not .venv
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
