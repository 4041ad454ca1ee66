# `make demo` and `make test` set up everything they need in .venv; the rest is for developers.
PYTHON ?= python3
, := ,
BIN := .venv/bin
# without the simulator's corpus, whose line numbers are part of the tests
CODE := $(shell find csrc src tests -path tests/mslsim/kernels -prune -o \( -name '*.cpp' -o -name '*.h' -o -name '*.metal' \) -print)
PACKAGES := $(shell find src bench -name __init__.py)

# the compiler's warnings are errors for CI, not for users
SETTINGS := $(if $(CI),--config-settings=cmake.define.METALCORE_WERROR=ON)

# a process per core, each of them with one thread
PYTEST := $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

.PHONY: default test soak demo bench build lint format sim asan tsan story wheel wheels docs test-neon clean
default: lint  ## what a change reaches, in less than two minutes: see tests/reach.py
	$(PYTEST) $$($(BIN)/python tests/reach.py)

test: lint  ## everything CI runs
	$(PYTEST) --durations=30 tests

soak: build  ## a server with 8 clients for five minutes, in flat memory
	$(BIN)/python -m pytest -m slow -s tests/serve/test_load.py

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

# The kernels of one instruction set with sanitizers, and their tests. What Python leaks is no finding.
SET ?= avx2
TESTS ?= $(addprefix tests/,linalg train attention quant xlstm precise decode test_raw_calls.py)
SANITIZED = $(BIN)/cmake -S . -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE=$(abspath $(BIN))/python -DMETALCORE_SETS=$(SET) \
  -DMETALCORE_SANITIZE=$(1) && $(BIN)/ninja -C build/$@ && METALCORE_LIBRARIES=build/$@ \
  METALCORE_CPU=$(SET) LD_PRELOAD="$$(c++ -print-file-name=$(2)) $$(c++ -print-file-name=libstdc++.so.6)" $(3) \
  $(BIN)/python -m pytest --backend=cpu -x -k "not compile and not export and not opcheck" $(TESTS)

asan: build  ## memory and undefined behaviour of the kernels: make asan TESTS=tests/linalg
	$(call SANITIZED,address$(,)undefined,libasan.so,ASAN_OPTIONS=detect_leaks=0)

tsan: build  ## races of the kernels' threads
	$(call SANITIZED,thread,libtsan.so,OMP_NUM_THREADS=4 \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=$(abspath tests/tsan.txt))

story:  ## every file of an op: make story OP=rms_norm
	@git ls-files '*$(OP)*'

wheel: build
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

wheels: build  ## all that is published, for every machine, checked: make wheels TARGETS=macos
	$(BIN)/pip install --quiet -r release/requirements.txt
	$(BIN)/python release/wheels.py $(TARGETS)

test-neon: build  ## the kernels of arm64, emulated: after make wheels TARGETS=aarch64
	$(BIN)/python release/neon.py

docs: build  ## the site, in build/site, with every link checked
	$(BIN)/pip install --quiet -r release/requirements-docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf build dist .venv

build: .venv/build.ok

# Both distributions of the repository; `metalcore` was the name of the first in old checkouts.
.venv/build.ok: .venv/requirements.ok pyproject.toml release/mslsim/pyproject.toml CMakeLists.txt $(filter csrc/%,$(CODE)) $(PACKAGES)
	@$(BIN)/pip uninstall --quiet --yes metalcore 2>/dev/null
	$(BIN)/pip install --quiet --no-build-isolation --no-deps $(SETTINGS) --editable . --editable release/mslsim
	@touch $@

.venv/requirements.ok: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("metalcore needs Python 3.10 or newer, $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --requirement requirements.txt
	@touch $@
