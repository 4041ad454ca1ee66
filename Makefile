# `make demo` and `make test` set up everything they need in .venv; the rest is for developers.
PYTHON ?= python3
BIN := .venv/bin
# without the simulator's corpus, whose line numbers are part of the tests
CODE := $(shell git ls-files -co --exclude-standard '*.cpp' '*.h' '*.metal' ':!tests/mslsim/kernels')
PACKAGES := $(shell find src bench -name __init__.py)

# a process per core, each of them with one thread
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: default test demo bench build lint format sim story wheel clean
default: lint  ## what a change reaches, in less than two minutes: see tests/reach.py
	$(PYTEST) $$($(BIN)/python tests/reach.py)

test: lint  ## everything CI runs
	$(PYTEST) --durations=30 tests

demo: build  ## the main job on a small model
	$(BIN)/metalcore demo

bench: build  ## all benchmarks, with a page to look at
	$(BIN)/pip install --quiet -r requirements-bench.txt
	$(BIN)/metalcore bench --html bench.html

lint: build
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy src
	@$(BIN)/clang-format --dry-run -Werror $(CODE)

format: build
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CODE)

sim: build  ## an op's kernels in the simulator: make sim OP=rms_norm
	$(BIN)/python -m pytest tests --backend=sim -k "$(OP)"

story:  ## every file of an op: make story OP=rms_norm
	@git ls-files '*$(OP)*'

wheel: build
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist .venv

build: .venv/build.ok

.venv/build.ok: .venv/requirements.ok pyproject.toml CMakeLists.txt $(filter csrc/%,$(CODE)) $(PACKAGES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

.venv/requirements.ok: requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt
	@touch $@
