# Set up and run KVMesh. `make help` lists the targets and variables.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Variables, for the command line or the environment.
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.13 python3.12 python3.11; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
endif
VENV ?= .venv
TORCH_INDEX ?=
EXTRAS ?=
ARGS ?=
BENCH ?= *
PEERS ?= $(HOME)/.cache/kvmesh-peers
STORM ?= 2000,4
export KVMESH_DEPLOY_CACHE ?= $(HOME)/.cache/kvmesh-deploy
K8S_BIN ?= $(KVMESH_DEPLOY_CACHE)/kubernetes
K8S_IMAGES ?= $(KVMESH_DEPLOY_CACHE)/images.tar
JOBS ?= 2

BIN := $(VENV)/bin
COMMA := ,
# One stamp for each set of extras: asking for others installs them, too.
SUFFIX := $(if $(EXTRAS),-$(subst $(COMMA),-,$(EXTRAS)))
ENGINE := $(VENV)/.engine$(SUFFIX)
DEV := $(VENV)/.dev$(SUFFIX)
PIP_INSTALL := $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --constraint constraints.txt
# Of what pip says, signs of life: what is large, and the end.
TERSE := sed -un -e 's/^ *Downloading \([^ /]*\) (\([0-9.]* [MG]B\))/  fetching \1, \2/p' \
	-e 's/^ *Downloading .*\/\([^ /]*\) (\([0-9.]* [MG]B\))/  fetching \1, \2/p' \
	-e 's/^Installing collected packages.*/  installing them/p'

# What the install is made from: the native library is built by the install itself.
NATIVE := $(shell find gpu_kernels -name '*.cpp' -o -name '*.cc' -o -name '*.c' -o -name '*.cu' -o -name '*.h' \
	-o -name '*.hpp' -o -name '*.cuh')
INSTALLED_FROM := pyproject.toml constraints.txt hatch_build.py gpu_kernels/kvmesh/kernels/build.py $(NATIVE)

.PHONY: help up down test soak-cache soak-modes soak-events soak-e2e fault-matrix cancel-storm observability-test deploy-test k8s-tools k8s-build k8s-images k8s-test reference lock lint bench peers clean venv check

help: ## Show this help
	@echo "Targets:"
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22
	@echo "Variables:"
	@echo "  PYTHON      interpreter for the environment, 3.11 or newer (now: $(or $(PYTHON),none found))"
	@echo "  VENV        where the environment is (now: $(VENV))"
	@echo "  TORCH_INDEX extra package index that has another build of torch (PyTorch's own pages name those"
	@echo "              for CPU and for each CUDA version); empty: whatever the default index has. Run"
	@echo "              'make clean' before changing it"
	@echo "  EXTRAS      what else to install, with commas: ucx, mooncake, mpi (docs/transfer-backends.md),"
	@echo "              bench (for 'kvmesh bench --plot'), keys (for 'kvmesh keys tls')"
	@echo "  ARGS        arguments for 'kvmesh up', pytest or a benchmark: make up ARGS='--generation 2'"
	@echo "  PEERS       where other projects' code is set up (now: $(PEERS))"
	@echo "  JOBS        processes that run tests at the same time (now: $(JOBS)); 0 runs them in one"
	@echo "  STORM       streams and rounds of cancel-storm (now: $(STORM))"
	@echo "  K8S_BIN     folder of the Kubernetes that k8s-test starts (now: $(K8S_BIN))"
	@echo "  K8S_IMAGES  archive of the images for it (now: $(K8S_IMAGES))"
	@echo "  BENCH       one benchmark of benchmarks/ instead of all: make bench BENCH=engine"

up: $(ENGINE) ## Set up and start a mesh in the foreground; Ctrl-C stops it
	@exec $(BIN)/kvmesh up $(ARGS)

down: ## Stop the mesh that runs in the background
	@if [ -x $(BIN)/kvmesh ]; then exec $(BIN)/kvmesh down; else echo "no environment in $(VENV): nothing to stop with"; fi

# Files go whole to a process, in their order: those that start servers come first, quick ones fill the gaps.
test: $(DEV) ## Set up and run the tests
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

soak-cache: $(DEV) ## Run the random test of the KV cache, a million steps instead of 10 000
	@KVMESH_SOAK=100 $(BIN)/python -m pytest tests/unit/cache/test_model.py $(ARGS)

soak-modes: $(DEV) ## Run every mode of the KV cache on every architecture instead of on one
	@KVMESH_SOAK=3 $(BIN)/python -m pytest tests/integration/engine/cache $(ARGS)

fault-matrix: $(DEV) ## Hurt every process at every point of a transfer; goes on where it stopped (docs/faults.md)
	@$(BIN)/python tests/faults/matrix.py $(ARGS)

cancel-storm: $(DEV) ## Cancel 2000 streams in mid-transfer, four times, over DEFAULT and NIXL
	@KVMESH_SOAK=1 KVMESH_STORM=$(STORM) $(BIN)/python -m pytest -s tests/e2e/test_cancel_storm.py $(ARGS)

soak-events: $(DEV) ## Run the random tests and the churn of KV events and their index at full length
	@KVMESH_SOAK=1 $(BIN)/python -m pytest tests/unit/events tests/integration/events tests/integration/indexer $(ARGS)

soak-e2e: $(DEV) ## Run the end-to-end and worker tests with all their cases, and loans under faults
	@KVMESH_SOAK=1 $(BIN)/python -m pytest tests/e2e tests/integration/worker tests/integration/engine/test_loan_faults.py $(ARGS)

