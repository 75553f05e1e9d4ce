# Two commands do everything: `make demo` and `make test`. Both first make the virtual environment that they need.
# `make quick` runs the tests of the parts and some of the whole, in about two minutes; `make test-whole` all cases of all
# tests, of which `make test` runs some.
# `make coverage` runs the tests of `make test` and tells which lines and branches none of them reaches.
# `make docs` builds the pages of docs as a site, in build/site; a warning is an error.
# `make test-oldest` tests with the oldest version of Lightning that is supported, in both of its trees.
PYTHON ?= python3
VENV ?= .venv
# Where there is no NVIDIA GPU, this version of torch comes first: the newest one brings gigabytes of CUDA with it.
# An index or a folder of wheels that pip knows may hold a CPU build of it.
CPU_TORCH ?= torch==2.13.0

# The oldest Lightning and msgspec. Of torch, the oldest version that is supported has no CPU build on PyPI:
# `make test-oldest OLDEST_TORCH=torch==2.6.0` brings gigabytes of CUDA with it.
OLDEST_VENV ?= .venv-oldest
OLDEST_TORCH ?= $(CPU_TORCH)
OLDEST_LIGHTNING := lightning==2.6.4 pytorch-lightning==2.6.4 msgspec==0.19.0

# Parts, and of the whole what finds most.
QUICK := tests/engine tests/plan tests/held tests/setup tests/estimating tests/test_exactness.py tests/test_interleaving.py tests/test_refusals.py \
	tests/test_logs.py tests/test_documents.py tests/test_host_budget.py tests/test_in_memory.py

export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
# A process a core, and in each one thread: more would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4

# The modules of these folders have equal names, so that each folder takes a run of its own.
TYPES := $(BIN)/mypy && for folder in offload paper realworld; do $(BIN)/mypy benchmarks/$$folder || exit 1; done

.PHONY: demo test quick test-whole coverage docs test-oldest clean

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/train_gpt.py --picture build/demo/step.png

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(TYPES)
	$(BIN)/lint-imports
	$(PYTEST) -m "not gpu"

quick: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not gpu" --ignore tests/engine/step/test_races.py $(QUICK)

test-whole: $(VENV)/.installed-test
	WHOLE_MATRICES=1 $(PYTEST) -m "not gpu"

coverage: $(VENV)/.installed-test
	$(PYTEST) -m "not gpu" --cov --cov-report=term --cov-report=html:build/coverage

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/pytest -n auto --maxprocesses 4 -m "not gpu"

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks .coverage*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-torch: | $(BIN)/python
	nvidia-smi > /dev/null 2>&1 || $(BIN)/python -m pip install "$(CPU_TORCH)"
	touch $@

# The package is installed editable, so only a change of what it needs asks for another installation.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.installed-torch
	$(BIN)/python -m pip install --editable ".[$*]"
	touch $@

$(OLDEST_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install "$(OLDEST_TORCH)"
	$(OLDEST_VENV)/bin/python -m pip install --editable ".[test]" "$(OLDEST_TORCH)" $(OLDEST_LIGHTNING)
	touch $@
