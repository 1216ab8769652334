# make demo   the main job on a real checkpoint
# make test   the whole suite with the newest supported versions, and what depends on them with the oldest

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
# Python 3.12 where there is one, also under pyenv, which reads the variable: constraints-oldest.txt says why.
OLDEST_PYTHON ?= $(shell PYENV_VERSION=3.12 python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
WORKERS ?= 2
# Tiny models lose more to threads than they win.
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
RESULTS ?= benchmarks/results
GPU_METHODS = base,llama-pro,opt-deus,midus-hml
OLDEST_TESTS = tests/ops tests/memory tests/models tests/benchmarks --ignore=tests/models/test_peft.py

.PHONY: demo test test-newest test-oldest material check format bench bench-gpu bench-gpu-compiled bench-gpu-sizes bench-upscale mutants clean

demo: $(VENV)/installed
	$(VENV)/bin/python -m demo

test: test-newest test-oldest

test-newest: $(VENV)/installed material
	$(TEST_ENV) $(VENV)/bin/python -m pytest -n $(WORKERS)

test-oldest: $(OLDEST)/installed
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest -n $(WORKERS) $(OLDEST_TESTS)

material: $(VENV)/installed
	$(VENV)/bin/python -m material smollm2 smollm2-gguf addresses benchmarks

check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Ends with the first status that is not 0, but only after all of it ran.
bench: $(VENV)/installed
	@status=0; \
	$(VENV)/bin/python -m benchmarks ops --device cpu --dtype bfloat16 --tokens 1 --shapes smollm2-135m,llama-3.2-1b \
		--budget 60 --results $(RESULTS) || status=$$?; \
	$(VENV)/bin/python -m benchmarks ops --device cpu --budget 180 --results $(RESULTS) || status=$$?; \
	$(VENV)/bin/python -m benchmarks model --device cpu --dtype bfloat16 --phases generate \
		--budget 150 --results $(RESULTS) || status=$$?; \
	$(VENV)/bin/python -m benchmarks model --device cpu --lengths 256 --budget 300 --results $(RESULTS) || status=$$?; \
	$(VENV)/bin/python -m benchmarks report --results $(RESULTS) || status=$$?; \
	exit $$status

# Models are one run: each command goes on with that of the one before.
bench-gpu:
	@status=0; \
	$(PYTHON) -m benchmarks ops --device cuda --budget 180 --results $(RESULTS) || status=$$?; \
	$(PYTHON) -m benchmarks model --device cuda --base llama-3.1-8b --methods $(GPU_METHODS) --rounds 2 --budget 150 \
		--results $(RESULTS) || status=$$?; \
	$(PYTHON) -m benchmarks model --device cuda --base llama-3.2-1b --methods $(GPU_METHODS) --rounds 2 --budget 110 \
		--resume --results $(RESULTS) || status=$$?; \
	exit $$status

# The same run, where bench-gpu was run before.
bench-gpu-compiled:
	$(PYTHON) -m benchmarks model --device cuda --base llama-3.1-8b,llama-3.2-1b --methods llama-pro,midus-hml --rounds 1 \
		--phases generate --decoding graph,compiled --generate-batches 1 --budget 420 --resume --results $(RESULTS)

bench-gpu-sizes:
	$(PYTHON) -m benchmarks model --device cuda --base llama-3.2-1b,llama-3.1-8b --methods $(GPU_METHODS) --rounds 1 \
		--phases train --batches 32 --lengths 512,1024,4096 --budget 500 --results $(RESULTS)

bench-upscale: $(VENV)/installed
	$(VENV)/bin/python benchmarks/upscale.py

# Its own environment: cosmic-ray runs the tests with the Python of $(VENV).
mutants: $(VENV)/installed material $(VENV)-mutants/installed
	$(VENV)-mutants/bin/python scripts/mutants.py --python $(abspath $(VENV))/bin/python $(MUTANTS)

$(VENV)-mutants/installed: constraints.txt
	$(PYTHON) -m venv $(VENV)-mutants
	$(VENV)-mutants/bin/python -m pip install -q 'cosmic-ray>=8.7,<9'
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few hundred MB of packages, once."
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	@echo "Setting up $(OLDEST), with the oldest supported versions: several GB of packages, once."
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e . pytest pytest-xdist hypothesis
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(VENV)-mutants outputs build *.egg-info
