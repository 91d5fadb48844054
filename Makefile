# Everything a newcomer needs is `make demo` and `make test`: each makes a virtual environment on first use.
#
#   PYTHON=python3.12       the Python that the environment is made from
#   VENV=path               where it lies
#   NOVENV=1                make and install nothing: use PYTHON as it is (a machine that has all packages already)
#   WORKERS=8               processes for the tests that need no GPU
#   GPU_WORKERS=1           processes that share the GPU in the tests that need one
#   SGLANG_VENV=path        where the environment of test-sglang lies
#   ARGS="-k masks -x"      passed on to pytest, or to `nbverify demo`

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
GPU_WORKERS ?= 4
SGLANG_VENV ?= .venv-sglang
ARGS ?=

ifdef NOVENV
PY := $(PYTHON)
INSTALLED :=
INSTALLED_TEST :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
endif

PYTEST = $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-sglang lint format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@awk '/^#   / { sub(/^#/, ""); print }' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## draft tree, mask and attention in the terminal: on the GPU if there is one, else emulated
	$(PY) -c 'import sys; from nbverify.cli import main; sys.exit(main())' demo $(ARGS)

test: lint  ## lint, types, and every test that needs no GPU, except the slow ones
	$(PYTEST) -n $(WORKERS) --dist worksteal --ignore=tests/gpu -m "not slow" $(ARGS)

test-all: lint  ## the same with the slow ones
	$(PYTEST) -n $(WORKERS) --dist worksteal --ignore=tests/gpu $(ARGS)

# Worker processes: a test that hangs or kills the CUDA context takes its worker down, and the next gets a fresh one.
test-gpu: $(INSTALLED_TEST)  ## the tests on a GPU; without one this fails, it does not skip
	$(PYTEST) tests/gpu -m "not alone" -n $(GPU_WORKERS) --max-worker-restart=100 --require-gpu $(ARGS)
	$(PYTEST) tests/gpu -m alone -n 1 --max-worker-restart=100 --require-gpu $(ARGS)

# SGLang runs on the CPU here: its Triton kernels interpreted, its own test kit.  An environment of its own, since the
# interpreter needs numpy below 2.4, and SGLang's full set of packages is several GB for a GPU.
test-sglang: $(SGLANG_VENV)/.installed  ## SGLang's own attention tests with the plugin, on the CPU
	$(SGLANG_VENV)/bin/python -m pytest tests/serving -m sglang $(ARGS)

lint: $(INSTALLED_TEST)  ## ruff and mypy, nothing is changed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED_TEST)  ## reformat, and fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove caches and build output, not the environment
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find nbverify tests -name __pycache__ -type d -prune -exec rm -rf {} +

# CUDA major version of the driver, 0 without one.
DRIVER_CUDA = $(shell $(PYTHON) -c 'import ctypes as c; v = c.c_int(); \
	c.CDLL("libcuda.so.1").cuDriverGetVersion(c.byref(v)); print(v.value // 1000)' 2>/dev/null || echo 0)

# 13 or more: cu13; 12 or older: cu12.  Without a driver: the cu12 toolkit, which the compiled tests need, but not CuPy,
# a download of 100 MB that only a GPU can use.
OLDER_THAN_13 := 1 2 3 4 5 6 7 8 9 10 11 12
REQUIREMENTS = $(strip $(if $(filter 0,$(DRIVER_CUDA)),-e . "numba-cuda[cu12]", \
	$(if $(filter $(OLDER_THAN_13),$(DRIVER_CUDA)),-e ".[cu12]",-e ".[cu13]")))

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on $(REQUIREMENTS)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on -e ".[test]"
	@touch $@

# What the attention path of SGLang imports, and no more: SGLang itself without its dependencies.  tests/serving has
# stand-ins for torchvision, which is imported and not used.
$(SGLANG_VENV)/.installed: tests/serving/requirements.txt tests/serving/requirements-bare.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check -r tests/serving/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --disable-pip-version-check --no-deps \
		-r tests/serving/requirements-bare.txt -e .
	@touch $@
