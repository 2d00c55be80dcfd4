# Each target does all its own set-up on a machine that has Python 3.11+, pip and make.
# Pin torch here, not in the library: without the pin pip takes the newest CUDA build, gigabytes of it.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  ?= torch==2.13.*
LOWEST_TORCH ?= torch==2.11.*
# Tests wait for processes that they started a third of the time: four at a time keep two cores busy.
WORKERS ?= 4
# Build the editable installs with what is in the environment: five times faster than a fresh one for each.
# Python compiles a module when it is first imported: pip would compile all of them, most of which no test imports.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# In seconds what takes pip minutes. It does not read pip's settings: where it finds no index, pip goes on.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(1) || $(PIP) $(1)
STAMP  := $(VENV)/.installed
# A worker that crashes ends the run: with a new worker, pytest-xdist may wait forever.
PYTEST  = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --max-worker-restart=0
EVERY_PUSH := not gpu and not sweep
# The part of all tests that test-all runs.
SHARD  ?= 1/1
# pytest 9.2 makes pytest-xdist 3.8 ignore the groups of tests: tests/conftest.py would stop the run.
DEV    := "pytest<9.2" pytest-xdist hypothesis ruff mypy import-linter types-PyYAML s3fs "moto[server]" torchdata \
          torchmetrics tqdm matplotlib tensorboard nbclient ipykernel scikit-learn jsonschema hydra-core mpi4py python-etcd transformers \
          peft jedi markdown-it-py schedulefree
# What only tests of test-all import.
ALL    := datasets kubeflow-training
# What builds the site: see docs/decisions/0067-the-reference-is-written-at-each-build.md.
DOCS   := "mkdocs==1.6.*" "mkdocs-material==9.8.*" "mkdocstrings==1.0.*" "mkdocstrings-python==2.0.*" "griffelib==2.*"

# Python with torch and nothing of ours, for what is carried to a GPU machine: this machine's, if it has torch.
BARE   := $(shell $(PYTHON) -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))" && echo $(PYTHON) || echo .venv-gpu/bin/python)

.PHONY: weight ceilings demo docs docs-serve ops test test-quick test-changed test-all test-profile promises test-engines test-lowest gpu-bundle test-gpu bench-gpu bench bench-quick lint types release version changelog clean

demo: $(STAMP)
	$(BIN)/stratagem demo

# The site in site/, to be opened with docs-serve: the search needs a server. Fails on a broken link.
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The site at http://127.0.0.1:8000, built again when a page changes.
docs-serve: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --watch core --watch plugins --watch scripts/site

# Many tests of DeepSpeed, which run where its plugin changed, need an operation that it compiles: in minutes, once on a
# machine, kept in the user's cache directory.
OPS_IF_CHANGED = if $(BIN)/python tests/selection.py plugins/deepspeed/; then $(MAKE) ops; fi
ops: $(STAMP)-dev
	$(BIN)/stratagem deepspeed build-ops cpu_adam

# At least one case of every promise: see tests/selection.py.
test: $(STAMP)-dev lint types
	$(OPS_IF_CHANGED)
	$(PYTEST) -m "$(EVERY_PUSH)" tests

# While you work: no test of more than 0.4 seconds, no kit, no grid of runs.
test-quick: $(STAMP)-dev
	$(OPS_IF_CHANGED)
	$(PYTEST) -m "$(EVERY_PUSH) and not slow" tests/core tests/plugins tests/repository

# What the files that differ from BASE (the last commit) are likely to affect.
test-changed: $(STAMP)-dev
	$(PYTEST) -m "$(EVERY_PUSH)" --changed $(if $(BASE),--base $(BASE)) tests || [ $$? -eq 5 ]

# Every case: hours, or a part of them with SHARD=1/4 on each of four machines.
test-all: $(STAMP)-all ops
	$(BIN)/stratagem deepspeed build-ops async_io
	$(BIN)/python scripts/test_all.py -n $(WORKERS) --shard $(SHARD)

