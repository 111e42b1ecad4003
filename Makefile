# Everything runs in .venv, which is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test check soak clean

.venv/made: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxshard needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/demo: .venv/made
	$(PIP) --editable '.[demo]'
	@touch $@

.venv/check: .venv/made
	$(PIP) --editable '.[check,demo]'
	@touch $@

demo: .venv/demo
	$(BIN)/python examples/demo.py

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

soak: .venv/check
	$(BIN)/python -m pytest -m soak

clean:
	rm -rf .venv build dist demo
