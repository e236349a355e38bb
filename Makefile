# Needs only python3 (3.11+), pip (22.3+), git and make. Debian's Python forbids global installs (PEP 668) and
# may lack ensurepip, so the environment is created without pip and the system's pip installs into it.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# Build dependencies of FFCV, which has no wheel, and of fastsiam's JPEG decoding.
FFCV_PACKAGES := g++ pkg-config python3-dev libopencv-dev libturbojpeg0-dev libjpeg-dev
LIBRARIES     := opencv4 libturbojpeg libjpeg

# GPU machines often have no network, so without .venv the system's Python is used.
GPU_PY  := $(if $(wildcard $(VENV)/installed),$(PY),$(PYTHON))
MINUTES ?= 9
soak: MINUTES := $(if $(filter file,$(origin MINUTES)),120,$(MINUTES))
SEED    ?= 0

# Tests share the cores: each of the JOBS runs in one thread.
JOBS     ?= 2
TEST     := OMP_NUM_THREADS=1 $(PY) -m pytest --dist worksteal
COVERAGE := runs/coverage

# A separate environment with the oldest supported torch, on Python 3.12 if available.
OLDEST        := .venv-oldest
OLDEST_PYTHON := $(or $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12*/bin/python; do \
                     "$$python" -c "" 2>/dev/null && echo "$$python" && break; done),$(PYTHON))
OLDEST_TESTS  := tests/train/test_compile.py tests/train/test_step.py tests/methods \
                 tests/kernels tests/views tests/without_gpu tests/run/test_checkpoint.py tests/test_older_runs.py
# Memory errors are found with AddressSanitizer, UBSan and buffers of the exact size, and with glibc's
# checked malloc. Python's own allocator would hide reads beyond small objects. libasan finds the
# libstdc++ functions it wraps only if both libraries are loaded first.
SANITIZED     := $(CURDIR)/runs/sanitized
SANITIZER     := g++ -fsanitize=address,undefined -fno-sanitize-recover=undefined -DEXACT_ROOMS -g
# libjpeg-turbo is not instrumented: only the checked malloc sees writes beyond a buffer.
EXACT         := $(CURDIR)/runs/exact
SANITIZED_RUN  = LD_PRELOAD=$$(g++ -print-file-name=libasan.so):libstdc++.so.6 PYTHONMALLOC=malloc \
                 ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=64
CHECKED_RUN   := LD_PRELOAD=libc_malloc_debug.so.0 GLIBC_TUNABLES=glibc.malloc.check=3 PYTHONMALLOC=malloc
NATIVE_TESTS  := tests/kernels tests/views/test_photometric.py \
                 tests/pipelines/test_parity.py tests/pipelines/test_engine.py
TWO_RANKS     := tests/train/test_signals.py::test_training_runs_under_torchrun
CASES         ?= 500

# Left out: tests of what forked processes write, because coverage writes there, too.
MEASURED := COVERAGE_FILE=$(COVERAGE)/data $(TEST) --cov --cov-context=test --cov-report= \
            --deselect tests/pipelines/test_shutdown.py::test_loader_in_forked_process_is_rejected \
            --deselect tests/fuzz/test_fuzz.py::test_readers_handle_corrupt_files

.PHONY: demo test test-all test-oldest memory-check arm-check coverage docs fuzz gpu dist lint lock mutants soak

demo: $(VENV)/installed        ## a small end-to-end run: images, training, kNN, report
	rm -rf runs/demo
	$(PY) -m fastsiam demo --out runs/demo

test: $(VENV)/installed        ## one case of every property: 6 to 13 minutes on two cores
	$(TEST) -n $(JOBS) -m "not slow and not alone"
	$(TEST) -m "alone and not slow"

test-all: test                 ## all tests, including the slow cases
	$(TEST) -n $(JOBS) -m "slow and not alone"
	$(TEST) -m "slow and alone"

test-oldest: $(OLDEST)/installed  ## tests that depend on torch's version, with the oldest one
	OMP_NUM_THREADS=1 FASTSIAM_NO_SKIP= $(OLDEST)/bin/python -m pytest --dist worksteal -n $(JOBS) \
	    -m "not slow and not alone" $(OLDEST_TESTS)

memory-check: $(VENV)/installed ## check compiled code for out-of-bounds accesses, with two tools
	FASTSIAM_KERNELS=$(SANITIZED) CXX="$(SANITIZER)" $(PY) -m fastsiam.kernels.build
	FASTSIAM_KERNELS=$(SANITIZED) $(SANITIZED_RUN) $(TEST) -n $(JOBS) \
	    -m "not slow and not alone and not dali" $(NATIVE_TESTS)
	FASTSIAM_KERNELS=$(SANITIZED) $(SANITIZED_RUN) $(PY) -m tests.fuzz --cases $(CASES) --jobs $(JOBS) \
	    "jpeg kernels" engine images beton
	FASTSIAM_KERNELS=$(EXACT) CXX="g++ -DEXACT_ROOMS" $(PY) -m fastsiam.kernels.build
	FASTSIAM_KERNELS=$(EXACT) $(CHECKED_RUN) $(PY) -m tests.fuzz --cases $(CASES) "jpeg kernels" engine
	$(CHECKED_RUN) $(TEST) -n $(JOBS) -m "not slow and not alone" $(NATIVE_TESTS)
	$(CHECKED_RUN) $(TEST) $(TWO_RANKS)

