# make quickstart          install, train a small GPT on Python source code, and sample from it; with a CUDA GPU, one of the size of GPT-2
# make test                install, and run the tests (a few minutes)
# make test-slow           run the slow tests: jobs under torchrun, repeated kills, pages of docs, installation
# make test-oldest         run the tests with the oldest versions of packages that pyproject.toml allows
# make torture             inject faults: kill, stop and starve runs hundreds of times, damage files
# make compare             compare with other programs: WHAT=prepare (nanoGPT's recipe), generation (transformers), race (nanoGPT), OPTIONS="…"
# make lint                check the code style
# make clean               remove what these commands created

PYTHON ?= python3
BIN := .venv/bin
# dependencies of pyproject.toml: "torch>=2.11" → torch==2.11.*
OLDEST = $(shell sed -n 's/^    "\(.*\)>=\(.*\)",.*/\1==\2.*/p' pyproject.toml)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# for pipefail
SHELL := /bin/bash
# pip's output → names and sizes of packages as they are downloaded, and when installation starts
IN_SHORT = awk 'match($$0, "[^ /]+[.]whl") { \
        split(substr($$0, RSTART, RLENGTH), parts, "-"); \
        size = match($$0, "[(].*MB[)]") ? " " substr($$0, RSTART, RLENGTH) : ""; \
        printf "  %s%s", parts[1], size; fflush() } \
    /^Installing/ { print "\n  downloaded; installing …"; fflush() }'

# '_gpu' if the installed PyTorch finds a CUDA GPU
GPU = $(shell $(BIN)/python -c 'import torch; print("_gpu" if torch.cuda.is_available() else "")')
WHAT ?= prepare

.PHONY: quickstart test test-slow test-oldest torture compare lint clean

quickstart: .venv/installed
	$(BIN)/python train.py config/quickstart$(GPU).py $(OPTIONS)
	$(BIN)/python sample.py config/quickstart_sample.py --out_dir=out-quickstart$(subst _,-,$(GPU)) $(OPTIONS)

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m slow

test-oldest: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install -q -r requirements-dev.txt
	.venv-oldest/bin/pip install -q $(OLDEST)
	.venv-oldest/bin/python -m pytest -n 2

torture: .venv/installed-dev
	$(BIN)/python tools/torture.py $(OPTIONS)

compare: .venv/installed-dev
	$(BIN)/python tools/compare.py $(WHAT) $(OPTIONS)

lint: .venv/installed-dev
	$(BIN)/ruff check .

clean:
	rm -rf .venv .venv-oldest out-quickstart out-quickstart-gpu data/pystdlib data/pypackages .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/installed: requirements.txt
	@echo "installing into .venv (once; 1.5 GB with PyTorch for CPUs)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plainGPT needs Python 3.11 or newer: run make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv .venv
	@set -o pipefail; $(BIN)/pip install -r requirements.txt | $(IN_SHORT)
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	@echo "installing the test tools into .venv (once)"
	@set -o pipefail; $(BIN)/pip install -r requirements-dev.txt | $(IN_SHORT)
	@touch $@
