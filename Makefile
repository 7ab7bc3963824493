# `make help` lists the targets. PYTHON=... chooses the interpreter of the environment.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
OLDEST := .cache/mlx-lm-oldest
UV := .cache/uv
# Packages beside the product: `make env` installs them, and the wheel does not contain them.
WORKSHOP := $(patsubst %/pyproject.toml,%,$(wildcard workshop/*/pyproject.toml))
SCHEMATHESIS := .cache/schemathesis
SHOTS := .cache/shots
CYCLONEDX := .cache/cyclonedx

# The folder of a module is never on the path: `import http` has to find the standard library's.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes; without .pyc files each would compile src/cairn again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env serve test quick coverage core rest fuzz jitter gate-matrix simulate tamper mutants audit soak long fleet-numbers oldest schema shots monitoring clients lint format lock release clean FORCE
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile \
	| while IFS='|' read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

env: $(STAMP) ## create .venv from requirements.lock, with OpenBLAS on Linux
	@:

# If PYTHON has a different version than the environment, create the environment again.
VERSION_OF = -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
ifneq ($(PYTHON),)
ifneq ($(shell $(PYTHON) $(VERSION_OF)),$(shell $(BIN)/python $(VERSION_OF)))
$(STAMP): FORCE
endif
endif
FORCE:

# A name on the path may be a shim that does not run, so try each one.
$(STAMP): pyproject.toml requirements.lock
	@set -e; \
	usable='import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; \
	wanted=''; \
	for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
		if "$$python" -c "$$usable" 2>/dev/null; then wanted=$$python; break; fi; \
	done; \
	if [ -z "$$wanted" ]; then \
		echo "No Python 3.11, 3.12 or 3.13 with venv$(if $(PYTHON), at $(PYTHON)); make env PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	if [ -n "$(PYTHON)" ] || ! $(BIN)/python -c "$$usable" 2>/dev/null; then \
		echo "env: $$("$$wanted" -V) in $(VENV)"; \
		rm -rf $(VENV); "$$wanted" -m venv $(VENV); \
	fi; \
	$(BIN)/python -P tools/install_lock.py requirements.lock; \
	echo "env: Cairn and $(words $(WORKSHOP)) packages of workshop/, from this checkout"; \
	$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e . $(WORKSHOP:%=-e %)
	@if [ "$$(uname)" = Linux ]; then \
		blas=$$($(BIN)/python -P -m cairn.engine.machine.blas) && echo "env: BLAS $${blas##*/}" || true; \
	fi
	@touch $@

serve: env ## run the server; ARGS="..." for options of `ops serve`
	@CAIRN_PROGRAM=./cairn $(BIN)/ops serve $(ARGS)

# Sets LD_PRELOAD to a BLAS whose bits depend on shape, unless it is set (LD_PRELOAD= preloads none).
# Without such a BLAS, the tests of bit-identity prove nothing, and `why` is set to the reason.
define with_blas
	why=''; \
	if [ "$$(uname)" = Linux ]; then \
		if [ -z "$${LD_PRELOAD+set}" ] && found=$$($(BIN)/python -P -m cairn.engine.machine.blas 2>/dev/null); then \
			LD_PRELOAD=$$found; export LD_PRELOAD; \
		fi; \
		if [ "$${LD_PRELOAD-unset}" = "" ]; then why='LD_PRELOAD is set to nothing'; \
		else why=$$($(BIN)/python -P -m cairn.engine.machine.blas --check) && why=''; fi; \
	fi; \
	gate() { [ -z "$$why" ] || printf '\033[31mgate NOT RUN: %s\033[0m\n' "$$why"; }; \
	gate; \
	if [ -n "$$why" ] && [ "$${CAIRN_GATE_REQUIRED:-}" = 1 ]; then exit 1; fi
endef

# One worker more than there are cores, because many tests wait for a server that starts or stops.
# Each has one BLAS thread: two threads that share a core wait for each other far longer than they
# compute. A worker starts with neighbouring tests, so that most fixtures of a module are set up once,
# and takes over tests of another worker when it has finished its own.
# ARGS=-n0 runs all tests in one process, as a debugger needs.
ALL_CORES := -n $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1) --dist worksteal