# make test with what each test costs, in test-costs.jsonl and as sums by class and by file.
test-profile: $(STAMP)-dev
	$(OPS_IF_CHANGED)
	$(PYTEST) -m "$(EVERY_PUSH)" --costs test-costs.jsonl tests

# Which test of make test guards each promise whose other cases only make test-all runs, into promises.md.
promises: $(STAMP)-dev
	$(BIN)/python -m pytest -q --collect-only --promises=promises.md tests >promises.log || { tail -n 30 promises.log; exit 1; }

# The packages of contrib/ that have an engine, each in its own environment, which is kept in the user's cache directory:
# all, or some with ARGUMENTS="hivemind optuna". One that fails does not stop the others.
test-engines: $(STAMP)-dev
	$(BIN)/python scripts/engines.py $(ARGUMENTS)

# The tests of test-quick with the lowest torch that the packages declare, in an environment of its own: gigabytes, on PyPI it is for CUDA.
test-lowest:
	$(MAKE) test-quick VENV=.venv-lowest TORCH="$(LOWEST_TORCH)"

# A folder with which test-gpu and bench-gpu run on a machine that has Python, torch and no network.
gpu-bundle: $(STAMP)-dev
	$(BIN)/python tests/gpu/bundle.py

test-gpu: gpu-bundle/run $(filter .venv-gpu/%,$(BARE))
	PYTHON=$(BARE) gpu-bundle/run test $(ARGUMENTS)

bench-gpu: gpu-bundle/run $(filter .venv-gpu/%,$(BARE))
	PYTHON=$(BARE) gpu-bundle/run bench $(ARGUMENTS)

# All tables of the benchmarks, into benchmark-results/ and the docs: an hour. The quick ones: five minutes.
bench: $(STAMP)-dev
	$(BIN)/python benchmarks/run.py --docs docs/benchmarks.md $(ARGUMENTS)

bench-quick: $(STAMP)-dev
	$(BIN)/python benchmarks/run.py --quick $(ARGUMENTS)

gpu-bundle/run:
	$(MAKE) gpu-bundle

.venv-gpu/bin/python:
	$(PYTHON) -m venv .venv-gpu
	$@ -m pip install --quiet --disable-pip-version-check "$(TORCH)"

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Lines of code of the engine, of each package, of the tests.
weight:
	$(PYTHON) scripts/weight.py

# Writes how many lines of code each distribution may have, where lines were moved or removed.
ceilings:
	$(PYTHON) scripts/ceilings.py

types: $(STAMP)-dev
	$(BIN)/mypy

# Every distribution as sdist and wheel in dist/, each checked in a clean environment.
release: $(STAMP)
	$(BIN)/python scripts/release.py --torch "$(TORCH)" $(ARGUMENTS)

# Writes VERSION into every distribution, and what they require of each other.
version: $(STAMP)
	$(BIN)/python scripts/version.py "$(VERSION)"

# Moves docs/changes into CHANGELOG.md, as those of VERSION.
changelog:
	$(PYTHON) scripts/changelog.py "$(VERSION)"

clean:
	rm -rf $(VENV) .venv-gpu .venv-lowest build dist site gpu-bundle .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(VENV)/bin/python pyproject.toml core/pyproject.toml plugins/all.txt $(wildcard plugins/*/pyproject.toml)
	$(PIP) "hatchling>=1.26" "flit_core>=3.11" uv
	$(PIP) "$(TORCH)" numpy
	$(call INSTALL,--no-build-isolation -r plugins/all.txt)
	touch $@

# contrib/dp needs no engine: tests of the loop and of the step train under it, too.
$(STAMP)-dev: $(STAMP)
	$(call INSTALL,$(DEV) $(DOCS))
	$(call INSTALL,--no-build-isolation --no-deps -e contrib/dp)
	touch $@

$(STAMP)-all: $(STAMP)-dev
	$(call INSTALL,$(ALL))
	touch $@

$(STAMP)-docs: $(STAMP)
	$(call INSTALL,$(DOCS))
	touch $@
