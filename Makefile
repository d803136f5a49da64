# Two commands on a fresh machine: `make demo` and `make test`. They need Python 3.10 or newer and no GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test browser test-cuda lint docs bench clean

demo: $(INSTALLED)
	$(BIN)/python -m lightning_fp8 fit --config configs/tiny_gpt_fp8.yaml
	$(BIN)/python -m lightning_fp8 report runs/tiny_gpt_fp8

# Two processes for two cores, as each imports all packages and few tests wait; one thread each, as the tensors of the tests
# are small. A process runs whole files, so that their fixtures are made only once, in the order of collection, which puts the
# slow files first. Bytecode is kept, as the tests start a hundred programs that import the package.
# glibc keeps freed memory, so that new tensors need no pages from the system; this saves a twentieth of the time.
test: $(INSTALLED) browser
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432 \
		$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# the report's page is tested in a real browser
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
		command -v apt-get >/dev/null || { \
			echo "The tests of the report's page need Chromium, and there is no apt-get to install it." \
				"Install chromium or google-chrome."; exit 1; }; \
		as_root=$$([ "$$(id -u)" = 0 ] || command -v sudo); \
		$$as_root apt-get update -qq && $$as_root apt-get install -y -qq chromium; }

# on a machine with a GPU, in an environment whose torch supports it
test-cuda:
	$(PYTHON) -m pytest -m cuda
	@if ! command -v compute-sanitizer >/dev/null; then \
		echo "Left out: memcheck, synccheck and racecheck, as compute-sanitizer is not installed."; exit; fi; \
	for tool in memcheck synccheck racecheck; do \
		compute-sanitizer --tool $$tool --error-exitcode 1 $(PYTHON) -m pytest -m cuda \
			tests/ops/test_cuda.py tests/ops/test_cuda_gemm.py \
			-k "ragged or self_test or weights_and_scales or splits" || exit 1; done; \
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

# a training step of the demo's model, compared with plain bf16 and torchao's emulated float8; then a comparison of all precisions
bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python -m benchmarks.cpu_step
	$(BIN)/python -m benchmarks.precisions

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf $(VENV) build dist runs
