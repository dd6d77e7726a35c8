# Every target sets up what it needs first; a second run installs nothing. `make help` lists them.
#
#   PYTHON   interpreter to make the environment with, 3.11 or later; another one gets its own environment
#   VENV     where the environment lies
#   JOBS     test processes
#   TESTS    what to test: files, folders, or pytest's own arguments
#   ARGS     arguments of runtime.offline, in place of the two prompts

PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
JOBS ?= 2
TESTS ?= tests
ARGS ?= --prompt "The quick brown fox" --prompt "Once upon a time" --max-tokens 32

PY := $(VENV)/bin/python
# -qq: errors only.
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
PINS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-test setup-dev offline test check lint types format coverage clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.run ## make the environment that runs the commands
setup-test: $(VENV)/.test ## add what the tests import
setup-dev: $(VENV)/.dev ## add the linter and the type checker

# The stamps are written last, so an interrupted step is done again.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "flashreplay needs Python 3.11 or later; '$(PYTHON)' is not. Name one: make PYTHON=python3.12 setup" >&2; \
		exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "'$(PYTHON)' cannot make environments; on Debian and Ubuntu install python3-venv." >&2; \
		exit 1; }
	@touch $@

# torch goes first and alone, so that no other requirement picks a build of it; setuptools is installed by its pin
# because the build below is not isolated.
$(VENV)/.run: $(VENV)/.made $(PINS)
	@echo "Installing torch and the packages of pyproject.toml into $(VENV)" >&2
	@$(PIP_INSTALL) setuptools "$$(grep '^torch==' constraints.txt)"
	@$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/.test: $(VENV)/.run $(PINS)
	@$(PIP_INSTALL) --no-build-isolation -e '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test $(PINS)
	@$(PIP_INSTALL) --no-build-isolation -e '.[test,dev]'
	@touch $@

offline: setup ## generate text from the built-in checkpoint
	$(PY) -m runtime.offline $(ARGS)

# One thread a process: JOBS processes already fill the cores.
test: setup-test ## run the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal $(TESTS)

check: lint types test ## format check, lint, types and tests

lint: setup-dev ## check format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: setup-dev ## check types, strictly
	$(PY) -m mypy

format: setup-dev ## rewrite files to the format and fix what lint can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

coverage: setup-test ## run the tests in one process and report what they reach
	$(PY) -m coverage erase
	OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest $(TESTS)
	$(PY) -m coverage combine
	$(PY) -m coverage report

clean: ## remove the environment and all caches of the tools
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
