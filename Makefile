# Two commands do everything on a fresh machine with Python >= 3.11: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# uv where it is, which resolves and installs with a fraction of pip's work; else pip, which every Python has.
# uv does not read pip's own configuration (an index of your own, say): make setup UV= takes pip all the same.
UV ?= $(shell command -v uv 2>/dev/null)
PIP = $(if $(UV),VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install,$(VENV)/bin/python -m pip --disable-pip-version-check install)
# Another build of torch: make setup TORCH_INDEX_URL=<address of an index of torch wheels>
TORCH_INDEX_URL ?=
TORCH_VERSION = $(shell sed -n 's/^torch==//p' constraints.txt)
ARGS ?=
# Processes that run tests beside each other, each file in one of them; 0: this one alone.
# One more than the machine has cores, three at least and five at most: tests of systems and of pages wait most of their time.
TEST_PROCESSES ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 3 : n > 4 ? 5 : n + 1)))
# One room alone: make test ROOM=policies
ROOM ?=
TESTS = $(if $(ROOM),$(wildcard tests/unit/$(ROOM)) $(ROOM_TESTS_$(ROOM)),tests)
ROOM_TESTS_actors = tests/actors tests/nodes tests/protocol
ROOM_TESTS_services = tests/e2e
ROOM_TESTS_simulator = tests/sim
# No Ray, no HTTP, no model: within a minute on two free cores.
FAST = $(addprefix tests/unit/,core tokenization kvcache policies predictor estimator) tests/sim
# Where Python is told to write no bytecode, each process of each server under test would compile everything again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 25
ROOMS = core tokenization kvcache policies predictor estimator engine actors simulator services
CODE = farsight/*.py $(ROOMS) lab benchmarks tools tests examples

.PHONY: help setup setup-dev serve test test-fast test-nightly test-package test-clients test-attack test-sanitized test-races coverage check check-types check-rest site format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## Install what serving needs into .venv

setup-dev: $(VENV)/.installed-dev ## Install what development needs as well

serve: setup ## Serve the embedded model on 127.0.0.1:8000 (flags: make serve ARGS="--port 9000")
	@exec $(VENV)/bin/farsight serve $(ARGS)

test: setup-dev ## Run the daily tests: eight minutes on two cores (one room: ROOM=policies)
	$(PYTEST) -m "not gpu and not nightly and not package" $(TESTS) $(ARGS)

# No test of these waits for anything, so a process for each of two cores; schemathesis takes half a second to load in each.
test-fast: setup-dev ## Run the pure tests: no Ray, no HTTP, no model
	$(PYTEST) -p no:schemathesis -n 2 -m "not gpu and not nightly and not torch" $(FAST) $(ARGS)

test-nightly: setup-dev ## Run what `make test` leaves out: within an hour on two cores
	$(PYTEST) -m "nightly and not gpu and not package" $(ARGS)

test-package: setup-dev ## Build the wheel, and the container where an engine runs, and start them
	$(VENV)/bin/python -m pytest -q -m package tests/e2e/test_package.py $(ARGS)

test-clients: ## Install client libraries and run their examples against a running server (URL=, MODEL=)
	examples/run_clients.sh $(or $(URL),http://127.0.0.1:8000/v1) $(or $(MODEL),farsight-embedded)

test-attack: setup-dev ## Attack a server with hostile clients and peers, at full volume: within 10 minutes
	ATTACK_VOLUME=1 FUZZ_VOLUME=20 $(PYTEST) -m "attack and not gpu" tests/attack tests/unit/services/api/test_api_fuzz.py $(ARGS)

# Address and undefined-behaviour sanitizers in the compiled step; Python is not built with them, so they come first.
test-sanitized: setup-dev ## Run the tests of the compiled step with sanitizers in it: takes minutes to compile
	FARSIGHT_SANITIZE=address,undefined ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		$(VENV)/bin/python -m pytest -q -p tests.unit.engine.native.sanitized tests/unit/engine/native $(ARGS)

# Data races of the threads of the compiled step; the two kinds of sanitizer cannot be in one process.
test-races: setup-dev ## Run the tests of the compiled step and its threads with the sanitizer for data races: takes minutes
	FARSIGHT_SANITIZE=thread LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)" \
		$(VENV)/bin/python -m pytest -q -p tests.unit.engine.native.sanitized tests/unit/engine/native $(ARGS)

# The daily tests that start no server and no Ray.
coverage: setup-dev ## Measure the branches that the pure tests take, and write docs/coverage.md
	$(VENV)/bin/coverage erase
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/coverage run -m pytest -q -m "not gpu and not nightly" -n $(TEST_PROCESSES) \
		--dist loadfile --no-loadscope-reorder tests/unit tests/sim tests/protocol $(ARGS)
	$(VENV)/bin/coverage combine -q
	$(VENV)/bin/coverage json -q -o .coverage.json
	$(VENV)/bin/python -m tools.coverage_table .coverage.json docs/coverage.md

# `make -j2 check` runs both halves at once; the types take most of the time.
check: check-types check-rest ## Lint, format, types, dependency rule, prose, site of the documentation

check-types: setup-dev
	$(VENV)/bin/mypy

check-rest: setup-dev
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/lint-imports --no-cache
	$(MAKE) --no-print-directory site
	$(VENV)/bin/python -m tools.prose_check

site: setup-dev ## Write the site of the documentation to build/site: python3 -m http.server -d build/site
	$(VENV)/bin/zensical build --clean --strict
	$(VENV)/bin/python -m tools.reference.site

format: setup-dev ## Format and fix what can be fixed
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist

# torch comes first and alone: whatever resolves it later keeps the build that is here.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Farsight needs Python >= 3.11; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -q torch==$(TORCH_VERSION) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) -q -c constraints.txt -e .
# So that not even the first command compiles them, nor each one where Python is told to write no bytecode.
	$(VENV)/bin/python -m compileall -q $(ROOMS)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -q -c constraints.txt -e '.[dev,redis,bench,minilm]'
	touch $@
