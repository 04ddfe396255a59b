# Two commands set everything up: `make demo` and `make test`. Neither needs the other.

PYTHON      ?= python3
VENV        := .venv
PY          := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
# Extra package index for PyTorch (runtime and tests), e.g. https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH_FROM  := $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)")
# Cluster file of `make demo`; empty means the bundled 12 V100 + 4 T4 cluster.
CLUSTER     ?=
PYTEST_ARGS ?= -n 2 --dist loadfile
# `make soak`: seed (empty: a new one, printed) and time limit in minutes.
SEED        ?=
MINUTES     ?= 30

BUILD_INPUTS := pyproject.toml constraints.txt $(wildcard setup.py)

.PHONY: demo test soak test-env runtime-env lint clean help

help:
	@echo "make demo      plan and simulate the bundled job (CLUSTER=file for another cluster)"
	@echo "make test      everything CI runs"
	@echo "make soak      seeded campaigns of killed ranks and broken files (SEED=n MINUTES=n)"
	@echo "make test-env  build .venv with what the tests need"
	@echo "make runtime-env  add PyTorch (TORCH_INDEX=url for another package index)"

# Install and run times apart; the exit code is the command's own.
demo:
	@start=$$(date +%s); $(MAKE) --silent --no-print-directory $(VENV)/.core || exit 1; \
	 installed=$$(date +%s); echo "install: $$((installed - start)) s"; \
	 $(VENV)/bin/hetlab demo $(if $(CLUSTER),--cluster "$(CLUSTER)") || exit $$?; \
	 echo "run: $$(($$(date +%s) - installed)) s"

test: test-env lint
	$(PY) -m pytest $(PYTEST_ARGS)

soak: test-env
	HETLAB_SOAK_SEED="$(SEED)" HETLAB_SOAK_MINUTES="$(MINUTES)" $(PY) -m pytest tests/soak -n 0 -rs

lint: test-env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

test-env: $(VENV)/.dev

runtime-env: $(VENV)/.core
	$(PIP_INSTALL) $(TORCH_FROM) -e ".[runtime]"

# The stamps make a second run skip the installation.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	 { echo "hetlab needs Python 3.11 or newer; set PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	 { rm -rf $(VENV); \
	   echo "could not create $(VENV): on Debian and Ubuntu run 'apt-get install python3-venv'" >&2; \
	   exit 1; }

$(VENV)/.core: $(PY) $(BUILD_INPUTS)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP_INSTALL) $(TORCH_FROM) -e ".[dev,runtime,tensorboard]"
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
