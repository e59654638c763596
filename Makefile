# What a newcomer types: `make up`, `make test`, `make lint`, `make bench`. Every target sets up what it needs.
#
# Packages come from whatever index pip and uv are configured for on this machine; requirements.txt pins each with
# its hashes. uv is taken from the environment, from PATH, or bootstrapped by pip into .uv/.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup up test test-cluster test-llamacpp lint format drift generate bench requirements clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.omnimodel-ready
CATALOG ?= examples/catalog
# Options passed on: `make up ARGS="--memory 1Gi"`, `make test ARGS="-k ledger"`.
ARGS ?=
# Files of tests that run side by side; most of the time a test waits for processes. 0: one after another, as --pdb needs.
JOBS ?= 3

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP)  ## Make .venv with Python 3.11, the pinned requirements and `omni`

$(STAMP): requirements.txt pyproject.toml .ci/setup
	@PYTHON="$(PYTHON)" sh .ci/setup $(VENV)
	@touch $(STAMP)

up: setup  ## Serve the example catalogue on this machine
	@exec $(BIN)/omni up $(CATALOG) $(ARGS)

test: setup lint drift  ## Lint, drift checks, then every test but those that need a Kubernetes node
	$(BIN)/pytest -m "not cluster_node" -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-cluster: setup  ## The tests on a real Kubernetes node; needs root, and Go for the first build
	$(BIN)/pytest -m cluster_node $(ARGS) || [ $$? -eq 5 ]  # 5: none of the tests that ARGS names needs a node

test-llamacpp: setup  ## The tests with the real llama.cpp, which is compiled first; that takes some minutes
	OMNI_TEST_BUILD=1 $(BIN)/pytest tests/runtime/test_llamacpp.py $(ARGS)

lint: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check operator tests
	$(BIN)/ruff format --check operator tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup  ## Format the code
	$(BIN)/ruff check --fix operator tests
	$(BIN)/ruff format operator tests

drift: setup  ## Fail when a generated file is not what its source says
	$(BIN)/omni crds --check crds
	$(BIN)/omni crds --check charts/omnimodel/files/crds
	$(BIN)/omni crds --policy --check charts/omnimodel/files/policies
	$(BIN)/omni crds --reference --check docs/manifest.md

generate: setup  ## Write the generated files anew
	$(BIN)/omni crds --output crds
	$(BIN)/omni crds --output charts/omnimodel/files/crds
	$(BIN)/omni crds --policy --output charts/omnimodel/files/policies
	$(BIN)/omni crds --reference --output docs/manifest.md

bench: setup  ## Measure swaps, spawns and the gateway on this machine; JSON goes to build/bench
	@mkdir -p build/bench
	$(BIN)/omni bench swap --json build/bench/swap.json $(ARGS)
	$(BIN)/omni bench spawn --json build/bench/spawn.json $(ARGS)
	$(BIN)/omni bench gateway --json build/bench/gateway.json $(ARGS)

requirements: setup  ## Compile requirements.txt from pyproject.toml, with hashes
	$(BIN)/uv pip compile -q --generate-hashes --no-header --python-version 3.11 --extra agent --extra cuda \
		--group dev pyproject.toml -o requirements.txt

clean:  ## Remove the environment and everything built here
	rm -rf $(VENV) .uv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
