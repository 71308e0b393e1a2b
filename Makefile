# Everything a person types. Each target does its own set-up (.ci/setup), once; later calls start in seconds.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# Both engines' classes, loaded beside ours; not with vLLM itself, whose own configuration takes no other publisher.
ENGINE_CLASSES := tests/integration/test_events_engine_classes.py
# Real engines that test-engines and bench-engines run.
ENGINES ?= sglang vllm
# Proxies of the machine are no business of loopback traffic, and neither are a developer's own settings.
PYTEST := env -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY

# The whole request trace, where it is at hand; a sample is committed.
test-all bench: export TEST_TRACE ?= $(wildcard ../shared/traces/conversation_trace.jsonl)

.PHONY: help demo test test-all test-engines test-nixl soak mutants coverage test-clients clients bench bench-engines gen lint contract lock clean

help:  ## What there is.
	@sed -n 's/^\([a-z-]*\):.*##/  make \1 \t/p' $(MAKEFILE_LIST) | expand -t 20

demo:  ## One real hand-off: prefill and decode in two processes, tokens compared (ARGS="--data-plane shm").
	@.ci/setup main
	@$(BIN)/kvgrpc demo $(ARGS)

test: lint test-clients  ## What CI runs: lint, drift, all quick tests, tests/contract on protobuf 6 and 7 (ARGS="tests/unit -k plan").
	@.ci/setup etcd
	@$(BIN)/python -m pytest -m "not slow" $(or $(ARGS),--ignore=tests/contract)
	@$(if $(ARGS),,$(MAKE) contract)

test-all: lint test-clients  ## The same with the long tests.
	@$(BIN)/python -m pytest $(or $(ARGS),--ignore=tests/contract)
	@$(if $(ARGS),,$(MAKE) contract SLOW=yes)

test-engines:  ## Real engines, prefill and decode, over kvgrpc: tokens, faults, restarts (ENGINES=vllm for one; ARGS as in test).
	@for engine in $(ENGINES); do .ci/setup $$engine; done
	@for engine in $(ENGINES); do \
	  $(PYTEST) .venv-$$engine/bin/python -m pytest $(or $(ARGS),tests/engines $$([ $$engine = vllm ] || echo $(ENGINE_CLASSES))); \
	done
	@$(if $(ARGS),,$(if $(filter vllm,$(ENGINES)),.ci/setup main; $(PYTEST) $(BIN)/python -m pytest $(ENGINE_CLASSES)))
	@echo "kvgrpc engines: OK ($(ENGINES))"

test-nixl:  ## The suites of storage backends with the real NIXL, in an environment of its own.
	@.ci/setup nixl
	@$(PYTEST) .venv-nixl/bin/python -m pytest $(or $(ARGS),tests/integration/test_storage_nixl.py tests/conformance/storage)

clients: test-clients

test-clients:  ## Clients in Go, Rust, TypeScript: generated code, build, tests; says which it skipped for want of tools.
	@.ci/clients

soak:  ## Thousands of hand-offs while ranks are killed, rooms cancelled, writes fail (SOAK=full: 20,000 in ten minutes).
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.soak $(if $(filter full,$(SOAK)),--rooms 20000 --seconds 600) $(ARGS)

mutants:  ## Small faults in the pure folders, one at a time: which does no test notice? (ARGS="protocol --sample 100")
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.mutants $(ARGS)

coverage:  ## Which lines and branches of the library the quick tests of one process reach.
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m coverage run -m pytest -q -m "not slow" $(or $(ARGS),tests/unit tests/simulation tests/conformance tests/contract)
	@$(BIN)/python -m coverage report

contract:  ## tests/contract without torch and Mooncake: on the floors of pyproject.toml (protobuf 6), and on protobuf 7.
	@for world in protobuf6 protobuf7; do \
	  .ci/setup $$world; \
	  echo "contract tests on" $$(.venv-$$world/bin/python -c "import grpc, google.protobuf as p; print('protobuf', p.__version__, 'grpcio', grpc.__version__)"); \
	  .venv-$$world/bin/python -m pytest tests/contract -q $(if $(SLOW),,-m "not slow"); \
	done

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
	@.ci/generate .
	@.ci/typescript gen
	@.ci/go gen
	@.ci/rust gen

lint:  ## Style, types, which module may import which, protos, drift of generated files, broken promises.
	@.ci/setup main
	@.ci/setup gen
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
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
