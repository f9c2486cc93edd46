# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
# one thread a worker: two OpenMP pools on two cores slow each other down
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_XET=1 HF_HUB_DISABLE_TELEMETRY=1

# Without a GPU a CPU torch goes in first, so that nothing later pulls a CUDA build of several GB.
define install_torch
if nvidia-smi >/dev/null 2>&1; then $(1) install --quiet 'torch>=2.7'; \
elif $(1) install --dry-run --no-deps --ignore-installed torch==2.13.0 2>/dev/null | grep -q '+cpu'; then \
	$(1) install --quiet torch==2.13.0; \
else $(1) install --quiet 'torch>=2.7' --index-url https://download.pytorch.org/whl/cpu; fi
endef

.PHONY: demo docs test test-faults test-interop test-oldest test-gpu bench-decode bench-gpu bench-train lint format checkpoint clean help

help:
	@echo "make demo    set up, then finetune -> eval -> push on the embedded checkpoint (under 10 minutes on 2 cores)"
	@echo "make test    set up, then lint, types and the test suite"
	@echo "make docs    the site, into build/site, with every link and anchor checked"
	@echo "make test-faults   every fault, kill -9 and Ctrl-C; make test runs three of each kind"
	@echo "make test-oldest   the families with the oldest transformers that is supported"
	@echo "make test-interop  deltas applied in other runtimes: transformers, peft, accelerate; llama.cpp and vLLM where they are installed"
	@echo "make bench-decode  the decoder against llama.cpp and accelerate (an hour, 40 GB of disk; root for memory limits)"
	@echo "make bench-train   training beside the Hugging Face Trainer and plain autograd (10 minutes; ARGS=--dry-run: seconds)"
	@echo "make bench-gpu     the decoder and training on a GPU (under 10 minutes; ARGS=--dry-run without one)"
	@echo "make format  rewrite the sources in the project's style"

demo: $(READY)
	$(BIN)/python recipes/demo/run.py

# NO_MKDOCS_2_WARNING: Material's notice about a release that pyproject.toml excludes
docs: $(READY)
	$(BIN)/python docs/make_commands.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html (its search needs a server: python -m http.server -d build/site)"

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --durations=10 $(TESTS)

# every fault of the Hub, kill -9 and Ctrl-C; `make test` runs three of each kind, by a fixed seed
test-faults: $(READY)
	REMOE_FAULTS=all $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --durations=5 tests/test_faults_*.py

# the families' suite with the oldest transformers that pyproject.toml allows, in a folder of its own
OLDEST := 5.21.0
test-oldest: $(READY)
	test -d build/transformers-$(OLDEST) || $(BIN)/python -m pip install --quiet --no-deps --target build/transformers-$(OLDEST) transformers==$(OLDEST)
	PYTHONPATH=build/transformers-$(OLDEST) $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) tests/conformance

# deltas in other runtimes; docs/apply.md says how to name a vLLM and a llama.cpp to it. What is not installed is listed
test-interop: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m interop -rs --durations=5 tests

# only what needs a CUDA device; skipped tests are listed
test-gpu: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -m gpu -rs tests

# ARGS="--parts floor,demo --rounds 5" and the like; benchmarks/README.md says what there is
bench-decode bench-gpu bench-train: $(READY)
	@$(BIN)/python -m pip install --quiet --group bench
	$(BIN)/python benchmarks/$(@:bench-%=%).py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# remakes the embedded checkpoint (about an hour on 2 cores); resumable
checkpoint: $(READY)
	$(BIN)/python recipes/demo/make.py --out remoe_cli/demo/checkpoint --work build/demo

$(READY): pyproject.toml
	@echo "Setting up $(VENV): torch, then remoe and its dependencies (one to three minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(call install_torch,$(BIN)/python -m pip)
	@$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $(READY)

clean:
	rm -rf $(VENV) dist runs demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
