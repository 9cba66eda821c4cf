PYTHON ?= python3.11
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/python -m pytest
OLDEST := 5.4.0

.PHONY: help install demo test test-all test-compat bench bench-quick bench-recovery reference figures check clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed  ## create the virtual environment and install everything into it

# torch comes first and alone, at the version that the constraints name; the rest then finds it there.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: install  ## train a small GPT-2, convert it three ways, bring it back, evaluate and report, offline
	HF_HUB_OFFLINE=1 $(BIN)/python -m examples.demo

test: install  ## run the tests, with a sample of the heavy matrix
	$(PYTEST) -n $(WORKERS)

test-all: install  ## run every test there is
	$(PYTEST) -n $(WORKERS) --full

test-compat: $(VENV)-oldest/.installed  ## run the tests on the oldest transformers that is supported
	HF_HUB_OFFLINE=1 $(VENV)-oldest/bin/python -m pytest -n $(WORKERS)

$(VENV)-oldest/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --requirement $(CONSTRAINTS)
	$(VENV)-oldest/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]' transformers==$(OLDEST)
	touch $@

bench: install  ## measure everything, some 40 minutes, and write benchmarks/RESULTS.md
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[bench]'
	$(BIN)/python -m benchmarks

bench-quick: install  ## a sample of it, in under three minutes
	$(BIN)/python -m benchmarks --quick

bench-recovery: install  ## convert real checkpoints and see how they recover; hours, and can be cut and gone on with
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plots]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.recovery

reference: install  ## write docs/schemes.md from the code
	mkdir -p docs
	$(BIN)/python -m hf_posenc.reference > docs/schemes.md

# CHECKPOINTS: --llama DIR --data TEXT.txt --bert DIR, for the figures of real checkpoints
figures: install  ## draw the figures of the documents, some minutes
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[plots]'
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make_figures.py $(CHECKPOINTS)
	HF_HUB_OFFLINE=1 $(BIN)/python docs/make_length_curve.py

check: install  ## lint, types, tests; wheel and sdist in an empty environment, used outside of the checkout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test
	sh tests/package_smoke.sh $(PYTHON) $(VENV) $(CONSTRAINTS)

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VENV)-oldest build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
