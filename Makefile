# `make` lists what there is. Everything runs in .venv, which `setup` makes once.
#
# torch from PyPI is the CUDA build (gigabytes) on Linux x86. On a machine without a GPU, point pip
# at PyTorch's CPU wheels first (pytorch.org, "Get started", compute platform CPU, names the index):
#   PIP_EXTRA_INDEX_URL=<that index> make setup
# A pip configuration that already knows CPU wheels is used as it is.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.moediag-setup
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test wide unit lint bench accuracy mutants gpu golden clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with moediag and its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "moediag needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make setup PYTHON=python3.12"; exit 4; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install -y python3-venv"; exit 4; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)  ## the main job: reproduce and diagnose expert starvation on two CPU ranks
	$(BIN)/moediag run expert-starvation --cpu 2

test: $(STAMP)  ## all tests but the wide ones (PYTEST_ARGS="-k word" chooses)
	$(BIN)/python -m pytest -m "not wide" -n 2 --dist loadfile $(PYTEST_ARGS)

wide: $(STAMP)  ## the same questions to every release and family that was measured
	$(BIN)/python -m pytest tests/e2e -m wide $(PYTEST_ARGS)

unit: $(STAMP)  ## the tests that launch no rank
	$(BIN)/python -m pytest tests/unit -m "not e2e and not stack" $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff, mypy --strict, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## measure what moediag costs, each as a ratio within one run
	$(BIN)/python -m bench

accuracy: $(STAMP)  ## how often the diagnosis is right, beside torch's own tools (a quarter of an hour)
	$(BIN)/python -m bench.accuracy

mutants: $(STAMP)  ## which changes the tests of verdicts notice (hours; ARGS="--every 10")
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'mutmut>=3.8,<4'
	$(BIN)/python -m bench.mutation $(ARGS)

# The environment where there is one, else the Python in use: a machine without a network has no other.
gpu:  ## the GPU suite on whatever GPUs there are, into reports/gpu (exit code 4 without one)
	@python=$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)); \
	  $$python -c 'import moediag.cli.app' 2>/dev/null || \
	  { echo "$$python lacks what moediag needs. Type: make setup"; exit 4; }; \
	  $$python -m bench.gpu

golden: $(STAMP)  ## write the kept pages under tests/golden anew
	MOEDIAG_GOLDEN=write $(BIN)/python -m pytest -q tests/unit/report/test_golden.py

clean:  ## remove .venv, caches and run directories
	rm -rf .venv moediag-runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist mutants
