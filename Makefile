# make quickstart      install, train a small GPT on Python's own source code, and let it write
# make test            install, and run the tests
# make test-slow       those that take minutes
# make torture         kill training hundreds of times and see that nothing is lost
# make bench-prepare   prepare.py beside nanoGPT's recipe and tiktoken alone
# make bench-generate  generation beside transformers
# make lint            check the style
# make clean           remove what these commands made

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: quickstart test test-slow torture bench-prepare bench-generate lint clean

quickstart: .venv/installed
	$(BIN)/python train.py config/quickstart.py
	$(BIN)/python sample.py config/quickstart_sample.py

test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2

torture: .venv/installed-dev
	$(BIN)/python tools/torture.py --kills=250

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -m slow

bench-prepare: .venv/installed-dev
	$(BIN)/python tools/compare_prepare.py

bench-generate: .venv/installed-dev
	$(BIN)/python tools/compare_generation.py

lint: .venv/installed-dev
	$(BIN)/ruff check .

clean:
	rm -rf .venv out-quickstart data/pystdlib .pytest_cache .ruff_cache .hypothesis __pycache__ tests/__pycache__

.venv/installed: requirements.txt
	@echo "installing into .venv (once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "plainGPT needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -q -r requirements.txt
	@touch $@

.venv/installed-dev: .venv/installed requirements-dev.txt
	@echo "installing the test tools into .venv (once)"
	@$(BIN)/pip install -q -r requirements-dev.txt
	@touch $@
