# `make demo` and `make test` are each the first command in a fresh clone: they need python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_JOBS ?= 2
C_FILES = $(shell find src benchmarks -name '*.[ch]')
FUZZ_JOBS ?= $(shell nproc 2>/dev/null || echo 1)

.PHONY: demo readme test lint types layers unit bench fuzz docs clean install
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/sennit demo

# One after another and not as prerequisites: `make -j` must not mix their output, and the first failure ends it.
test: $(STAMP)
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory layers
	@$(MAKE) --no-print-directory unit
	@echo "== all checks passed"

lint: $(STAMP)
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run -Werror $(C_FILES)

types: $(STAMP)
	@echo "== mypy --strict"
	@$(BIN)/mypy

layers: $(STAMP)
	@echo "== lint-imports"
	@$(BIN)/lint-imports

unit: $(STAMP)
	@echo "== pytest, warnings as errors, $(TEST_JOBS) at a time"
	@$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile

fuzz: $(STAMP)
	$(BIN)/python -m pytest -q --hypothesis-profile=fuzz --timeout=0
	$(BIN)/python benchmarks/collective/fuzz.py --count 100000 --jobs $(FUZZ_JOBS)

# Those that need no other machine and end by themselves; the rest of benchmarks/ says in its first lines how to run it.
BENCHES := startup sim/speed reshard/batch reshard/oracle collective/compile collective/synthesis collective/predict plan/capture

bench: $(STAMP)
	@for name in $(BENCHES); do \
	    echo "== benchmarks/$$name.py"; $(BIN)/python benchmarks/$$name.py || exit 1; \
	done

# -E reads every page anew: a page that was read before would not warn again.
docs: $(STAMP)
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build
	@echo "open docs/_build/index.html"

# Runs the demo and puts what it printed, and its picture, into the README.
readme: $(STAMP)
	$(BIN)/python docs/refresh_readme.py

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/sennit/collective/runtime/*.[ch] src/sennit/reshard/*.c)
	@$(PYTHON) -c 'import sys; sys.exit("sennit needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); } || \
	    { rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }
	@echo "== installing sennit and its tools into $(VENV) (once; a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,jax,hf]"
	@touch $@

clean:
	rm -rf $(VENV) build dist docs/_build sennit-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf src/*.egg-info src/sennit/collective/runtime/*.so src/sennit/reshard/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
