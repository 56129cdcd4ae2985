# Two commands do all the set-up: `make run` and `make test`. Everything lands in .venv and build/.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 4

COMPILED := $(shell find native toolhost cmake -type f) CMakeLists.txt pyproject.toml

.PHONY: run test test-browser lint bench bench-peers soak fuzz clean help
help:
	@echo "make run    install into $(VENV), build, and serve the demo tools in the foreground"
	@echo "make test   lint, types, C and C++ tests, Python tests"
	@echo "make test-browser   install Chromium where apt-get can, and try the page in it"
	@echo "make lint   ruff and mypy --strict only"
	@echo "make bench  micro-benchmarks; then ratios, peers and growth, ten minutes (BENCH_FLAGS=--quick: one; --write: docs/)"
	@echo "make bench-peers   install those that make bench compares with"
	@echo "make soak   mixed load with random faults, ten minutes (SECONDS=n), a cluster that keeps dying, and a verdict"
	@echo "make fuzz   the readers of lines under libFuzzer with ASan and UBSan, two minutes (SECONDS=n), and a verdict"
	@echo "make clean  remove $(VENV) and build/"

run: $(VENV)/.installed
	@exec $(BIN)/broker serve --http 127.0.0.1:8080

test: $(VENV)/.installed-dev lint build/ctest/CMakeCache.txt
	@$(BIN)/cmake --build build/ctest --parallel >build/ctest.log 2>&1 || { cat build/ctest.log; exit 1; }
	@$(BIN)/ctest --test-dir build/ctest --output-on-failure
	@$(BIN)/pytest -n $(JOBS) --dist worksteal $(PYTEST_FLAGS)

# Without a Chromium, make test leaves its tests out and says so.
test-browser: $(VENV)/.installed-dev
	@$(PYTHON) .ci/browser.py
	@$(BIN)/pytest tests/browser $(PYTEST_FLAGS)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(VENV)/.installed-dev
	@$(BIN)/pytest benchmarks --benchmark-only --benchmark-columns=min,median,mean,ops
	@$(BIN)/python -m benchmarks.peers $(BENCH_FLAGS)

bench-peers: $(VENV)/.installed-dev
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev,peers]'

soak: SECONDS ?= 600
soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.soak --seconds $(SECONDS) $(SOAK_FLAGS)

fuzz: SECONDS ?= 120
fuzz: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ_FLAGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

build/ctest/CMakeCache.txt: $(VENV)/.installed-dev
	@$(BIN)/cmake -S . -B build/ctest -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python >build/ctest.log 2>&1 \
		|| { cat build/ctest.log; exit 1; }

# --- the virtual environment -----------------------------------------------------------------------------------------

$(VENV)/.checked:
	@$(PYTHON) .ci/preflight.py
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Editable: Python edits are live; an edit to C or C++ rebuilds, incrementally, in build/.
$(VENV)/.installed: $(VENV)/.checked $(COMPILED)
	@echo "installing into $(VENV) (a minute the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[http]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.checked $(COMPILED)
	@echo "installing into $(VENV), with the development tools (two minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(VENV)/.installed $@
