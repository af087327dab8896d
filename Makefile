# Everything goes through make; CI calls `make lint test-all`. A fresh clone needs python3 (3.11+), make and the package registries.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo fuzz test test-all lint format map docs notebooks bench clean

help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch is installed first and by exact version, so that no other package's range can choose a build for us.
$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or later, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $(PYTHON) is $$($(PYTHON) --version), and Lockstep needs 3.11 or later: set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/install.py "installing torch" "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python .ci/install.py "installing lockstep" --editable '.[mpi]'
	@$(BIN)/lockstep kernels build || true
	@touch $@

$(VENV)/.tools: $(VENV)/.installed
	@$(BIN)/python .ci/install.py "installing test and lint tools" --editable '.[test,lint]'
	@touch $@

setup: $(VENV)/.installed  ## Make .venv and install Lockstep.

demo: setup  ## Train the MNIST net with one process and with two ranks, and compare.
	@$(BIN)/lockstep demo

# Most tests wait for processes to start and to end, so two files go at a time.
test: $(VENV)/.tools  ## Run the fast tests: all but those that need a compiler, Slurm, MPI, emulated hosts, a browser or much time.
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not alone'

# Slurm, a browser and LaTeX come from the system's packages, where we may install them; without them, their tests are skipped and say so.
# What judges a measurement (`alone`) has the machine to itself: tests/contending.py.
test-all: $(VENV)/.tools $(VENV)/.docs $(VENV)/.ray  ## Run every test; CI runs this.
	@bash .ci/packages slurm "slurmctld slurmd sbatch munged" "slurmctld slurmd slurm-client munge"
	@bash .ci/packages browser "chromium" "chromium fonts-dejavu-core"
	@bash .ci/packages shells "zsh fish" "zsh fish"
	@bash .ci/packages latex "pdflatex" "texlive-latex-recommended lmodern"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not alone' --durations=25
	@$(BIN)/python tests/contending.py

# Other inputs each time; what fails is printed with what it takes to see it again, and gets a line in tests/fuzz/test_corpus.py.
fuzz: $(VENV)/.tools  ## Look for inputs that end in a traceback or a hang: FUZZ_INPUTS of them (default 12000).
	@FUZZ_INPUTS=$${FUZZ_INPUTS:-12000} $(BIN)/python -m pytest -n 0 -q --timeout 3600 tests/fuzz

lint: $(VENV)/.tools  ## Check style, types, and that docs/map.md is of today.
	@$(BIN)/python docs/code_map.py --check
	@$(BIN)/ruff check src tests benchmarks docs examples
	@$(BIN)/ruff format --check src tests benchmarks docs examples
	@$(BIN)/mypy

format: $(VENV)/.tools  ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix src tests benchmarks docs examples
	$(BIN)/ruff format src tests benchmarks docs examples

map: setup  ## Write docs/map.md from the source.
	@$(BIN)/python docs/code_map.py

$(VENV)/.docs: $(VENV)/.installed
	@$(BIN)/python .ci/install.py "installing what builds the pages" --editable '.[docs]'
	@touch $@

# 79 MB to download and 240 MB on disk, so only where every test runs.
$(VENV)/.ray: $(VENV)/.installed
	@$(BIN)/python .ci/install.py "installing Ray" --editable '.[ray]'
	@touch $@

# A link that leads nowhere, or a page that is in no table of contents, is an error.
docs: $(VENV)/.docs  ## Build the documentation as a site: build/docs/index.html.
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@echo "the site is in build/docs/index.html"

notebooks: $(VENV)/.tools  ## Execute the notebooks of examples/notebooks and write them anew, with their outputs.
	@$(BIN)/python examples/notebooks/execute.py

# ONNX Runtime is a peer that it measures.
$(VENV)/.peers: $(VENV)/.installed
	@$(BIN)/python .ci/install.py "installing what is measured beside Lockstep" --editable '.[onnx]'
	@touch $@

bench: $(VENV)/.peers  ## Measure speed against peers, for eight to ten hours; results go to benchmarks/results. BENCH=--quick for a trial of more than an hour.
	$(BIN)/python -m benchmarks.run $(BENCH)

clean:  ## Remove what make made.
	rm -rf $(VENV) .bench-venv .frameworks-venv .frameworks-venv.lock .pytest_cache .mypy_cache .ruff_cache
