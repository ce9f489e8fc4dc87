# gpt2lab: `make help` lists what there is to do.

SHELL := /bin/bash
PYTHON ?= python3
PORT ?= 8888
ARGS ?=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
PARTS := lint tests gloo lessons browser
export TODAY LESSON
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)

.DEFAULT_GOAL := help
.PHONY: help lab test test-quick test-all test-gpu mutants notebooks figures site slides wheel lint clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  Options: TODAY=3 (or all) and LESSON=07 for test, PORT=8890 and ARGS='...' for lab, ARGS=03 for notebooks, PYTHON=python3.12, TORCH_INDEX=<address>"

lab: .venv/lab.stamp  ## open a copy of the lessons, in work/, in JupyterLab at 127.0.0.1 only
	@read -r first < $(BIN)/jupyter && [ -x "$${first#\#!}" ] || $(ANEW)
	@$(BIN)/python -m gpt2lab.classroom.copies work
	JUPYTER_PATH="$(CURDIR)/gpt2lab/lessons:$$JUPYTER_PATH" \
	JUPYTER_CONFIG_PATH="$(CURDIR)/gpt2lab/lessons:$$JUPYTER_CONFIG_PATH" \
	  $(BIN)/jupyter lab --ip=127.0.0.1 --port=$(PORT) --ServerApp.root_dir="$(CURDIR)" \
	  --LabApp.news_url=None --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate \
	  --LabApp.default_url=/lab/tree/work/00_start_here.ipynb --KernelManager.transport=ipc \
	  $(LAB_FLAGS) $(ARGS)

test: .venv/test.stamp  ## the tests of today; TODAY=all: everything; LESSON=07: those of a lesson
	@$(BIN)/python tests/run.py $(if $(LESSON),tests lessons,$(PARTS))

test-quick: .venv/test.stamp  ## before each commit: lint, what starts no ranks, one live test a strategy
	@$(BIN)/python tests/run.py lint quick

test-all: .venv/test.stamp .venv-site/stamp  ## everything, and the slow tests
	@SLOW=1 TODAY=all $(BIN)/python tests/run.py $(PARTS)

test-gpu: .venv/test.stamp  ## what needs GPUs: training on them, and NCCL between them
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(BIN)/python tests/run.py gpu; \
	else echo "There is no GPU here that PyTorch can use, so nothing was run."; fi

mutants: .venv/test.stamp  ## only the tests that plant a bug and demand that it is caught
	@TODAY=all $(BIN)/python tests/run.py mutants

lint: .venv/test.stamp  ## only ruff and the notebooks' freshness
	@$(BIN)/python tests/run.py lint

notebooks: .venv/test.stamp  ## rebuild outdated lessons; ARGS=03 rebuilds lesson 03 in any case
	$(BIN)/python -m gpt2lab.lessons.build $(ARGS)

figures: .venv/lab.stamp  ## draw the pictures of the README and the lessons again
	$(BIN)/python -m gpt2lab.plots.draw figures

site: .venv/lab.stamp .venv-site/stamp  ## the lessons as pages, in site/; ARGS=--teachers adds the guide
	$(BIN)/python -m gpt2lab.classroom.site build/site $(ARGS)
	.venv-site/bin/sphinx-build -q -j 2 -d build/doctrees build/site build/html
	$(BIN)/python -m gpt2lab.classroom.lighter build/html
	@rm -rf site && mv build/html site
	@echo "Open site/index.html, or serve the folder: python3 -m http.server --directory site"

slides:  ## a lesson for the projector, from site/: make slides ARGS=07
	@page=$$(ls "$(CURDIR)"/site/$(ARGS)*_*.html 2>/dev/null | head -1); page=$${page// /%20}; \
	  [ -n "$$page" ] || { echo "There is no page of lesson $(ARGS) in site/: run make site first."; exit 1; }; \
	  echo "file://$$page?slides"; $(PYTHON) -m webbrowser "file://$$page?slides" >/dev/null

wheel: .venv/lab.stamp  ## gpt2lab to install elsewhere, in dist/
	$(BIN)/pip wheel --quiet --no-deps -w dist .

clean:  ## remove the virtual environment and caches
	rm -rf .venv .venv-site site dist .pytest_cache .ruff_cache .hypothesis build *.egg-info

# Without a display there is no browser to open, and root must say that it means it.
LAB_FLAGS := $(if $(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname -s)),,--no-browser) \
             $(if $(filter 0,$(shell id -u)),--allow-root)

# install ENVIRONMENT WHAT: by uv where there is one (measured: 16 s where pip took 175), by pip where there is none or it
# fails, as where packages come from a place that only pip's own configuration names.
INSTALL := install() { uv pip install --quiet --python "$$1/bin/python" "$${@:2}" 2>/dev/null || "$$1/bin/pip" install --quiet "$${@:2}"; };

ANEW := { echo "The programs in .venv do not start: this folder was moved, or Python updated. Build it anew: rm -rf .venv .venv-site, then make lab."; exit 1; }

# A stamp remembers what was installed, so that a second call starts at once.
.venv/bin/python:
	@[ ! -L $@ ] || $(ANEW)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old: gpt2lab needs Python 3.11 or newer. Try make PYTHON=python3.12."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv module (Debian: apt-get install python3-venv)."; exit 1; }
	@command -v git >/dev/null || { echo "There is no git: install it (Debian: apt-get install git)."; exit 1; }
	$(PYTHON) -m venv .venv

# torch for the CPU: as the local configuration of pip offers it, else from TORCH_INDEX, else whatever pip finds.
.venv/torch.stamp: requirements.txt | .venv/bin/python
	@$(INSTALL) if [ "$$(uname -s)" = Linux ]; then \
	  $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "$(TORCH)")' 2>/dev/null \
	  || install .venv "torch==$(TORCH)+cpu" 2>/dev/null \
	  || install .venv --extra-index-url "$(TORCH_INDEX)" "torch==$(TORCH)+cpu" \
	  || echo "The CPU build of torch was not found at $(TORCH_INDEX): pip may now fetch the large CUDA build, which works as well."; \
	fi
	@touch $@

.venv/lab.stamp: requirements.txt pyproject.toml .venv/torch.stamp
	@echo "Installing the requirements (a few minutes the first time) ..."
	@$(INSTALL) install .venv -r requirements.txt
	@$(BIN)/python -c 'import matplotlib.font_manager'
	@touch $@

.venv-site/stamp: requirements-site.txt | .venv/bin/python
	@echo "Installing what builds the pages (a minute the first time) ..."
	@$(INSTALL) $(PYTHON) -m venv .venv-site && install .venv-site -r requirements-site.txt
	@touch $@

.venv/test.stamp: requirements-dev.txt .venv/lab.stamp
	@$(INSTALL) install .venv -r requirements-dev.txt
	@touch $@
