# Two commands for a newcomer: `make demo` and `make test`. Python >= 3.11, pip and make are all they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all versions lint fuzz slow docs clean

$(VENV)/.stamp-core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-core
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.stamp-report: $(VENV)/.stamp-core
	$(PIP) -e '.[report]'
	touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-core
	$(PIP) -e '.[docs]'
	touch $@

DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)

# side=8: at the published 32 pFedRLLA's encoder has 13.8 million weights, 270 times as many as this net, and a step of Adam for
# each of ten clients in every round allows no 20 rounds/s on two cores (docs/results/pfedrlla.md). The agent's weights are
# random in its first 50 rounds: accuracies are the same with either.
demo: $(VENV)/.stamp-report   ## four systems beside FedAvg and local training, on embedded real data
	$(BIN)/fedjax-sim compare fedavg local fedpolicy pfedrlla:side=8 fedpam qbandit --model mlp --rounds 15 --out $(DEMO)
	$(BIN)/fedjax-sim report $(DEMO) > /dev/null
	@echo "report: $(DEMO)/report.html"

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup -q --durations=10

test: $(VENV)/.stamp-test   ## lint, types and the first tier of tests
	$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not slow and not full"

test-all: $(VENV)/.stamp-test   ## the second tier: more methods, settings and processes through the same properties
	$(PYTEST) -m "full and not slow"

lint: $(VENV)/.stamp-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

versions: $(VENV)/.stamp-test   ## a small set of tests with the oldest JAX and with another Python
	.ci/versions

fuzz: $(VENV)/.stamp-test   ## thousands of random inputs: bad specs, files, arrays and command lines
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -q tests/data/test_fuzz.py tests/cli/test_fuzz_cli.py

slow: $(VENV)/.stamp-test   ## long checks: learning curves of the agents, long runs
	$(BIN)/python -m pytest -q -m slow

docs: $(VENV)/.stamp-docs   ## the documentation site; a link that leads nowhere is an error
	$(BIN)/python docs/generate.py
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	@echo "site: build/docs/index.html"

clean:
	rm -rf $(VENV) runs build *.egg-info
