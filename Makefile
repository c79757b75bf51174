# `make run` and `make test` are all a fresh clone needs. Everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONHASHSEED := 0

.PHONY: run test test-long lint bench clean

run: .venv/installed
	$(BIN)/ratchet run

test: .venv/installed-dev lint
	$(BIN)/python -m pytest

test-long: .venv/installed-dev
	$(BIN)/python -m pytest -m long

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks.bench

.venv/installed: pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Ratchet needs Python 3.11 or 3.12, not {v[0]}.{v[1]}; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: about 2 GB, two to five minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .ratchet build *.egg-info