test: env ## run the tests on all cores, on Linux with OpenBLAS preloaded; ARGS="..." for options of pytest
	@$(with_blas); \
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -P -m pytest -q $(ALL_CORES) $(ARGS); \
	status=$$?; gate; exit $$status

# Its tests seldom wait, and each worker takes seconds to collect them: one worker a core.
quick: env ## test journal, http and actors in 30 seconds, on the fake engine, with few random examples
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python -P -m pytest -q $(ALL_CORES) -n auto --hypothesis-profile=quick \
		-m 'not slow and not soak and not long and not model and not unmeasured' tests/journal tests/http tests/actors $(ARGS)

# Every line and branch of these has to be run: the journal, the adapters of the protocols, and what
# is pure in the engine: `make core` and `make coverage` check that. `make coverage` alone checks the
# second bound, that of all of src/cairn. pyproject.toml says what is excluded, and why. PostgreSQL
# has to be installed: the store is run on it, too.
PURE_ROOMS := journal http/chat_completions http/completions http/messages http/responses http/agents \
	http/ollama engine/answer engine/prompt
PURE_MODULES := contract errors growth json_text names reports sampling schedule ttl
comma := ,
space := $(subst ,, )
commas = $(subst $(space),$(comma),$(strip $(1)))
$(foreach one,$(PURE_ROOMS:%=src/cairn/%) $(PURE_MODULES:%=src/cairn/engine/%.py),$\
	$(if $(wildcard $(one)),,$(error $(one) is to be measured, and does not exist)))
