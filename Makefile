# make tune   set up .venv, then tune one All-Gather + GEMM and one Flash Decode problem on whatever is here
# make test   set up .venv, then ruff, mypy and pytest, without what takes seconds a case and what is marked as volume
# make test-slow   what takes seconds a case
# make test-volume   only what is marked so; AUTOTAX_TEST_PART=1/3 takes the first third of it
# make test-all   the three of them
# make test-versions   a sample under other versions of Python, torch and Triton, each in an environment of its own
# make test-amd   set up .venv, then execute kernels compiled for AMD in an emulator: see docs/amd.md

PYTHON ?= python3
BIN := .venv/bin
# On NVIDIA GPUs the set that the shipped winners were proven with: they answer only there.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),constraints-gpu.txt,constraints.txt)

# What is imported is compiled once for all processes, which are hundreds in a test, not by each; what nobody imports never is.
export PYTHONDONTWRITEBYTECODE :=

SAMPLE := tests/kernels/test_compile.py tests/kernels/test_decode_features.py tests/kernels/test_gemm_reduce_scatter.py \
  tests/heap/test_triton_interpreter.py tests/torch/test_operators.py tests/cli/test_equal_code.py tests/cli/test_doctor.py

.PHONY: tune test test-slow test-all test-volume test-versions environments test-environments test-amd clean

tune: .venv/ready
	$(BIN)/autotax tune

# Four processes on two cores, for each waits for its ranks half of the time, and mypy beside them. What needs the whole machine
# comes after them. It is named here as well, because listing all other tests takes as long as running it.
SHARED := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
NAMED := tests/gpu tests/nn/test_on_gpus.py tests/fleet/test_ray.py tests/fleet/test_slurm.py tests/test_unattended.py
test: chosen := and not volume and not slow
test test-all: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/mypy & types=$$!; \
	$(SHARED) -m 'not alone $(chosen)'; tests=$$?; \
	wait $$types && exit $$tests
	$(BIN)/python -m pytest -m 'alone $(chosen)' $(NAMED)

test-slow: .venv/ready
	$(SHARED) -m 'slow and not volume and not alone'

# Of a part no case may need the machine for itself: pytest ends with 5 then.
test-volume: .venv/ready
	$(SHARED) -m 'volume and not alone'
	$(BIN)/python -m pytest -m 'volume and alone' $(NAMED) || [ $$? = 5 ]

# Python, torch and Triton of the shipped winners, of vLLM and SGLang, and the newest, each in an environment of its own. uv makes
# them; it sees no Python of pyenv by itself. Torch comes with libraries for GPUs, 5 GB, of which environments share what is equal.
# What cannot be installed within five minutes is skipped aloud. SET=2 takes the second set alone.
SETS := 3.11/2.11.0/3.6.0 3.12/2.14.1/3.8.0 3.13/2.15.0/3.9.0
VERSIONS ?= $(if $(SET),$(word $(SET),$(SETS)),$(SETS))
test-versions: environments test-environments

environments: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	for version in $(VERSIONS); do \
	  set -- $$(echo $$version | tr / ' ') && own=.venv/torch-$$2 && rm -f $$own/ready && \
	  python=$$(ls -d $$HOME/.pyenv/versions/$$1.*/bin/python 2>/dev/null | tail -1) && \
	  timeout 100 $(BIN)/uv venv --quiet --clear --python $${python:-$$1} $$own && \
	  timeout 300 $(BIN)/uv pip install --quiet --python $$own/bin/python -c constraints-common.txt -r pyproject.toml --extra test torch==$$2 triton==$$3 \
	  && touch $$own/ready || echo "Python $$1 with torch $$2 cannot be installed here"; \
	done

# The sample leaves out what shows little of the versions and takes long.
test-environments: .venv/ready
	for version in $(VERSIONS); do \
	  set -- $$(echo $$version | tr / ' ') && own=.venv/torch-$$2 && echo Python $$1, torch $$2, Triton $$3 && \
	  { [ -e $$own/ready ] || { echo "skipped: it is not installed"; continue; }; } && \
	  PYTHONPATH=$$PWD $$own/bin/python -m pytest -n 3 --dist loadfile -m 'not alone and not volume and not slow' $(SAMPLE) || exit 1; \
	done

test-amd: .venv/ready
	$(BIN)/python -m pytest -m amd tests/amd

# Editable, so that `make test` tests this checkout; again whenever the dependencies change.
.venv/ready: pyproject.toml constraints-common.txt $(CONSTRAINTS)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) -e '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
