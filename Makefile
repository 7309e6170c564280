# `make book` and `make test` are all that a new machine needs: Python 3.11 or later, and make.

# The first of these that runs and is new enough.
IS_NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
  $$p $(IS_NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
HTML := _build/html/index.html
NOTEBOOKS := $(wildcard book/*.ipynb)
SITE_SOURCES := $(NOTEBOOKS) $(wildcard book/*.md book/*.bib book/_static/* book/_ext/*) _config.yml _toc.yml
CODE := fanoutkv book tests benchmarks
WORKERS ?= 2

.PHONY: help book serve test lint types unit notebooks weave-check site weave run lab bench clean
.DELETE_ON_ERROR:

help:
	@echo "make book    build the site and print its address"
	@echo "make serve   serve the built site on http://127.0.0.1:8000"
	@echo "make test    lint, types, unit and property tests, every notebook, the weave, the site"
	@echo "make weave   fill the chapters' code cells from fanoutkv/"
	@echo "make run NB=01   run a chapter top to bottom and store its outputs"
	@echo "make lab     open the chapters in JupyterLab"
	@echo "make bench   time the package beside its peers"
	@echo "make clean   remove what was built, .venv too"

$(BIN)/python:
	@test -n "$(PYTHON)" && $(PYTHON) $(IS_NEW_ENOUGH) || { \
	  echo "Python 3.11 or later is needed; say where: make book PYTHON=/path/to/python3.11"; exit 1; }
	@echo "== making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/book.stamp: $(BIN)/python pyproject.toml constraints.txt
	@echo "== installing what the site needs"
	@$(BIN)/python -m pip install --quiet --editable '.[book]' --constraint constraints.txt
	@touch $@

$(VENV)/test.stamp: $(VENV)/book.stamp
	@echo "== installing what the tests need"
	@$(BIN)/python -m pip install --quiet --editable '.[book,test]' --constraint constraints.txt
	@touch $@

# --all, because Sphinx copies no changed style sheet or picture when no page has changed.
$(HTML): $(VENV)/book.stamp $(SITE_SOURCES)
	@echo "== building the site"
	@$(BIN)/jupyter-book build . --all --quiet -W -n --keep-going
	@touch $@

book: $(HTML)
	@echo "The book is at file://$(CURDIR)/$(HTML)"

serve: $(HTML)
	@echo "The book is at http://127.0.0.1:8000 (Ctrl-C stops it)"
	@$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory _build/html

test: lint types unit weave-check notebooks site
	@echo "== all passed"

lint: $(VENV)/test.stamp
	@echo "== lint"
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

types: $(VENV)/test.stamp
	@echo "== types"
	@$(BIN)/mypy fanoutkv

unit: $(VENV)/test.stamp
	@echo "== unit and property tests"
	@$(BIN)/pytest -n $(WORKERS) --ignore tests/site

weave-check: $(VENV)/test.stamp
	@echo "== is every chapter woven?"
	@$(BIN)/python book/weave.py --check

notebooks: $(VENV)/test.stamp
	@echo "== every notebook, outputs compared"
	@$(BIN)/pytest -n $(WORKERS) --dist loadscope --nbval $(NOTEBOOKS)

site: $(VENV)/test.stamp $(HTML)
	@echo "== the site in a browser"
	@$(BIN)/pytest tests/site

weave: $(VENV)/test.stamp
	@echo "== weaving"
	@$(BIN)/python book/weave.py

run: $(VENV)/test.stamp
	@echo "== running $(NB)"
	@$(BIN)/python book/weave.py run $(NB)

# Editable like the others: a copied package would hide later edits from every other target.
$(VENV)/lab.stamp: $(VENV)/test.stamp
	@echo "== installing JupyterLab"
	@$(BIN)/python -m pip install --quiet --editable '.[book,test,notebook]' --constraint constraints.txt
	@touch $@

lab: $(VENV)/lab.stamp
	@echo "== JupyterLab"
	@$(BIN)/jupyter lab book

$(VENV)/bench.stamp: $(VENV)/test.stamp
	@echo "== installing what the peers' files import"
	@$(BIN)/python -m pip install --quiet --editable '.[bench]' --constraint constraints.txt
	@touch $@

bench: $(VENV)/bench.stamp
	@echo "== benchmarks"
	@for file in $(filter-out benchmarks/peers.py benchmarks/timing.py,$(wildcard benchmarks/*.py)); do \
	  $(BIN)/python $$file || exit 1; done

clean:
	@echo "== removing .venv, _build and caches"
	@rm -rf $(VENV) _build .mypy_cache .ruff_cache .pytest_cache .hypothesis fanoutkv.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
