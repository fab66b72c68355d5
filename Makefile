# make tune   set up .venv, then tune one All-Gather + GEMM and one Flash Decode problem on whatever is here
# make test   set up .venv, then ruff, mypy and pytest, without what is marked as volume
# make test-all   the same with it, which is what continuous integration runs
# make test-amd   set up .venv, then execute kernels compiled for AMD in an emulator: see docs/amd.md

PYTHON ?= python3
BIN := .venv/bin
# On NVIDIA GPUs the set that the shipped winners were proven with: they answer only there.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),constraints-gpu.txt,constraints.txt)

# What is imported is compiled once for all processes, which are hundreds in a test, not by each; what nobody imports never is.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: tune test test-all test-amd clean

tune: .venv/ready
	$(BIN)/autotax tune

# Two processes, which wait for their ranks in turn, and mypy beside them; what is about time, or about the whole machine, comes
# after them.
test: chosen := and not volume
test test-all: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not alone $(chosen)'; tests=$$?; \
	wait $$types && exit $$tests
	$(BIN)/python -m pytest -m 'alone $(chosen)'

test-amd: .venv/ready
	$(BIN)/python -m pytest -m amd tests/amd

# Editable, so that `make test` tests this checkout; again whenever the dependencies change.
.venv/ready: pyproject.toml constraints-common.txt $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
