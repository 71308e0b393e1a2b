# Everything a person types. Each target does its own set-up (.ci/setup), once; later calls start in seconds.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# Both engines' classes, loaded beside ours; not with vLLM itself, whose own configuration takes no other publisher.
ENGINE_CLASSES := tests/integration/test_events_engine_classes.py
# Real engines that test-engines and bench-engines run.
ENGINES ?= sglang vllm
# Parts of test-engines, each below 20 minutes on two cores: the tests whose names end so, and in the first one all others.
ENGINE_PARTS := handoffs faults slowness caches models
$(if $(filter-out $(ENGINE_PARTS),$(PART)),$(error PART is one of $(ENGINE_PARTS)))
faults := _faults _held _router
slowness := _held_interpreter _load
caches := _events _hicache _hierarchical _offloading _plugin _prefetch _tier
models := _latent _recurrent _states _window
tests_of = $(if $($(2)),$(wildcard $($(2):%=tests/engines/test_$(1)%.py)),$(filter-out $(foreach part,$(filter-out handoffs,$(ENGINE_PARTS)),$(call tests_of,$(1),$(part))),$(wildcard tests/engines/test_$(1)*.py)))
# Without a file pytest would run all tests there are.
engine_pytest = $(if $(2),$(PYTEST) .venv-$(1)/bin/python -m pytest $(2),echo "no tests of $(1)")
# What each part of the tests ends with.
SLOWEST := --durations=10
# Parts of `make test` behind lint, each a process of its own; what a part says is shown when it has ended, where several run.
# JOBS=2 runs so many side by side, as most of their time is spent waiting. It is not what CI does: that integration's bounds
# in time hold beside another part has to be shown first. Integration uses what the parts of clients have built.
JOBS ?= 1
CLIENTS := client-typescript client-go client-rust
PARTS := $(CLIENTS) contract integration others
side_by_side = $(if $(filter-out 1,$(1)),--jobs=$(1) --output-sync=target)
# cargo, and what tests start, must not look for this make's own jobs.
ALONE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL
NO_SLOW = $(if $(SLOW),,-m "not slow")
# Proxies of the machine are no business of loopback traffic, and neither are a developer's own settings.
PYTEST := env -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY

# The whole request trace, where it is at hand; a sample is committed.
test-all bench: export TEST_TRACE ?= $(wildcard ../shared/traces/conversation_trace.jsonl)

.PHONY: help demo test test-all test-engines test-nixl soak mutants coverage test-clients clients native bench bench-engines docs release-check gen lint types style contract lock clean integration others worlds

help:  ## What there is.
	@sed -n 's/^\([a-z-]*\):.*##/  make \1 \t/p' $(MAKEFILE_LIST) | expand -t 20

demo:  ## One real hand-off: prefill and decode in two processes, tokens compared (ARGS="--data-plane shm").
	@.ci/setup main
	@$(BIN)/kvgrpc demo $(ARGS)

