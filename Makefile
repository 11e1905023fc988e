# `make run` and `make test` do all set-up; the second time they start at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test slow lint types format docs dist clean

run: $(READY)
	$(BIN)/hardy run demo

test: lint types
	$(BIN)/pytest -n 2 -m "not slow"

slow: $(READY)
	$(BIN)/pytest -n 2 -m slow --timeout 1800

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -c docs . docs/_build/html
	@echo "docs/_build/html/index.html"

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Hardy needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis dist docs/_build docs/_generated
