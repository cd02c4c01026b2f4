# Everything a contributor runs.  PYTHON chooses the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CONSTRAINTS = constraints.txt
EXTRA = dev

.PHONY: setup serve check check-full test test-device lint protos bench compilers

setup: $(VENV)/.done

$(VENV)/.done: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[$(EXTRA)]'
	touch $@

# ARGS="--model gemma3-270m --port 50051" passes flags on.
serve: setup
	$(BIN)/python scripts/serve.py $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# In three processes: one that has compiled every engine and every kernel runs out of memory maps, and XLA then crashes.
test: setup
	$(BIN)/python -m pytest -m 'not full' --ignore=tests/engine --ignore=tests/kernels
	$(BIN)/python -m pytest -m 'not full' tests/engine
	$(BIN)/python -m pytest -m 'not full' tests/kernels

# The kernels, the device half and the compilers' word alone: run once more on a newer jax with
#   make test-device VENV=.venv-next PYTHON=python3.12 CONSTRAINTS=constraints-next.txt EXTRA=device-test
test-device: setup
	$(BIN)/python -m pytest -m 'not full' tests/kernels tests/device tests/compilers

check: lint test

# Real weights, long traces, soaks: an hour on two cores.  Many processes, for the reason above; a file without such tests
# ends with 5.
FULL = tests/device tests/compilers tests/kernels tests/scripts tests/server $(wildcard tests/engine/test_*.py)
check-full: setup
	@for part in $(FULL); do \
		echo "== $$part"; \
		$(BIN)/python -m pytest -m full $$part; code=$$?; \
		[ $$code -eq 0 ] || [ $$code -eq 5 ] || exit $$code; \
	done

protos: setup
	$(BIN)/python scripts/build_protos.py

bench: setup
	$(BIN)/python scripts/bench.py

# The compilers of TPUs and GPUs, for scripts/plan.py and the tests that check the programs of absent chips.
compilers: setup
	$(BIN)/python scripts/get_compilers.py
