# The commands that people, and the CI, use.  `make train` and `make test` are the two to begin with:
# each makes .venv, installs what it needs into it and does its job.
#
# PYTHON is what .venv is made with; ARGS go to the command, e.g. `make train ARGS="--steps 50"`.
# TESTS names the Python tests that `make test` runs, e.g. `make test TESTS=tests/unit`.

PYTHON ?= python3
ARGS ?=
TESTS ?=
# Processes of pytest, one a core; most tests start ranks of their own.
WORKERS ?= logical
SPREAD := -n $(WORKERS) --maxprocesses 8 --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python

.PHONY: help venv build train test ctest pytest ahead lint tidy fmt docs asan tsan bench soak fuzz matrix cuda-wheel clean

help:
	@sed -n 's/^\([a-z-]*\):.*##/  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

# ---- what the others need; stamps say what .venv holds

# setuptools builds in .venv itself (no isolation), so that a changed C file alone is compiled again.
$(VENV)/stamp-base:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade "setuptools>=77" "numpy>=2"
	touch $@

# pip hides what a build prints, so setup.py compiles first, and counts; pip then finds all compiled.
$(VENV)/stamp-package: $(VENV)/stamp-base pyproject.toml setup.py
	$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m pip install --quiet --no-build-isolation --editable .
	touch $@

# The pinned torch alone first: its CPU build is then found where an index with one is configured.
# Where nvcc is, the plugin's tests open NCCL, which needs no GPU, and read cuBLASLt's header.
$(VENV)/stamp-test: $(VENV)/stamp-package pyproject.toml
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[test]"
	if command -v nvcc >/dev/null; then $(PY) -m pip install --quiet nvidia-nccl-cu13 "nvidia-cublas>=13,<14"; fi
	touch $@

$(VENV)/stamp-lint: $(VENV)/stamp-package pyproject.toml
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[lint]"
	touch $@

$(VENV)/stamp-docs: $(VENV)/stamp-package pyproject.toml
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[docs]"
	touch $@

build: $(VENV)/stamp-package
	$(PY) setup.py --quiet build_ext --inplace

venv: build $(VENV)/stamp-test ## .venv with the package and all that its tests need

# ---- what people run

train: build ## train a 2M LLaMA on this Python's own library, on 2 ranks
	$(BIN)/fsdpc train --ranks 2 $(ARGS)

# Named tests alone, if TESTS names some.
test: $(if $(TESTS),,ctest) pytest ## the C tests and the Python tests, or those that TESTS names

ctest: $(VENV)/stamp-base ## the C tests
	$(PY) tools/ctest.py plain $(ARGS)

# Paths in ARGS name tests as TESTS does.
NAMED = $(strip $(TESTS) $(filter tests/%,$(ARGS)))
PYTEST_RUN = $(PY) -m pytest $(if $(NAMED),$(TESTS),tests --ignore=tests/lint) $(SPREAD) $(ARGS)

# Tests on ranks that use parameters in all states of a unit, once more with protected memory.
NO_ALIAS = $(patsubst %,tests/dist/test_%.py,frozen in_place modules offload strategies trainability training units unused)

pytest: venv
	mkdir -p build
	bash -o pipefail -c '$(PYTEST_RUN) | tee build/pytest.log'
ifeq ($(NAMED),)
	FSDPC_NO_ALIAS=1 $(PY) -m pytest -q $(NO_ALIAS) $(SPREAD) $(ARGS) || [ $$? -eq 5 ] # 5: ARGS chose none
endif

asan: $(VENV)/stamp-base ## the C tests under AddressSanitizer and UBSan
	$(PY) tools/ctest.py asan $(ARGS)

tsan: $(VENV)/stamp-base ## the C tests under ThreadSanitizer, ranks as threads
	$(PY) tools/ctest.py tsan $(ARGS)

# What fails here (there may be no nvcc, no clang) says so where it is needed.
ahead: $(VENV)/stamp-base ## build for asan, tsan and the tests of CUDA, ahead of them
	-$(PY) tools/cuda_build.py --emulate
	-$(PY) tools/cuda_build.py --emulate --streams --sanitizer thread
	-$(PY) tools/cuda_build.py
	-$(PY) tools/ctest.py asan --build
	-$(PY) tools/ctest.py tsan --build

lint: build $(VENV)/stamp-lint tidy ## style, layers, banned calls, docstrings
	git ls-files -z -- '*.c' '*.h' | xargs -0 clang-format --dry-run -Werror
	$(BIN)/ruff check --quiet .
	$(PY) -m compileall -q python tests tools setup.py
	$(PY) -m pytest -q $(SPREAD) tests/lint

tidy: $(VENV)/stamp-base
	$(PY) tools/tidy.py $(ARGS)

fmt: $(VENV)/stamp-lint ## format the C sources, sort the imports
	git ls-files -z -- '*.c' '*.h' | xargs -0 clang-format -i
	$(BIN)/ruff check --quiet --fix .

docs: build $(VENV)/stamp-docs ## the site, from docs/ and docstrings, in build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build $(ARGS)

bench: venv ## the benchmarks, C ones first
	$(PY) tools/ctest.py bench
	for file in benchmarks/bench_*.py; do $(PY) "$$file" $(ARGS) || exit 1; done

soak: venv ## long random runs of the engine
	$(PY) -m pytest tests -m soak $(ARGS)

fuzz: venv ## the fuzzer on hostile checkpoints (10 minutes), long property tests
	$(PY) tools/fuzz.py
	$(PY) -m pytest tests --ignore=tests/lint --hypothesis-profile=long $(ARGS)

matrix: ## build, install and train with each Python, NumPy and compiler that is here
	$(PYTHON) tools/matrix.py $(ARGS)

cuda-wheel: $(VENV)/stamp-base ## the wheel fsdpc-cuda13, in dist: the plugin for GPUs
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w dist packages/cuda13

clean: ## remove all that the build made, .venv too
	rm -rf build $(VENV) python/*.egg-info python/fsdpc/_core*.so python/fsdpc/libfsdpc_*
