# The two commands of the README, and what they stand on. Each sets up its own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: quickstart test test-slow lint clean

quickstart: .venv/runtime
	$(BIN)/python experiments/train.py --config=configs/quickstart.py

test: .venv/dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: .venv/dev
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest -m slow

lint: .venv/dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

.venv/runtime: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	touch $@

.venv/dev: setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
