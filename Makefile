# One entry for all work on the project; `make help` lists the targets.
# `make demo` and `make test` set up what they need: nothing has to be done before them.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The interpreter that makes the environment: the first that is new enough.
PYTHON ?= $(shell tools/find_python.sh)
VENV ?= .venv
PY := $(abspath $(VENV))/bin/python
STAMP := $(VENV)/.set-up
TOOLS := .tools
AUDIT := .tools-audit/bin/pip-audit
AUDIT_VERSION := 2.10.1
UV_VERSION := 0.13.9
PYTEST := $(PY) -m pytest
PYTEST_ARGS ?=
# The minor versions of Spark that are supported besides the pinned one, see requirements-spark-*.txt.
SPARK_VERSIONS := 4.1 4.2
# Processes that run the whole suite: more than two cores, as much of it waits for other processes. An idle one takes
# tests over from another.
WORKERS ?= 3
SUITE = --numprocesses=$(WORKERS) --dist=worksteal $(PYTEST_ARGS)

# Spark listens on the loopback address and starts its workers with this environment's interpreter.
export SPARK_LOCAL_IP := 127.0.0.1
export PYSPARK_PYTHON := $(PY)
export PYSPARK_DRIVER_PYTHON := $(PY)
# Another Spark or Python on this machine must not leak in.
unexport SPARK_HOME SPARK_CONF_DIR PYTHONPATH PYTHONHOME
# Tests start hundreds of processes, and each would compile the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

##@ Use it
.PHONY: help setup demo demo-cdc attack bench bench-growth bench-native bench-peers bench-recovery bench-requests bench-rescale bench-restart bench-sinks bench-smoke bench-service bench-scale bench-tables bench-tails chaos chaos-service chaos-blocks chaos-sinks outages load load-web report soak stack stack-check

help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## Make .venv with the pinned requirements (once, and again when they change)

demo: $(STAMP) ## Run the flights example, kill it, resume it, compare it; STRICT=1 fails on any difference
	$(PY) -m examples.flights.demo

demo-cdc: need-mvn need-postgres $(STAMP) ## Run the change-data example on PostgreSQL and Kafka, kill it four times, check it; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m tools.servers.beside $(PY) -m examples.merchant_orders.demo

bench: $(STAMP) ## Compare with Spark's transformWithState, workload by workload; ONLY=small,list, SHORT=1 (few rows), STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench $(if $(ONLY),--only $(ONLY))

bench-growth: $(STAMP) ## Measure 100 thousand to 10 million keys, and 5 million rows in one partition; ONLY=memory, SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench.growth $(if $(ONLY),--only $(ONLY))

bench-native: $(STAMP) ## Compare with Spark's native operators in the JVM; ONLY=small,join, SHORT=1 (few rows), STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_native $(if $(ONLY),--only $(ONLY))

bench-peers: need-mvn $(STAMP) ## Run one job in PyFlink, Quix Streams, Bytewax, Pathway, Spark and here; ONLY=Bytewax, SHORT=1 (only here), STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.peers $(if $(ONLY),--only "$(ONLY)")

bench-recovery: need-go $(STAMP) ## Measure how long output stops when a task, an executor or a host is lost, beside Spark's own operator; BENCH_ARGS, SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_recovery $(BENCH_ARGS)

bench-requests: need-go need-mvn $(STAMP) ## Count requests per batch at an S3 server, beside Spark's own state store on S3A; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_requests

bench-rescale: $(STAMP) ## Measure the batches of a query that changes from 4 to 8 and to 3 partitions; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_rescale

bench-restart: $(STAMP) ## Compare the time from a driver's start to its first batch on existing state; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_restart

bench-scale: need-go $(STAMP) ## Compute latency, manifests and costs of 50 to 10,000 partitions, on a virtual clock; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_scale

bench-tables: need-go $(STAMP) ## Compare checkpoints with the changelog on and off, beside Flink's published tables; ONLY=value-state, SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_tables $(if $(ONLY),--only $(ONLY))

bench-tails: $(STAMP) ## Compare the slowest persists with and without an early second attempt, on a virtual clock; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_tails

bench-smoke: $(STAMP) ## Compare with Spark's own transformWithState in three workloads; STRICT=1
	$(PY) -m loadtest.bench_smoke

bench-sinks: need-mvn $(STAMP) ## Compare exactly-once output to Kafka with Spark's own Kafka sink; SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_sinks

bench-service: need-go $(STAMP) ## Measure the service's figures; ONLY=ingest,objects, SHORT=1 (seconds), STRICT=1 (goals)
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.bench_service $(if $(ONLY),--only $(ONLY))

chaos: $(STAMP) ## Kill and suspend processes, move clocks, rewind, rescale and fork in 80 jobs, half of them with modes of failover and standbys; DSTL_CHAOS_SEED repeats
	DSTL_CHAOS_RUNS=40 DSTL_REPORTS=$(abspath reports) $(PYTEST) -s tests/e2e/test_chaos.py tests/e2e/test_chaos_modes.py $(PYTEST_ARGS)