test: lint  ## What CI runs: lint, drift, clients but Java and C++, all quick tests, tests/contract on protobuf 6 and 7 (JOBS=2; ARGS="tests/unit -k plan").
	@.ci/setup etcd
	@$(if $(ARGS),$(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $(ARGS),$(MAKE) $(call side_by_side,$(JOBS)) $(PARTS))

client-%:
	@$(ALONE) .ci/clients $*

integration: $(CLIENTS)
	@$(ALONE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) tests/integration

others:
	@$(ALONE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) --ignore=tests/contract --ignore=tests/integration

test-all: lint test-clients  ## The same with the long tests.
	@$(BIN)/python -m pytest $(SLOWEST) $(or $(ARGS),--ignore=tests/contract)
	@$(if $(ARGS),,$(MAKE) contract SLOW=yes)

test-engines:  ## Real engines, prefill and decode, over kvgrpc: tokens, faults, restarts (ENGINES=vllm; PART=faults; ARGS as in test).
	@for engine in $(ENGINES); do .ci/setup $$engine; done
	@$(foreach engine,$(ENGINES),$(foreach part,$(if $(ARGS),all,$(or $(PART),$(ENGINE_PARTS))),\
	  $(call engine_pytest,$(engine),$(or $(ARGS),$(strip $(call tests_of,$(engine),$(part)) $(if $(filter sglangcaches,$(engine)$(part)),$(ENGINE_CLASSES)))));))
	@$(if $(ARGS),,$(if $(filter vllmcaches,$(ENGINES:%=%$(or $(PART),caches))),.ci/setup main; $(PYTEST) $(BIN)/python -m pytest $(ENGINE_CLASSES)))
	@echo "kvgrpc engines: OK ($(ENGINES))"

test-nixl:  ## The suites of storage backends with the real NIXL, in an environment of its own.
	@.ci/setup nixl
	@$(PYTEST) .venv-nixl/bin/python -m pytest $(or $(ARGS),tests/integration/test_storage_nixl.py tests/conformance/storage)

clients: test-clients

test-clients:  ## Clients in Go, Rust, TypeScript, examples in Java, C++: generated, built, tested, scenarios; says what it skipped.
	@.ci/clients

release-check:  ## A release, tried and not published: all artifacts, each installed into an empty environment and used.
	@.ci/release-check

docs:  ## The site, into build/site: every link checked, reference from docstrings and protos, no host but its own.
	@.ci/docs

soak:  ## Thousands of hand-offs, then pulls, while ranks are killed, rooms cancelled, writes fail; floods beside a pair (SOAK=full: 20,000 in ten minutes).
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.soak $(if $(filter full,$(SOAK)),--rooms 20000 --seconds 600 --pull-seconds 120 --flood-seconds 90) $(ARGS)

mutants:  ## Small faults, one at a time: which does no test notice? (ARGS="protocol --sample 100"; runtime, rpc, server, … for shells)
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.mutants $(ARGS)

coverage:  ## Which lines and branches of the library the quick tests of one process reach.
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m coverage run -m pytest -q -m "not slow" $(or $(ARGS),tests/unit tests/simulation tests/conformance tests/contract)
	@$(BIN)/python -m coverage report

contract:  ## tests/contract without torch and Mooncake: on the floors of pyproject.toml (protobuf 6), and on protobuf 7.
	@$(MAKE) $(call side_by_side,$(if $(SLOW),1,$(JOBS))) contract-protobuf6 contract-protobuf7

worlds:
	@.ci/setup protobuf6
	@.ci/setup protobuf7

contract-%: worlds
	@echo "contract tests on" $$(.venv-$*/bin/python -c "import grpc, google.protobuf as p; print('protobuf', p.__version__, 'grpcio', grpc.__version__)")
	@$(ALONE) .venv-$*/bin/python -m pytest tests/contract -q $(SLOWEST) $(NO_SLOW)

native:  ## kvgrpc-index, the index in Rust, into .venv/bin, where there is cargo.
	@.ci/setup main
	@.ci/rust native $(BIN)

bench:  ## Every benchmark beside its baseline (ONLY=control,events for some).
	@.ci/setup main
	@$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench-engines:  ## The same engines and requests over kvgrpc and over their own Mooncake connectors, turn and turn about.
	@for engine in $(ENGINES); do \
	  .ci/setup $$engine; \
	  $(PYTEST) .venv-$$engine/bin/python -m benchmarks.engines $(if $(ONLY),--only $(ONLY)) $(ARGS); \
	done

gen:  ## Generated code of all languages, and docs/errors.md, from protos/.
	@.ci/setup gen
	@.ci/setup main
	@.ci/generate .
	@PYTHONPATH=. $(BIN)/python .ci/settings_page.py docs/settings.md
	@PYTHONPATH=. $(BIN)/python .ci/sync_client.py kvgrpc/client/sync.py
	@.ci/typescript gen
	@.ci/go gen
	@.ci/rust gen

lint:  ## Style, types, which module may import which, protos, drift of generated files, broken promises.
	@.ci/setup main
	@.ci/setup gen
	@$(MAKE) --jobs=2 --output-sync types style

types:
	@$(BIN)/mypy

style:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@.venv-gen/bin/buf lint
	@.venv-gen/bin/buf format --diff --exit-code
	@.ci/drift
	@.ci/breaking

lock:  ## Resolves the lock files anew.
	@.ci/setup main
	@.ci/lock

clean:  ## Removes environments, caches and results.
	@rm -rf .venv .venv-* .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