observability-test: $(DEV) ## Run a mesh under load, a real Prometheus and every query of the dashboards
	@KVMESH_SOAK=1 $(BIN)/python -m pytest -v tests/e2e/test_observability.py $(ARGS)

deploy-test: $(DEV) ## Build the images and run the mesh in containers; needs root or a Docker engine
	@KVMESH_DEPLOY=1 $(BIN)/python -m pytest -s tests/deploy/test_*.py $(ARGS)

k8s-tools: $(DEV) ## Fetch Helm, kubectl and Kubernetes' schemas for the tests of the chart
	@$(BIN)/python k8s/tools/fetch_helm.py $(KVMESH_DEPLOY_CACHE)
	@[ -x $(KVMESH_DEPLOY_CACHE)/kubernetes-validate/bin/kubernetes-validate ] || { \
		$(PYTHON) -m venv $(KVMESH_DEPLOY_CACHE)/kubernetes-validate && \
		$(KVMESH_DEPLOY_CACHE)/kubernetes-validate/bin/python -m pip install --quiet --disable-pip-version-check \
			kubernetes-validate==1.37.0; }

k8s-build: ## Build the Kubernetes that k8s-test starts, once, into K8S_BIN
	@nice -n 19 k8s/tools/build-kubernetes.sh $(K8S_BIN)

k8s-images: $(DEV) ## Build the images and save them to K8S_IMAGES for k8s-test
	@PYTHONPATH=tests/support $(BIN)/python tests/support/kube_images.py $(K8S_IMAGES)

k8s-test: $(DEV) k8s-tools ## Install the chart on a real Kubernetes of this machine and try it; needs root
	@KVMESH_DEPLOY=1 KVMESH_K8S_TEST=1 KVMESH_K8S_BIN=$(K8S_BIN) KVMESH_IMAGES=$(K8S_IMAGES) \
		unshare --net $(BIN)/python -m pytest -v tests/deploy/k8s $(ARGS)

reference: $(DEV) ## Write anew what is made from other files: docs/configuration.md, dashboards, the chart's schema and copies
	@$(BIN)/python -m kvmesh.config.reference >docs/configuration.md
	@$(BIN)/python k8s/tools/values_schema.py >k8s/chart/values.schema.json
	@$(BIN)/python compose/observability/dashboards.py
	@$(BIN)/python k8s/tools/copy_observability.py

lock: $(DEV) ## Write anew what the images install, with hashes (compose/locks); after a change of constraints.txt
	@[ -x $(KVMESH_DEPLOY_CACHE)/uv/bin/uv ] || { $(PYTHON) -m venv $(KVMESH_DEPLOY_CACHE)/uv && \
		$(KVMESH_DEPLOY_CACHE)/uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9; }
	@$(BIN)/python compose/lock.py $(KVMESH_DEPLOY_CACHE)/uv/bin/uv

lint: $(DEV) ## Check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(DEV) ## Run the benchmarks
	@for file in benchmarks/$(BENCH).py; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

peers: ## Set up other projects' code, for benchmarks and tests that compare with it
	@PEERS='$(PEERS)' PYTHON='$(PYTHON)' bash benchmarks/peers/setup.sh $(ARGS)

venv: $(DEV) ## Set up the environment with everything for development

clean: ## Remove the environment and everything built
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find services shared gpu_kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	@rm -rf gpu_kernels/kvmesh/kernels/csrc/build
	@find gpu_kernels -name '*.so' -type f -delete

$(VENV)/.pip: | check
	@echo "creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade 'pip>=24'
	@touch $@

$(ENGINE): $(INSTALLED_FROM) | $(VENV)/.pip
	@echo "compiling the native code; some minutes the first time"
	@$(BIN)/python gpu_kernels/kvmesh/kernels/build.py --progress
	@echo "installing torch and other packages"
	@$(PIP_INSTALL) --editable '.[engine$(addprefix $(COMMA),$(EXTRAS))]' | $(TERSE)
	@touch $@

$(DEV): $(INSTALLED_FROM) | $(VENV)/.pip
	@echo "compiling the native code; some minutes the first time"
	@$(BIN)/python gpu_kernels/kvmesh/kernels/build.py --progress
	@echo "installing torch, and everything for development"
	@$(PIP_INSTALL) --editable '.[engine,dev,bench$(addprefix $(COMMA),$(EXTRAS))]' | $(TERSE)
	@touch $@ $(ENGINE)

# Name everything that is missing at once, with the command that installs it.
check:
	@missing=""; packages=""; \
	if [ -z "$(PYTHON)" ] || ! version=$$($(PYTHON) -c \
		'import sys; assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then \
		missing="$$missing python-3.11-or-newer"; \
		if apt-cache show python3.11 >/dev/null 2>&1; then name=python3.11; else name=python3; fi; \
		packages="$$packages $$name $$name-venv $$name-dev"; \
	else \
		$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
			{ missing="$$missing venv"; packages="$$packages python$$version-venv"; }; \
		$(PYTHON) -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
			2>/dev/null || { missing="$$missing Python.h"; packages="$$packages python$$version-dev"; }; \
	fi; \
	command -v "$${CXX:-g++}" >/dev/null || { missing="$$missing $${CXX:-g++}"; packages="$$packages g++"; }; \
	if [ -n "$$missing" ]; then \
		echo "Missing:$$missing. Install with:" >&2; \
		echo "  sudo apt-get update && sudo apt-get install -y$$packages" >&2; \
		exit 1; \
	fi