chaos-service: need-go $(STAMP) ## Kill the service 200 times and verify the stored state; STRICT=1 fails on any loss
	$(PY) -m loadtest.chaos_service $(CHAOS_ARGS)

attack: $(STAMP) ## Send hostile requests to real services; ONLY=tokens, SHORT=1 (a minute or two), STRICT=1 fails on any miss
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.attack $(if $(ONLY),--only "$(ONLY)")

chaos-blocks: $(STAMP) ## Kill 20 executors between actions and between operators; output and state belong together; STRICT=1
	$(PY) -m loadtest.chaos_blocks $(CHAOS_ARGS)

chaos-sinks: need-mvn $(STAMP) ## Kill at each step of publishing to Kafka, PostgreSQL, Parquet files and Delta Lake, and at random; CHAOS_ARGS, STRICT=1
	$(PY) -m loadtest.chaos_sinks $(CHAOS_ARGS)
	DSTL_SINK_KIT=long $(PYTEST) tests/integration/backend_client/sinks/test_sink_kit.py

outages: need-mvn $(STAMP) ## Take Kafka brokers away for 130 s, and kill nine of three, while a query publishes; anything lost or doubled fails
	DSTL_KAFKA_OUTAGE_S=130 DSTL_KAFKA_KILLS=9 $(PYTEST) tests/e2e/test_kafka_cluster.py \
		tests/e2e/test_sink_failures.py::test_broker_that_gives_no_answer

load: need-go $(STAMP) ## Load the service with 100 slots at 5 checkpoints/s for 60 s; WORKLOAD, SHAPE, STORE, THRESHOLDS, SHORT=1, STRICT=1
	$(PY) -m loadtest.load

load-web: need-go $(STAMP) ## Load the service likewise, from locust's web page on loopback
	$(PY) -m loadtest.load --web

report: $(STAMP) ## Write one page of all measurements that exist, reports/report.html; RUN=missing or RUN=bench-tails,load runs some first
	RUN=$(RUN) $(PY) -m tools.report

soak: need-go $(STAMP) ## Run 5,000 small batches of a query on S3, and look whether memory, objects or local files grow; BATCHES, SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m loadtest.soak $(if $(BATCHES),--batches $(BATCHES))

stack: need-go $(STAMP) ## Run S3 server, coordinator and a Spark cluster with sidecars on loopback until Ctrl-C
	$(PY) -m tools.servers

stack-check: need-go $(STAMP) ## Run a job on such a stack, then stop it
	$(PY) -m tools.servers --check

##@ Test it
.PHONY: test test-ci servers versions lint types tidy check test-unit test-integration test-e2e test-versions differential
.PHONY: modelcheck mutants walk fuzz-api audit

test: lint types servers versions ## Run everything: ruff, mypy and all tests, in three processes (WORKERS=1: in one)
	$(PYTEST) $(SUITE)

test-ci: $(STAMP) ## Run everything, then a few failed tests once more, alone; both results are shown
	$(MAKE) --jobs=2 lint types servers versions
	$(PY) -m tools.suite -- $(SUITE)

servers: need-go need-mvn $(STAMP) ## Build and fetch the servers that tests start (once, and again for new versions)
	$(PY) -m tools.servers.prepare

check: lint types tidy ## Run the checks that take seconds: ruff, mypy and the rules of tests/test_tidy.py

lint: $(STAMP) ## Check style and format with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP) ## Check types with mypy, strict
	$(PY) -m mypy

tidy: $(STAMP) ## Check who imports whom, docstrings, invariants
	$(PYTEST) tests/test_tidy.py $(PYTEST_ARGS)

test-unit: $(STAMP) ## Run the tests that need neither Spark nor a server
	$(PYTEST) -m "not (integration or spark or e2e)" $(PYTEST_ARGS)

test-integration: need-go $(STAMP) ## Run the tests with a real S3 server or a Spark session
	$(PYTEST) -m "(integration or spark) and not e2e" $(PYTEST_ARGS)

test-e2e: need-go need-mvn $(STAMP) ## Run the tests of the whole system, kills included
	$(PYTEST) -m e2e $(PYTEST_ARGS)

test-versions: need-go need-mvn versions servers ## Run end-to-end and differential tests on each older Spark; ONLY=4.1, SHORT=1, STRICT=1
	SHORT=$(SHORT) STRICT=$(STRICT) $(PY) -m tools.test_versions $(if $(ONLY),--only $(ONLY)) -- $(PYTEST_ARGS)

versions: $(SPARK_VERSIONS:%=$(VENV)-spark-%/.set-up) ## Install the older supported versions of Spark over the environment

differential: $(STAMP) ## Run plans and drawn histories on Spark's own operator and on this one; EXAMPLES=10 each; any difference fails
	DSTL_DIFFERENTIAL_EXAMPLES=$(or $(EXAMPLES),10) DSTL_REPORTS=$(abspath reports) \
		$(PYTEST) -s tests/e2e/differential $(PYTEST_ARGS)

