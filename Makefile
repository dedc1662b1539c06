# Two commands: `make book` renders the book, `make test` checks it. Both make what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
PROFILE ?= quick

.PHONY: book test lint coverage outputs benchmarks clean

book: .venv/installed
	$(BIN)/gramlin build --profile $(PROFILE)

test: .venv/installed
	$(BIN)/python -m pytest -n logical --dist worksteal
	$(BIN)/python -m pytest --nbval-lax book -n logical --dist loadfile

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Which lines and branches of the package the tests reach.
coverage: .venv/installed
	$(BIN)/python -m pytest -n logical --dist worksteal --cov gramlin --cov-branch --cov-report term:skip-covered

# Run every chapter and keep its outputs in the notebook, as they are committed.
outputs: .venv/installed
	for chapter in book/*.ipynb; do $(BIN)/gramlin run "$$chapter" --in-place || exit 1; done

benchmarks: .venv/installed
	$(BIN)/python -m pytest -o addopts="" benchmarks  # without the checks of shapes, which take time

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gramlin needs Python 3.11 or newer; call make with PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[book,test]'
	touch $@

clean:
	rm -rf _build .venv
