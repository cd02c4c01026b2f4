# Everything a contributor runs.  PYTHON chooses the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CONSTRAINTS = constraints.txt

.PHONY: setup serve check check-full test lint protos bench

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# ARGS="--model gemma3-270m --port 50051" passes flags on.
serve: setup
	$(BIN)/python scripts/serve.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: setup
	$(BIN)/python -m pytest -m 'not full'

check: lint test

# Real weights, long traces, soaks: half an hour and more on two cores.
check-full: setup
	$(BIN)/python -m pytest -m full

protos: setup
	$(BIN)/python scripts/build_protos.py

bench: setup
	$(BIN)/python scripts/bench.py