arm-check: $(VENV)/installed   ## test the kernels and the engine on emulated 64-bit Arm; needs root
	$(PYTHON) -m pip --python $(PY) install --quiet uv
	PYTHON=$(PY) UV=$(VENV)/bin/uv tests/arm.sh runs/arm

coverage: $(VENV)/installed    ## lines and branches that the tests reach, including child processes
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	$(MEASURED) -n $(JOBS) -m "not alone" --junitxml=$(COVERAGE)/tests.xml
	$(MEASURED) -m alone --cov-append --junitxml=$(COVERAGE)/alone.xml
	$(PY) -m coverage html --quiet --data-file=$(COVERAGE)/data --directory=$(COVERAGE)/html
	$(PY) -m coverage report --data-file=$(COVERAGE)/data --skip-covered

# The fork server imports the tests once; processes forked by tests find the mutants by PYTHONPATH.
mutants: $(VENV)/installed     ## mutations that no test detects; run again to continue
	$(PYTHON) -m pip --python $(PY) install --quiet "mutmut>=3.8"
	PYTHONPATH="$(CURDIR)/mutants" OMP_NUM_THREADS=1 $(PY) -m mutmut run --max-children $(JOBS) $(MUTANTS)
	$(PY) -m mutmut results

fuzz: $(VENV)/installed        ## read CASES corrupt files of each kind; another SEED makes others
	$(PY) -m tests.fuzz --cases $(CASES) --seed $(SEED) --jobs $(JOBS)

docs: $(VENV)/installed        ## build the site in site/; fails on dead links and pages outside the menu
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# auditwheel names the wheel after the oldest glibc it runs with, and looks for patchelf in PATH.
dist: $(VENV)/installed        ## build an sdist and a manylinux wheel with compiled kernels in dist/
	rm -rf dist
	$(PYTHON) -m pip --python $(PY) install --quiet auditwheel build patchelf
	$(PY) -m build --outdir dist
	@$(PY) -m zipfile --list dist/*.whl | grep --quiet LICENSE.libjpeg-turbo \
	    || { echo "libjpeg-turbo or its licence is not in the wheel: sudo apt-get install libjpeg-dev"; exit 1; }
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(PY) -m auditwheel show dist/*.whl

gpu:                           ## test and measure a GPU for MINUTES; run again to continue
	$(GPU_PY) -m fastsiam bench gpu --minutes $(MINUTES) \
	    $(if $(filter command line,$(origin OUT)),--out "$(OUT)") $(if $(DATA),--data "$(DATA)") $(if $(CIFAR10),--cifar10 "$(CIFAR10)") $(if $(DEVICE),--device $(DEVICE)) \
	    $(if $(AGAIN),--again $(AGAIN))

soak: $(VENV)/installed        ## kill and damage runs repeatedly and compare them with undisturbed ones
	$(PY) -m fastsiam bench soak --minutes $(MINUTES) --seed $(SEED) \
	    $(if $(filter command line,$(origin OUT)),--out "$(OUT)")

lint: $(VENV)/installed        ## check style, types, security (bandit) and dependencies (pip-audit)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m bandit --quiet --configfile pyproject.toml --recursive fastsiam pipelines bench
	$(PY) -m tests.audit

LOCK := $(VENV)/bin/uv pip compile --quiet --system-certs --universal --upgrade --no-header --no-annotate
lock: $(VENV)/installed        ## lock the newest dependencies, and those for the oldest torch
	$(PYTHON) -m pip --python $(PY) install --quiet uv
	$(LOCK) --all-extras --output-file requirements.lock pyproject.toml
	echo "torch==2.11.0" | $(LOCK) --python-version 3.11 --extra convert --extra detection --extra dev \
	    --extra timm --constraint - --output-file requirements-oldest.lock pyproject.toml

$(VENV)/installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fastsiam needs Python 3.11 or newer")'
	@$(PYTHON) -m pip --help | grep --quiet -e "--python" || { echo "make needs pip 22.3 or newer"; exit 1; }
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(PY) install --quiet --constraint requirements.lock --editable ".[cloud,convert,dali,dask,detection,mlflow,peers,slurm,timm,wandb,docs,dev]"
	@if ! pkg-config --exists $(LIBRARIES) 2>/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing what FFCV is compiled with: $(FFCV_PACKAGES)"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(FFCV_PACKAGES) >/dev/null \
	        || echo "apt-get failed"; \
	fi
	@if pkg-config --exists $(LIBRARIES) 2>/dev/null; then \
	    echo "compiling FFCV"; \
	    $(PYTHON) -m pip --python $(PY) install --quiet --constraint requirements.lock --editable ".[ffcv]" \
	        || echo "FFCV did not compile; continuing without it"; \
	else \
	    echo "continuing without FFCV; for it run: sudo apt-get install $(FFCV_PACKAGES) && rm $(VENV)/installed"; \
	fi
	touch $@

$(OLDEST)/installed: pyproject.toml requirements-oldest.lock
	$(OLDEST_PYTHON) -m venv --without-pip $(OLDEST)
	$(PYTHON) -m pip --python $(OLDEST)/bin/python install --quiet --constraint requirements-oldest.lock \
	    --editable ".[convert,detection,dev,timm]"
	touch $@
