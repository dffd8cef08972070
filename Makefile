# Two commands: `make demo` and `make test`. Each works with Python 3.11 (or 3.10+, PYTHON=...) and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-deep test-floor zoo bench docs lint

$(VENV)/.installed: requirements-dev.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# One thread: the model is so small that a second one costs more in waiting than it brings. ARGS="--recompute true" adds flags.
demo: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python examples/llama/finetune.py --compare $(ARGS)

# In the order of the folders: the slow files, which launch ranks, come first, and small ones fill both workers up.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# All tests, with all of the long proofs of which `make test` runs a slice; see tests/deep.py. Twice as long.
test-deep: $(VENV)/.installed
	TEST_DEEP=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The integrations on the oldest supported transformers, accelerate and PEFT, in .venv-floor.
test-floor:
	PYTHON=$(PYTHON) .ci/floor

# What the probe says of every optimizer class of two large collections, held against real cuts; minutes.
zoo: $(VENV)/.installed
	$(BIN)/python -m pytest tests/ecosystem/zoo_probe.py tests/ecosystem/zoo_memory.py

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.run

# The matrix in docs/backends.md, from the adapters and the rows.
docs: $(VENV)/.installed
	$(BIN)/python -m benchmarks.backends_page

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
