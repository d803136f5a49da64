# Two commands on a fresh machine: `make demo` and `make test`. They need Python 3.10 or newer and no GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# what the demo needs, and everything else
DEMO := $(VENV)/installed-demo
INSTALLED := $(VENV)/installed
# more arguments of pytest
PYTEST ?=
# glibc keeps freed memory, so that new tensors need no pages from the system; this saves a twentieth of the time
ENVIRONMENT := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432

.PHONY: demo test test-fast browser test-cuda lint docs bench clean

demo: $(DEMO)
	$(BIN)/python -m lightning_fp8 fit --config configs/tiny_gpt_fp8.yaml
	$(BIN)/python -m lightning_fp8 report runs/tiny_gpt_fp8
	@echo "Next, whether FP8 pays on a GPU: $(BIN)/python -m lightning_fp8 estimate --config configs/gpt_124m_fp8.yaml --compiled"

# Two processes for two cores, as each imports all packages and few tests wait; one thread each, as the tensors of the tests
# are small. A process runs whole files, so that their fixtures are made only once, in the order of collection, which puts the
# slow files first. Bytecode is kept, as the tests start a hundred programs that import the package.
test: $(INSTALLED) browser
	$(ENVIRONMENT) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST)

# the inner loop: the test files without a Trainer, another process, a compiler, or models of other libraries
test-fast: $(INSTALLED)
	$(ENVIRONMENT) $(BIN)/python -m pytest -n 2 -q -m "not slow" $(PYTEST) $$(grep -rLE --include="test_*.py" \
		"[Tt]rainer|Fabric|processes|_warm|warm_|subprocess|fork|compile|inductor|host_kernels|cuda_half|transformers" tests)

# The report's page is tested in a real browser. Without one, and without a way to install one, its tests are left out by
# name; where CI is set, they fail.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		as_root=$$([ "$$(id -u)" = 0 ] || echo sudo --non-interactive); \
		$$as_root apt-get update -qq && $$as_root apt-get install -y -qq chromium; } || \
		echo "There is no Chromium, and it could not be installed: tests/tools/test_report_page.py is left out."

# on a machine with a GPU, in an environment whose torch supports it; memory is checked with each tensor in an allocation of
# its own, as next to a tensor in torch's cache is memory that may be accessed
test-cuda:
	$(PYTHON) -m pytest -m cuda
	@if ! command -v compute-sanitizer >/dev/null; then \
		echo "Left out: memcheck, synccheck and racecheck, as compute-sanitizer is not installed."; exit; fi; \
	for tool in memcheck synccheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m pytest -m cuda \
			tests/ops/test_cuda.py tests/ops/test_cuda_gemm.py \
			-k "ragged or check or weights_and_scales" || exit 1; done; \
	echo "Left out under compute-sanitizer: large shapes, training, graphs and threads; and its initcheck."

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# the documentation as a site in build/site/; a broken link or a public name without a description is an error (no
# `--quiet`, as mkdocs would not count warnings with it)
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# training steps of the demo's model in all precisions, compared with bf16-mixed and torchao's emulated float8
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks --suite train --device cpu --case demo

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,report]'
	touch $(DEMO)

$(INSTALLED): $(DEMO)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist runs
