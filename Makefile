# `make` lists the targets. Everything runs in .venv, which `setup` makes once.
#
# On Linux x86, torch from PyPI is the CUDA build (gigabytes). On a machine without a GPU, point pip
# at PyTorch's CPU wheels first (pytorch.org, "Get started", compute platform CPU, shows the index):
#   PIP_EXTRA_INDEX_URL=<that index> make setup
# A pip configuration that already has CPU wheels needs no change.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.moediag-setup
PYTEST_ARGS ?=

export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test wide unit lint docs bench accuracy abroad mutants gpu golden clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with moediag and its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "moediag needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make setup PYTHON=python3.12"; exit 4; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install -y python3-venv"; exit 4; }
	$(PYTHON) -m venv .venv
	@# Modules compile when they are first imported; most never are.
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(STAMP)  ## reproduce and diagnose expert starvation on two CPU ranks
	$(BIN)/moediag run expert-starvation --cpu 2

test: $(STAMP)  ## run all tests except the wide ones (select with PYTEST_ARGS="-k word")
	$(BIN)/python -m pytest -m "not wide" -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

wide: $(STAMP)  ## run the tests over every measured release and family, and all random cases
	$(BIN)/python -m pytest tests -m wide $(PYTEST_ARGS)
	DEEP_TESTS=1 $(BIN)/python -m pytest tests/unit -m "not e2e and not stack" $(PYTEST_ARGS)

unit: $(STAMP)  ## run the tests that launch no rank
	$(BIN)/python -m pytest tests/unit -m "not e2e and not stack" $(PYTEST_ARGS)

lint: $(STAMP)  ## run ruff, mypy --strict and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# .venv-docs has only what builds the site; the pages themselves need no moediag.
.venv-docs: pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) docs/conf.py)
	@touch $@

docs: .venv-docs  ## build the documentation site in build/site; a broken link is an error
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

bench: $(STAMP)  ## measure what moediag costs, as ratios within one run
	$(BIN)/python -m bench

accuracy: $(STAMP)  ## measure how often the diagnosis is right, beside torch's own tools (15 minutes)
	$(BIN)/python -m bench.accuracy

# .venv-abroad has the packages of other people's programs; their checkouts are given by path.
.venv-abroad: bench/abroad/requirements.txt
	$(PYTHON) -m venv $@
	DS_BUILD_OPS=0 $@/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

abroad: $(STAMP) .venv-abroad  ## diagnose faults in programs of others (1 hour; ARGS="--checkouts DIR")
	$(BIN)/python -m bench.abroad --python .venv-abroad/bin/python $(ARGS)

mutants: $(STAMP)  ## mutation-test the modules that decide verdicts (an hour; ARGS="--size 5" for less)
	$(BIN)/python -m bench.mutation $(ARGS)

# Uses .venv if it exists, otherwise $(PYTHON): a machine without a network may have no .venv.
gpu:  ## run the GPU suite on the available GPUs, into reports/gpu (exit code 4 without one)
	@python=$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)); \
	  $$python -c 'import moediag.cli.app' 2>/dev/null || \
	  { echo "$$python lacks moediag's dependencies. Type: make setup"; exit 4; }; \
	  $$python -m bench.gpu

golden: $(STAMP)  ## rewrite the snapshot files under tests/golden and the pages in docs/reference
	MOEDIAG_GOLDEN=write $(BIN)/python -m pytest -q tests/unit/report/test_golden.py tests/unit/reference \
		tests/unit/diagnosis \
		tests/unit/worker/test_verify_comparison.py::test_the_whole_answer tests/unit/worker/test_check.py::test_the_whole_plan

clean:  ## remove .venv, caches and run directories
	rm -rf .venv .venv-abroad .venv-docs moediag-runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist mutants
