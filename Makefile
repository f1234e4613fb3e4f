# Every target does all the set-up it needs. Nothing here needs more than Python 3.10+, make and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= auto
LISTEN ?= 127.0.0.1:9560

.PHONY: demo test bench noise lint generate clean system

demo: $(VENV)/.installed
	$(BIN)/verl-monitor demo --listen $(LISTEN)

test: $(VENV)/.dev system lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

bench: $(VENV)/.dev
	$(BIN)/python -m tests.bench

noise: $(VENV)/.dev
	$(BIN)/python -m tests.bench.noise

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# Rules, runbooks and dashboards are made from the detector specs and committed; the tests compare.
generate: $(VENV)/.dev
	$(BIN)/python -m alerts.pictures
	$(BIN)/python -m alerts.render
	$(BIN)/python -m dashboards.build

# The real Prometheus, Alertmanager and browser of the tests. Installed where that is possible; elsewhere the tests that
# need them are skipped and say so.
system:
	@sh tests/install-system-packages.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
