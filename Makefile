# Everything goes through make; CI calls `make test`. A fresh clone needs python3 (3.11+), make and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test lint format bench clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch is installed first and by exact version, so that no other package's range can choose a build for us.
$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or later, or set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --editable '.[test,lint,mpi]'
	touch $@

setup: $(VENV)/.installed  ## Make .venv and install everything.

demo: setup  ## Train the MNIST net with one process and with two ranks, and compare.
	$(BIN)/lockstep demo

# Slurm and a browser come from the system's packages, where we may install them; without them, their tests are skipped and say so. Most tests
# wait for processes to start and to end, so two files go at a time. What fails then is run once more, alone: a test of faults
# and timeouts can fail because its neighbour took the machine. Both results are printed, and what fails twice fails. Tests that
# judge by time (`alone`) have the machine to themselves.
test: setup  ## Run every test; CI runs this.
	@bash .ci/packages slurm "slurmctld slurmd sbatch munged" "slurmctld slurmd slurm-client munge"
	@bash .ci/packages browser "chromium" "chromium fonts-dejavu-core"
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not alone' --durations=25 || \
		$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none -m 'not alone'
	$(BIN)/python -m pytest -n 0 -m alone || \
		$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none -m alone

lint: setup  ## Check style and types.
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: setup  ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: setup  ## Measure speed against peers; results go to benchmarks/results.
	$(BIN)/python -m benchmarks.run

clean:  ## Remove what make made.
	rm -rf $(VENV) .bench-venv .pytest_cache .mypy_cache .ruff_cache
