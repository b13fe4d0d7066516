# Everything sets itself up: a virtual environment with the pinned versions of constraints.txt.
VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin

# The tests on a GPU run by the interpreter that PYTHON names, where it is given, as it is: nothing is installed.
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(RUN)/python,$(PYTHON))
GPU_NEEDS := $(if $(filter file,$(origin PYTHON)),$(VENV)/.installed)

.PHONY: train train-smollm2 test test-full test-gpu lint check clean help

help:
	@echo "make train   the quickstart: asynchronous GRPO on this machine, about a minute after installation"
	@echo "make train-smollm2   a real chat model, trained on sums on this machine"
	@echo "make test    all tests that need no GPU"
	@echo "make test-full   also those that take minutes"
	@echo "make test-gpu    those that need a GPU; HALF=1 or HALF=2 for one of two halves of nine minutes at most"
	@echo "make lint    formatting, lint, types, layers"

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once; a few minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: $(VENV)/.installed
	$(RUN)/python examples/quickstart/prepare.py runs/quickstart-model
	$(RUN)/headrace train examples/quickstart/quickstart.toml --overwrite

train-smollm2: $(VENV)/.installed
	$(RUN)/python examples/smollm2/prepare.py runs/smollm2-model
	$(RUN)/headrace train examples/smollm2/cpu.toml --overwrite
	$(RUN)/python benchmarks/smollm2.py runs/smollm2-cpu

test: $(VENV)/.installed
	$(RUN)/python -m pytest tests --ignore=tests/gpu -m "not full" --numprocesses=2 --dist=worksteal $(ARGS)

test-full: $(VENV)/.installed
	$(RUN)/python -m pytest tests --ignore=tests/gpu --numprocesses=2 --dist=worksteal $(ARGS)

test-gpu: $(GPU_NEEDS)
	$(GPU_PYTHON) tests/gpu/run.py $(if $(HALF),--half $(HALF))

lint: $(VENV)/.installed
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/python .ci/layers.py
	$(RUN)/python benchmarks/tables.py --check

check: lint test

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
