.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint clean

# A launcher can be on the PATH and still have no interpreter behind it, so ask it to run.
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

help:
	@echo "make setup   create $(VENV) and install foredraft with its development tools"
	@echo "make demo    see speculative decoding at work (fetches a model of 90 MB once)"
	@echo "make lint    style, types and sizes"
	@echo "make test    lint, then every test with coverage"
	@echo "make clean   remove $(VENV) and all build and test output"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	@echo "== setup: $(VENV) with $(PYTHON); the first time takes a few minutes"
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/foredraft demo

lint: setup
	@echo "== lint: style, types, sizes, pages"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/sizes.py
	$(BIN)/python scripts/render_docs.py --check

test: lint
	@echo "== test: every test, with coverage"
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal --durations=10 --cov --cov-report=term --cov-fail-under=90

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