modelcheck: $(STAMP) ## Run the service's rules under many orders of store calls; SCHEDULES=20000 of each history, SEED
	DSTL_MODELCHECK_SCHEDULES=$(or $(SCHEDULES),20000) DSTL_MODELCHECK_SEED=$(SEED) \
		$(PYTEST) -rA --timeout=0 tests/modelcheck $(PYTEST_ARGS)

mutants: $(STAMP) ## Revert the fix of each patch in tests/mutations, and see its test fail; ONLY=A1,A6, JOBS=2, STRICT=1
	STRICT=$(STRICT) $(PY) -m tools.mutants --jobs $(or $(JOBS),1) $(if $(ONLY),--only $(ONLY))

walk: $(STAMP) ## Trace a change on a real run, from the update to the manifest and back, and print the files
	$(PY) -m tools.walk

fuzz-api: $(STAMP) ## Fuzz the service by its OpenAPI document; EXAMPLES=1000 takes longer
	$(PY) -m tools.fuzz_api --max-examples $(or $(EXAMPLES),200)

audit: $(STAMP) ## Write reports/sbom.json, and look for advisories about the pins; STRICT=1 fails where that cannot be done
	$(PY) -m tools.bill_of_materials
	$(MAKE) $(AUDIT) || echo "pip-audit cannot be installed"
	STRICT=$(STRICT) $(PY) -m tools.advisories $(AUDIT) requirements.txt requirements-service.txt requirements-build.txt \
		requirements-stack.txt

##@ Work on it
.PHONY: format settings-page metrics-page requirements clean

format: $(STAMP) ## Format the code and fix what ruff can fix
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

settings-page: $(STAMP) ## Write docs/settings.md from the declarations in the code
	$(PY) -m tools.settings_page

metrics-page: $(STAMP) ## Write docs/metrics.md from the declarations in the code
	$(PY) -m tools.metrics_page

# Hashes of the files for all platforms, and no address of an index; UPGRADE=1 takes the newest versions.
COMPILE = $(TOOLS)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make requirements" \
	$(if $(UPGRADE),--upgrade)

requirements: $(TOOLS)/uv-$(UV_VERSION) ## Pin requirements*.txt again from pyproject.toml; UPGRADE=1 takes the newest
	$(COMPILE) --all-extras --output-file requirements.txt pyproject.toml
	$(COMPILE) --extra service --constraint requirements.txt --output-file requirements-service.txt pyproject.toml
	$(COMPILE) --group build --output-file requirements-build.txt
	$(COMPILE) --group stack --override requirements-stack-overrides.txt --output-file requirements-stack.txt
	for peer in apache-flink bytewax pathway quixstreams; do \
		$(COMPILE) --output-file loadtest/peers/requirements-$$peer.txt loadtest/peers/$$peer.in; done
	$(COMPILE) --group spark-4-1 --output-file requirements-spark-4.1.txt
	$(COMPILE) --group spark-4-2 --output-file requirements-spark-4.2.txt

clean: ## Remove environment, caches, reports and built test programs
	rm -rf .venv .venv-* $(TOOLS) .tools-audit .stack .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -rf build dist reports spark-warehouse metastore_db derby.log artifacts
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: prerequisites need-go need-mvn need-postgres

prerequisites:
	@tools/check_prerequisites.sh python java

need-go:
	@tools/check_prerequisites.sh go

need-mvn:
	@tools/check_prerequisites.sh mvn

need-postgres:
	@tools/check_prerequisites.sh postgres

SITE = "$$($(1) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Nothing is fetched that has no hash: first what builds wheels, then the wheels, last the project itself.
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check --no-deps

$(VENV)/.requirements: requirements-build.txt requirements.txt | prerequisites
	@echo "Setting up $(VENV) with $$($(PYTHON) --version): 1.3 GB, two minutes or more the first time."
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes -r requirements-build.txt
	$(PIP_INSTALL) --require-hashes --no-build-isolation -r requirements.txt
	@touch $@

$(STAMP): $(VENV)/.requirements pyproject.toml | prerequisites
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# Another minor version of Spark, laid over the environment: what is in its own folder comes first.
$(VENV)-spark-%/.set-up: requirements-spark-%.txt $(VENV)/.requirements | $(STAMP)
	@echo "Setting up $(@D): 0.5 GB, a minute or more the first time."
	rm -rf $(@D)
	$(PY) -m venv --without-pip $(@D)
	$(PIP_INSTALL) --require-hashes --no-build-isolation --ignore-installed --target $(call SITE,$(@D)/bin/python) -r $<
	echo "import site; site.addsitedir('$(call SITE,$(PY))')" >$(call SITE,$(@D)/bin/python)/below.pth
	@touch $@

$(AUDIT): | prerequisites
	$(PYTHON) -m venv --clear .tools-audit
	.tools-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit==$(AUDIT_VERSION)

$(TOOLS)/uv-$(UV_VERSION):
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@
