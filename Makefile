# Everything runs in .venv, which is made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test oldest check soak bench clean

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

.venv/bench: .venv/made
	$(PIP) --editable '.[bench]'
	@touch $@

demo: .venv/demo
	$(BIN)/python examples/demo.py

check: .venv/check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/python -m pytest

# The oldest versions that pyproject.toml allows, together; what looks at values and states.
.venv-oldest/made: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  'jax==0.8.1' 'jaxlib==0.8.1' 'tensorstore==0.1.80' 'numpy==2.0.*' 'ml_dtypes==0.5.0' \
	  'xxhash==3.4.*' 'flax==0.12.5' --editable '.[test]'
	@touch $@

oldest: .venv-oldest/made
	.venv-oldest/bin/python -m pytest -q -W default tests/test_leaves.py tests/test_states.py \
	  tests/test_placement.py tests/test_mismatch.py tests/test_format.py tests/test_resume_manager.py

soak: .venv/check
	$(BIN)/python -m pytest -m soak

# BENCH='--quick', BENCH='--only save,load'; BENCH=--help says what else there is.
bench: .venv/bench
	$(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf .venv .venv-oldest build dist demo benchmarks/results bench-*
