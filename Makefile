PYTHON ?= python3.11
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
WORKERS ?= 2
PIP_INSTALL := -m pip install --quiet --constraint $(CONSTRAINTS) --editable
PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest
OLDEST := 5.4.0
# The release that builds of torch 2.13 for GPUs require.
TRITON := 3.7.1
TOOL_TESTS := tests/integration/test_trl.py tests/integration/test_sentence_embedders.py \
	tests/integration/test_model_kwargs.py tests/integration/test_ecosystem.py tests/evaluation/test_harness.py \
	tests/cli/test_other_programs.py tests/cli/test_autoload.py tests/cli/test_export.py tests/checkpoints/test_export.py \
	tests/examples/test_notebooks.py tests/examples/test_compare_schemes.py
MEASURED := hf_posenc/schemes/*,hf_posenc/attention/*,patches/*

.PHONY: help install test test-all test-tools test-gallery test-gpu-kernels test-reliability test-compat test-upstream \
	coverage lint format check package docs docs-serve reference census figures demo compare notebooks bench bench-quick bench-gpu \
	bench-recovery gpu-report clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/.installed  ## create .venv and install the package with everything needed for development

# torch is installed first, at the version pinned in the constraints, so that nothing later pulls in another build.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement $(CONSTRAINTS)
	$(BIN)/python $(PIP_INSTALL) '.[dev]'
	touch $@

test: install  ## run the fast tests; run these for every change
	$(PYTEST) -n $(WORKERS)

test-all: install  ## run all tests, including the slow ones
	$(PYTEST) -n $(WORKERS) -m 'slow or not slow'

test-tools: install  ## run the tests, slow ones too, with TRL, serving, sentence-transformers, lm-eval and notebooks; no skips
	HF_POSENC_NO_SKIPS=1 $(PYTEST) -n $(WORKERS) -m 'slow or not slow' $(TOOL_TESTS)

# Needs a browser based on Chromium: `playwright install chromium`, or set CHROME.
test-gallery: docs  ## look at the gallery of the documentation in a browser
	HF_POSENC_NO_SKIPS=1 $(PYTEST) -m 'slow or not slow' tests/docs/test_gallery.py

# GPU=a100 generates the kernels of an A100, and ONLY="-k t5" runs a part, ONLY="-k triton" the package's own kernels.
test-gpu-kernels: install  ## run GPU kernels by Triton's interpreter, and assemble our own; no GPU, Linux only, takes long
	$(BIN)/python $(PIP_INSTALL) '.[triton]' triton==$(TRITON)
	HF_POSENC_FAKE_GPU=$(or $(GPU),h100) TRITON_INTERPRET=1 $(PYTEST) -n $(WORKERS) tests/gpu_harness/interpreted $(ONLY)
	$(PYTEST) -n $(WORKERS) -m 'slow or not slow' tests/gpu_harness/test_triton_assembly.py

# ONLY="kills fuzz" counts some of the promises; the others keep their last counts.
test-reliability: install  ## run the tests behind docs/reliability.md and record their counts; takes hours
	$(BIN)/python -m scripts.reliability --workers $(WORKERS) $(if $(ONLY),--only $(ONLY))
	$(BIN)/python -m scripts.fill_pages

test-compat: $(VENV)-oldest/.installed  ## run the fast tests on the oldest supported transformers
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-oldest/bin/python -m pytest -n $(WORKERS)

$(VENV)-oldest/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(VENV)-oldest/bin/python || $(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --requirement $(CONSTRAINTS)
	$(VENV)-oldest/bin/python $(PIP_INSTALL) '.[test]' transformers==$(OLDEST)
	touch $@

# SUITE is a checkout of https://github.com/huggingface/transformers of about the installed release, and
# UPSTREAM="--models gpt2 bert --schemes alibi t5" runs a part.
test-upstream: install  ## run transformers' own model tests on variants and compare with stock; takes hours, rerun to resume
	$(BIN)/python $(PIP_INSTALL) '.[upstream]'
	$(BIN)/python -m scripts.upstream $(SUITE) --workers $(WORKERS) $(UPSTREAM)

coverage: install  ## measure line coverage of the fast tests; fails below 90% in schemes, attention and patches
	$(PYTEST) -n $(WORKERS) --cov --cov-report=term
	$(BIN)/coverage report --include='$(MEASURED)' --fail-under=90

lint: install  ## run ruff, mypy and import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install  ## fix what ruff can fix, and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

package: install  ## build the sdist and wheel, then install and use each in an empty environment
	sh tests/package_smoke.sh $(PYTHON) $(VENV) $(CONSTRAINTS)

check: lint test docs package  ## run everything that CI runs on one Python version

docs: install  ## build the documentation into site/; warnings are errors
	$(BIN)/python $(PIP_INSTALL) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: install  ## serve the documentation locally and rebuild it on changes
	$(BIN)/python $(PIP_INSTALL) '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

reference: install  ## generate docs/schemes.md and docs/gallery.md from the code, and the measurements and options in all pages
	$(BIN)/python -m scripts.make_scheme_reference
	$(BIN)/python -m scripts.make_gallery
	$(BIN)/python -m scripts.fill_pages

census: install  ## generate docs/families.md from the installed transformers; under a minute
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.make_census

# CHECKPOINTS="--llama DIR --bert DIR --data TEXT.txt" also redraws the figures of real checkpoints.
figures: install  ## redraw the figures of the documentation; takes some minutes
	$(BIN)/python $(PIP_INSTALL) '.[plots]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.make_figures $(CHECKPOINTS)
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.make_length_curve
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.make_gallery --draw

demo: install  ## train a small GPT-2, convert it to three schemes, fine-tune and evaluate; offline, a few minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m examples.demo

compare: install  ## train five schemes from scratch and compare them in a table and figures; offline, a few minutes
	$(BIN)/python $(PIP_INSTALL) '.[plots]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m examples.compare_schemes

notebooks: install  ## run the notebooks in examples/ and save their outputs in them; offline, a few minutes
	$(BIN)/python $(PIP_INSTALL) '.[notebooks]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.run_notebooks

bench: install  ## run all benchmarks (about 40 minutes) and write benchmarks/RESULTS.md
	$(BIN)/python $(PIP_INSTALL) '.[bench]'
	$(BIN)/python -m benchmarks

bench-quick: install  ## run a sample of the benchmarks in under three minutes
	$(BIN)/python -m benchmarks --quick

bench-gpu: install  ## measure every attention path on a GPU and write benchmarks/GPU_SPEED.md
	$(BIN)/python -m benchmarks.gpu

# RECOVERY="--only stories260k/t5 --budget-minutes 30" runs a part; RECOVERY=--list shows what would be run.
bench-recovery: install  ## measure how much training converted checkpoints need; takes hours, rerun to resume
	$(BIN)/python $(PIP_INSTALL) '.[plots]'
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.recovery $(RECOVERY)

# REPORT="--only t5" assembles a part.
gpu-report: install  ## assemble GPU kernels, without a GPU, and write benchmarks/GPU.md; Linux only, rerun to resume
	$(BIN)/python $(PIP_INSTALL) '.[triton]' triton==$(TRITON)
	HF_HUB_OFFLINE=1 $(BIN)/python -m scripts.make_gpu_report $(REPORT)

clean:  ## remove everything that the other targets create
	rm -rf $(VENV) $(VENV)-oldest build dist demo comparison site *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis
