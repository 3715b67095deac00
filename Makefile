# Everything runs from a bare clone with Python >= 3.11, pip and make. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin
# One line a group: the extras that it installs.
EXTRAS_cli := cli
EXTRAS_test := cli,test
EXTRAS_lint := cli,test,lint
EXTRAS_docs := docs
EXTRAS_bench := cli,bench
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two installs into one environment at a time would break it.
.NOTPARALLEL:
.PHONY: help demo reproduce test test-slow lint format size bench bench-scale accuracy beyond bounds docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.stamp-cli ## train, smooth and compare; the report goes to demo/
	$(BIN)/retrodict demo --out demo

reproduce: $(VENV)/.stamp-cli ## the paper's figures and tables, into reproduction/ (half an hour)
	$(BIN)/retrodict reproduce all --out reproduction

test: $(VENV)/.stamp-test ## run the fast tests
	$(BIN)/python -m pytest

# With the compiler's own settings, which users have: the fast tests compile with fewer passes.
test-slow: $(VENV)/.stamp-test ## run the slow and the statistical tests
	XLA_FLAGS= $(BIN)/python -m pytest -m "slow or statistical" --timeout 3600

lint: $(VENV)/.stamp-lint ## check style, format and types; change nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: $(VENV)/.stamp-lint ## mend what can be mended of style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

size: ## count code lines, files, names, imports and long functions
	$(PYTHON) benchmarks/size.py --by-package

bench: $(BENCH_VENV)/.stamp-bench ## time retrodict and its peers in one table (half an hour), and write docs/speed.md
	$(BENCH_VENV)/bin/python benchmarks/run.py
	$(BENCH_VENV)/bin/python benchmarks/speed_page.py

bench-scale: $(BENCH_VENV)/.stamp-bench ## time long series, large batches and several devices, and write docs/scale-measured.md
	$(BENCH_VENV)/bin/python benchmarks/scale.py inference batches dimensions --float32 --batch 64 --rows 1000 10000 100000 --out benchmarks/results/scale-growth.json
	$(BENCH_VENV)/bin/python benchmarks/scale_devices.py --out benchmarks/results/scale-devices-cpu.json
	$(BENCH_VENV)/bin/python benchmarks/scale_disk.py --out benchmarks/results/scale-disk.json
	$(BENCH_VENV)/bin/python benchmarks/scale_shares.py --out benchmarks/results/scale-shares.json
	$(BENCH_VENV)/bin/python benchmarks/scale.py remat --float32 --rows 1000 4000 16000 64000 --out benchmarks/results/scale-remat.json
	$(BENCH_VENV)/bin/python benchmarks/scale_page.py

accuracy: $(VENV)/.stamp-test ## fit the families to the paper's models and grade them (an hour)
	$(BIN)/python benchmarks/accuracy.py --out benchmarks/results/accuracy.json

beyond: $(VENV)/.stamp-test ## train, grade, time and correct the families whose paths are drawn (two hours)
	$(BIN)/python benchmarks/beyond.py --folder beyond
	$(BIN)/python benchmarks/beyond.py --folder beyond --collect benchmarks/results/beyond.json

bounds: $(VENV)/.stamp-test ## put every error bound to the test, on thousands of models (an hour)
	$(BIN)/python benchmarks/bounds_finite.py --out benchmarks/results/bounds-finite.json
	$(BIN)/python benchmarks/bounds.py --figures docs/images

docs: $(VENV)/.stamp-docs ## build the documentation into docs/_build/html
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

clean: ## remove environments, caches and what was built
	rm -rf $(VENV) $(BENCH_VENV) docs/_build demo reproduction reproduction-quick beyond build dist
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -d benchmarks ]; then find benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +; fi

# An environment is made once; a group is installed again only when its pins change. `particles`, of
# which two data sets are read, asks for an older NumPy than it needs.
$(VENV)/.stamp-venv $(BENCH_VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "retrodict needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	@touch $@

$(VENV)/.stamp-%: $(PINS) | $(VENV)/.stamp-venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS_$*)]'
	$(if $(filter test,$*),$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps particles)
	@touch $@

$(BENCH_VENV)/.stamp-%: $(PINS) | $(BENCH_VENV)/.stamp-venv
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS_$*)]'
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps particles
	@touch $@
