# make demo      train and evaluate the three arms, then a small study with its report (makes its own
#                environment first);
#                options: make demo ARGS="--steps 20 --arms mp dm"
# make test      lint and the CPU test suite
# make test-all  the slow CPU tests and the real model too
# make test-gpu  the tests that need a CUDA device, in the current environment (PYTHON)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REAL_MODEL := .cache/smollm2-135m-instruct

.PHONY: demo test test-all test-gpu lint real-model clean

$(READY): pyproject.toml constraints.txt constraints-triton.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "Python 3.11 or newer is needed, %s is %d.%d; choose one with: make PYTHON=python3.11 ..." % (sys.executable, *v[:2]))'
	@echo "Installing torch, transformers, lm-eval and the rest of constraints.txt into $(VENV): 2-3 minutes, no output."
	@$(PYTHON) -m venv $(VENV)
	@# torch first and pinned, so that nothing else chooses its build.
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@# A CUDA build of torch has brought its own Triton; beside a CPU build the tests interpret kernels.
	$(BIN)/python -c "import triton" 2>/dev/null || \
		$(BIN)/pip install -q -c constraints.txt -c constraints-triton.txt -e ".[triton]"
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py $(ARGS)
	$(BIN)/hf-deltamatch study examples/configs/study_small.yaml --output runs/demo/study

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint
	$(BIN)/python -m pytest -m "not slow and not gpu and not real_model"

test-all: lint real-model
	$(BIN)/python -m pytest -m "not gpu" --fuzz-examples 2000

test-gpu:
	$(PYTHON) -m pytest -m gpu

real-model: $(REAL_MODEL)/config.json

$(REAL_MODEL)/config.json: | $(READY)
	$(BIN)/pip install -q -c constraints.txt -e ".[real-model]"
	$(BIN)/python tests/fetch_real_model.py $(REAL_MODEL)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
