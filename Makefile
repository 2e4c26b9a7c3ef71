# Everything runs in a virtual environment of its own, made on first use. `make help` lists what there is.

VENV ?= .venv
PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check
# Test files at a time. Most tests wait for servers and leases, so two processors do for four.
JOBS ?= 4
PYTEST_ARGS ?=
BENCH_ARGS ?=
LEDGER_ARGS ?=
# The unit and architecture tests, without the files that test servers, and without the programs of the documentation,
# which talk to servers.
DOCS = tests/architecture/test_docs.py
QUICK = tests/unit tests/architecture --ignore=tests/unit/test_servers.py \
	--deselect=$(DOCS)::test_the_programs_of_the_readme_run --deselect=$(DOCS)::test_the_tutorial_runs \
	--deselect=$(DOCS)::test_the_program_for_plain_kombu_runs --deselect=$(DOCS)::test_the_careers_outside_of_celery_run \
	--deselect=$(DOCS)::test_the_test_that_users_are_shown_passes \
	--deselect=$(DOCS)::test_the_quotas_of_a_recipe_hold --deselect=$(DOCS)::test_the_commands_of_the_recipe_of_two_environments_run
CHAOS_ARGS ?=
# Containers often forbid bytecode. Then each of the hundreds of processes of the suite compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL = help
.PHONY: help venv example example-ledger example-storm test tests quick lint types bench figures chaos docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Installed again only when the requirements have changed.
$(VENV)/stamp-example: setup.cfg pyproject.toml
	@sh .ci/make-venv $(VENV)
	$(PIP) -e '.[web,embedded,zookeeper,plots]'
	@touch $@

$(VENV)/stamp-develop: setup.cfg pyproject.toml
	@sh .ci/make-venv $(VENV)
	$(PIP) -e '.[cluster,embedded,metrics,otel,plots,tui,web,zookeeper-sasl]' --group test --group lint
	@touch $@

$(VENV)/stamp-docs: setup.cfg pyproject.toml
	@sh .ci/make-venv $(VENV)
	$(PIP) -e . --group docs
	@touch $@

venv: $(VENV)/stamp-develop ## the virtual environment, with all that development needs

example: $(VENV)/stamp-example ## run the example project; needs no server installed
	$(PY) example_project/run.py

example-storm: $(VENV)/stamp-example ## a cache-refresh storm with dedup and without; half a minute
	$(PY) example_project/storm.py

example-ledger: $(VENV)/stamp-example ## a ledger posted by elected workers, and the verdict; LEDGER_ARGS="--kills 4"
	$(PY) example_project/ledger.py $(LEDGER_ARGS)

test: lint types tests ## lint, types and the whole test suite

tests: $(VENV)/stamp-develop ## the test suite only; PYTEST_ARGS="-k quota" chooses, JOBS=2 runs two files at a time
	$(PY) tests/provision.py
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

quick: $(VENV)/stamp-develop ## unit and architecture tests that need no server, within half a minute
	$(PY) -m pytest -q $(QUICK) $(PYTEST_ARGS)

lint: $(VENV)/stamp-develop ## style, formatting, and who may import whom
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports --no-cache

types: $(VENV)/stamp-develop ## mypy, strictly
	$(PY) -m mypy --strict

bench: $(VENV)/stamp-develop ## benchmarks beside the stock transport; BENCH_ARGS="claims --quick"
	$(PY) tests/provision.py
	$(PY) -m benchmarks $(BENCH_ARGS)

figures: $(VENV)/stamp-develop ## write the results in benchmarks/out into README.rst and the guide
	$(PY) -m benchmarks --readme

chaos: $(VENV)/stamp-develop ## 200 SIGKILLs and 60 other faults over 200,000 messages; CHAOS_ARGS="--seed 8"
	$(PY) tests/provision.py
	$(PY) -m tests.chaos --broker dq --broker stock --seed 7 --messages 200000 --kills 200 --others 60 --lease 15 --tenants 1000 --work-ms 8 $(CHAOS_ARGS)

docs: $(VENV)/stamp-docs ## the documentation, into docs/_build/html
	$(PY) -m sphinx -W --keep-going -q -b html docs docs/_build/html

clean: ## remove what was made
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