PURE := $(call commas,$(PURE_ROOMS:%=src/cairn/%/*) $(PURE_MODULES:%=src/cairn/engine/%.py))
PURE_PERCENT := 100
ALL_PERCENT := 95

# Runs pytest with the options $(1), measured with the options $(2).
define measure
rm -rf .cache/coverage; mkdir -p .cache/coverage; $(with_blas); \
OPENBLAS_NUM_THREADS=1 $(BIN)/coverage run $(2) -m pytest -q $(ALL_CORES) $(1) $(ARGS); status=$$?; \
unset LD_PRELOAD; $(BIN)/coverage combine -q
endef
define pure_report
echo '== coverage of the pure core and of the adapters'; \
$(BIN)/coverage report --include='$(PURE)' --fail-under=$(PURE_PERCENT) || status=1
endef

coverage: env ## run the tests as `make test` does, and measure which lines and branches they run
	@export CAIRN_MEASURE_SERVERS=1; $(call measure,); \
	echo '== coverage of src/cairn'; \
	$(BIN)/coverage report --fail-under=$(ALL_PERCENT) || status=1; \
	$(pure_report); gate; exit $$status

# Measuring takes half as long again, so these rooms alone are measured: they run all lines of the
# pure core, even without the servers that they start.
CORE := tests/journal tests/http tests/engine tests/actors tests/ops

core: env ## test journal, http, engine, actors and ops, and measure the pure core: one part of .ci/run
	@$(call measure,$(CORE),--source=$(call commas,$(PURE_ROOMS:%=src/cairn/%) $(PURE_MODULES:%=cairn.engine.%))); \
	$(pure_report); gate; exit $$status

rest: override ARGS := $(CORE:%=--ignore=%) $(ARGS)
rest: test ## run all other tests, without measuring them: the other part

fuzz: env ## send 10,000 almost valid requests; EXAMPLES=... to change that, SEED=... to repeat a run
	@seed=$(or $(SEED),$$(date +%s)); echo "fuzz: SEED=$$seed"; \
	CAIRN_FUZZ_EXAMPLES=$(or $(EXAMPLES),10000) $(BIN)/python -P -m pytest -q tests/http/test_fuzz.py \
		--hypothesis-seed=$$seed $(ARGS)

# Each round is a separate test with its own seed. A failed round can be repeated with its seed;
# CAIRN_JITTER_SHRINK=1 shortens it as long as it fails.
jitter: env ## compare random histories with cold answers, bit for bit; REQUESTS=..., SEED=... to repeat a run
	@$(with_blas); \
	seed=$(or $(SEED),$$(date +%s)); echo "jitter: SEED=$$seed"; \
	CAIRN_JITTER_REQUESTS=$(or $(REQUESTS),1500) CAIRN_JITTER_SEED=$$seed \
		$(BIN)/python -P -m pytest -q -s -m gate tests/gate/test_jitter.py $(ARGS); status=$$?; gate; exit $$status

# Each cell is a process with its own kernels and threads. A cell with two threads takes long while
# other programs use the cores: THREADS=1 leaves those out.
gate-matrix: env ## compare random histories under Haswell, Zen and SkylakeX kernels; REQUESTS=..., SEED=..., THREADS=1
	@$(with_blas); \
	PYTHONPATH=. $(BIN)/python -P -m tests.gate.matrix --requests $(or $(REQUESTS),500) --seed $(or $(SEED),1) \
		--threads $(or $(THREADS),1 2) $(ARGS); status=$$?; gate; exit $$status

simulate: env ## run the actors under simulated threads, disk, clients and time; SEEDS=..., FIRST=... to repeat one
	@PYTHONPATH=. $(BIN)/python -P -m tests.simulation.simulation --seeds $(or $(SEEDS),1000) \
		--first $(or $(FIRST),1) $(ARGS)

tamper: env ## change every field of every event of the recorded journals in every way
	@CAIRN_TAMPER=all $(BIN)/python -P -m pytest -q --timeout 1200 tests/journal/test_tampering.py $(ARGS)

mutants: env ## show that simulations find each of a list of faults; ARGS="--only slab" to select some
	@PYTHONPATH=. $(BIN)/python -P -m tests.simulation.mutants $(ARGS)

# The tests of `make test` with random examples run again, with four times as many.
long: env ## run further cases and larger sizes of what `make test` shows; ARGS="tests/gate" to select some
	@$(with_blas); \
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -P -m pytest -q $(ALL_CORES) -m 'long or hypothesis' \
		--hypothesis-profile=long --durations=20 $(ARGS); \
	status=$$?; gate; exit $$status

# Tests too slow for every change: repeated kills, and the memory of many long sessions.
soak: env ## run the tests that take minutes each; ARGS="-k memory" to select some
	@$(with_blas); \
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -P -m pytest -q -m soak --durations=0 tests $(ARGS); \
	status=$$?; gate; exit $$status

# It needs PostgreSQL and HAProxy, as the tests of a fleet do. The servers that it starts preload their own BLAS.
fleet-numbers: env ## measure a fleet behind HAProxy; ARGS="--only kept" to choose a figure
	@PYTHONPATH=. $(BIN)/python -P -m tools.fleet_numbers $(ARGS)

# In an environment of its own, so that what it needs is not installed beside what serves. It needs the network.
audit: ## look for known vulnerabilities in the packages of requirements.lock
	@python3 -m venv .cache/audit && .cache/audit/bin/pip install --quiet pip-audit
	@.cache/audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock

oldest: env ## test caches, markers, calls and model files with the oldest mlx-lm that pyproject.toml allows
	@set -e; $(with_blas); \
	version=$$(sed -n 's/.*"mlx-lm>=\([0-9.]*\),.*/\1/p' pyproject.toml); \
	echo "oldest: mlx-lm $$version"; \
	if [ ! -d "$(OLDEST)/mlx_lm-$$version.dist-info" ]; then \
		rm -rf $(OLDEST); \
		env -u LD_PRELOAD $(BIN)/python -m pip install -qq --no-deps --target $(OLDEST) "mlx-lm==$$version"; \
	fi; \
	PYTHONPATH=$(OLDEST); export PYTHONPATH; \
	$(BIN)/python -P -c "import mlx_lm; used = mlx_lm.__version__; \
	assert used == '$$version', f'mlx-lm {used} in use, not $$version'"; \
	$(BIN)/python -P -m pytest -q tests/engine/mlx/test_cache_against_mlx_lm.py tests/engine/answer/test_markers.py \
		tests/engine/model/test_files_that_mean_ill.py; \
	$(BIN)/python -P -m pytest -q tests/journal/test_calls.py -k 'parser_makes or any_text'

# Schemathesis has an environment of its own, because only this target needs it.
schema: env ## check a running server against its /openapi.json; EXAMPLES=..., SEED=..., ARGS=--quick
	@test -x $(SCHEMATHESIS)/bin/schemathesis || { $(BIN)/python -m venv $(SCHEMATHESIS) \
		&& $(SCHEMATHESIS)/bin/python -m pip install -qq 'schemathesis>=4.32,<5'; }
	@SCHEMATHESIS=$(CURDIR)/$(SCHEMATHESIS)/bin/schemathesis $(BIN)/python -P tools/schema_check.py \
		--examples $(or $(EXAMPLES),20) --seed $(or $(SEED),1) $(ARGS)

# Playwright has an environment of its own, because only this target needs it. Chromium is the
# system's (Debian's package `chromium`).
shots: env ## use the explorer's pages in Chromium, and make the pictures of docs/pictures/explorer
	@test -x $(SHOTS)/bin/playwright || { $(BIN)/python -m venv $(SHOTS) \
		&& $(SHOTS)/bin/python -m pip install -qq 'playwright>=1.50,<2' 'axe-playwright-python>=0.1.4'; }
	@$(SHOTS)/bin/python -P tools/shots.py --python $(CURDIR)/$(BIN)/python $(ARGS)

# It needs Debian's package prometheus.
monitoring: env ## check alert rules, metrics and the queries of the dashboard with a real Prometheus
	@$(BIN)/python -P tools/monitoring_check.py

# No other target needs the clients. npm and pip install them in .cache/clients; one that cannot be
# installed is skipped.
clients: env ## run real clients, offline; ARGS="--only opencode" to select some
	@$(BIN)/python -P -m cairn_clients.real_clients $(ARGS)

lint: env ## check with ruff and mypy, and check the direction of imports
	@status=0; \
	$(BIN)/ruff check -q . || status=1; \
	$(BIN)/ruff format -q --check . || { $(BIN)/ruff format --check . || true; status=1; }; \
	$(BIN)/mypy --no-error-summary || status=1; \
	report=$$($(BIN)/lint-imports --no-logo --cache-dir .cache/import-linter 2>&1) \
		|| { echo "$$report"; status=1; }; \
	if [ $$status = 0 ]; then echo 'lint: ok'; fi; exit $$status

format: env ## format the code, and apply ruff's fixes
	@$(BIN)/ruff check -q --fix . || true
	@$(BIN)/ruff format -q .

# uv has an environment of its own, because only this target needs it.
lock: $(STAMP) ## rewrite requirements.lock from pyproject.toml; ARGS=--upgrade for newer versions
	@test -x $(UV)/bin/uv || { $(BIN)/python -m venv $(UV) && $(UV)/bin/python -m pip install -qq 'uv>=0.13,<0.14'; }
	@$(UV)/bin/uv pip compile -q pyproject.toml --group dev --universal \
		--python-version 3.11 --generate-hashes --no-annotate --no-header \
		--no-emit-index-url --no-emit-find-links $(ARGS) -o requirements.lock
	@! grep -nE '://|^-|@ ' requirements.lock
	@echo "lock: $$(grep -c '==' requirements.lock) packages"

# What lists the parts of a release has an environment of its own. It needs the network.
release: env ## build, try, hash and tag a release of this commit, unpublished; ARGS=--dry-run for no tag
	@test -x $(CYCLONEDX)/bin/cyclonedx-py || { $(BIN)/python -m venv $(CYCLONEDX) \
		&& $(CYCLONEDX)/bin/python -m pip install -qq 'cyclonedx-bom>=7,<8'; }
	@$(BIN)/python -P tools/release.py --sbom $(CURDIR)/$(CYCLONEDX)/bin/cyclonedx-py $(ARGS)

clean: ## remove the environment and all caches
	@rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache dist
