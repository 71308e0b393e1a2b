# Everything a person types. Each target does its own set-up (.ci/setup), once; later calls start in seconds.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# Both engines' classes, loaded beside ours; not with vLLM itself, whose own configuration takes no other publisher.
ENGINE_CLASSES := tests/integration/test_events_engine_classes.py
# Real engines that test-engines and bench-engines run.
ENGINES ?= sglang vllm
# Parts of test-engines, each to be below 20 minutes on two cores: of either engine the tests of these names, and in
# `handoffs` all others. `adapters` start no engine, and take four minutes for both: after each change to an adapter. Behind
# all `versions`: what other releases of the engines are run with.
ENGINE_PARTS := adapters handoffs deployments faults slowness caches orders pulls models speculation recurrent replicas parallel stages
$(if $(filter-out $(ENGINE_PARTS) versions,$(PART)),$(error PART is one of $(ENGINE_PARTS) versions))
PARTS := $(if $(VERSION),versions,$(if $(ARGS),all,$(or $(PART),$(ENGINE_PARTS) versions)))
RUN := $(filter-out versions,$(PARTS))
adapters := _common _connector _connector_worker _context_bytes _group_sharing_bytes _handoffs _hashes _held _hicache
adapters += _hicache_pulls _layer_split_bytes _lending _limits _order_windows _orders _samples _stage_layers _states _tier _tree_orders
adapters += _unified_bytes
deployments := _deployment _from_sglang _pipeline_ranks _serve _two_step _unasked
faults := _dynamo _faults _router
slowness := _held_interpreter _load _retraction
caches := _events _hierarchical _offloading _plugin
orders := _prefetch _warmed_prefill
pulls := _plan_sglang _pull _pull_sglang _pull_sizes _pull_trouble
models := _chunked _latent _states_alone _window
speculation := _speculative _speculative_latent
recurrent := _recurrent
replicas := _attention_data_parallel _data_parallel
parallel := _context _pipeline _pipeline_full _tensor_parallel _unequal
stages := _pipeline_groups _pipeline_kinds
tests_of = $(if $($(2)),$(wildcard $($(2):%=tests/engines/test_$(1)%.py)),$(filter-out $(foreach part,$(filter-out handoffs,$(ENGINE_PARTS)),$(call tests_of,$(1),$(part))),$(wildcard tests/engines/test_$(1)*.py)))
# Releases beside those of the locks, each in an environment of its own, and their tests.
sglang_versions := 0.5.21 0.5.22
vllm_versions := 0.31.0 0.32.0
versions_of_sglang := _hicache.py
versions_of_vllm := _tier.py
of_version = $(foreach of,.py _doctor.py _unasked.py $(versions_of_$(1)),tests/engines/test_$(1)$(of))
# vLLM's tests of what an SGLang has computed start both: without SGLang's environment they would be skipped.
with_sglang = $(if $(ARGS),,$(filter %_sglang.py,$(foreach part,$(RUN),$(if $(filter vllm,$(ENGINES)),$(call tests_of,vllm,$(part))))))
# Without a file pytest would run all tests there are.
engine_pytest = $(if $(2),$(PYTEST) .venv-$(1)/bin/python -m pytest $(2),echo "no tests of $(1)")
# What each part of the tests ends with.
SLOWEST := --durations=10
# Suites with a target of their own (make test-browser), which `make test` leaves to `.ci/run`: hostile peers and floods, processes that
# are stopped, held or cut off for seconds, the page in a browser, programs in other languages, the demo's engine, and our own tools
# (make bench, make soak).
SUITES := hostile outages browser languages demo tools
# Of these, what has bounds in time.
TIMED := hostile outages browser
of_integration = $(patsubst %,tests/integration/test_%.py,$(1))
hostile := tests/contract/hostile
outages := $(call of_integration,liveness handoff_network events_network events_faults registry_etcd_kills)
browser := $(call of_integration,view_browser)
languages := $(call of_integration,client_readmes generated_examples go_client grpcurl index_programs native_index native_index_of_python prefetch_clients rust_client typescript)
demo := $(call of_integration,demo demo_model demo_services examples)
tools := $(call of_integration,benchmarks soak)
# Of integration, where no bound in time is close: the cache, its storage and data planes, pulls, ranks of unequal sizes.
UNTIMED := prefetch storage engine_cache dataplane pull_faults handoff_unequal sglang_st
UNTIMED := $(filter-out $(languages),$(wildcard $(patsubst %,tests/integration/test_%*.py,$(UNTIMED))))
ignoring = $(patsubst %,--ignore=%,$(1))
# `make test` has two lanes, side by side: what has bounds in time, and at low priority what only takes a core. What a part says is
# shown when it has ended. JOBS=1 runs one part after the other.
JOBS ?= 2
BESIDE := nice -n 10
CLIENTS := client-typescript client-go client-rust
# cargo, and what tests start, must not look for this make's own jobs.
ALONE := env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL
NO_SLOW = $(if $(SLOW),,-m "not slow")
contract_on = $(ALONE) .venv-$(1)/bin/python -m pytest -q $(SLOWEST) $(NO_SLOW)
# Proxies of the machine are no business of loopback traffic, and neither are a developer's own settings.
PYTEST := env -u http_proxy -u https_proxy -u HTTP_PROXY -u HTTPS_PROXY

# The whole request trace, where it is at hand; a sample is committed.
test-all bench: export TEST_TRACE ?= $(wildcard ../shared/traces/conversation_trace.jsonl)

.PHONY: help demo test test-all test-engines test-install test-start test-nixl test-suites $(SUITES:%=test-%) soak mutants coverage test-clients clients $(CLIENTS) native bench bench-engines docs release-check gen lint types style contract contract-protobuf6 contract-protobuf7 lock clean worlds
.PHONY: contract-quick integration types-beside style-beside others untimed suites suites-beside

help:  ## What there is.
	@sed -n 's/^\([a-z-]*\):.*##/  make \1 \t/p' $(MAKEFILE_LIST) | expand -t 20

demo:  ## One real hand-off: prefill and decode in two processes, tokens compared (ARGS="--data-plane shm").
	@.ci/setup main
	@$(BIN)/kvgrpc demo $(ARGS)

test:  ## Lint, drift and all quick tests but those of the suites below (ARGS="tests/unit -k plan" for some).
	@for each in main gen etcd protobuf7; do .ci/setup $$each; done
	@$(if $(ARGS),$(MAKE) lint,$(MAKE) --jobs=$(JOBS) --output-sync=target integration untimed)
	@$(if $(ARGS),$(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $(ARGS))

# One lane …
contract-quick:
	@$(call contract_on,protobuf7) tests/contract $(call ignoring,$(hostile))

integration: contract-quick
	@$(ALONE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) tests/integration $(call ignoring,$(UNTIMED) $(foreach suite,$(filter-out hostile,$(SUITES)),$($(suite))))

# … and the other one.
types-beside:
	@$(BESIDE) $(MAKE) types

style-beside: types-beside
	@$(BESIDE) $(MAKE) style

others: style-beside
	@$(ALONE) $(BESIDE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $(call ignoring,tests/contract tests/integration)

untimed: others
	@$(ALONE) $(BESIDE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $(UNTIMED)

test-suites:  ## What CI runs beside `make test`: each suite (test-browser, …), tests/contract on protobuf 6; in two lanes too.
	@for each in main gen etcd protobuf6 protobuf7; do .ci/setup $$each; done
	@$(MAKE) --jobs=$(JOBS) --output-sync=target suites suites-beside

suites:
	@for each in contract-protobuf6 $(TIMED:%=test-%); do $(MAKE) --jobs=1 $$each; done

suites-beside:
	@for each in $(filter-out $(TIMED),$(SUITES)); do $(BESIDE) $(MAKE) --jobs=1 test-$$each; done

test-outages test-browser test-demo test-tools: test-%:
	@.ci/setup main
	@$(if $(filter outages,$*),.ci/setup etcd)
	@$(ALONE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $($*)

test-hostile: worlds
	@$(call contract_on,protobuf7) $(hostile)

test-languages: $(CLIENTS)
	@$(ALONE) $(BIN)/python -m pytest $(NO_SLOW) $(SLOWEST) $(languages)

$(CLIENTS): client-%:
	@.ci/setup main
	@$(ALONE) .ci/clients $*

test-all: lint test-clients  ## The same with the long tests.
	@.ci/setup etcd
	@$(BIN)/python -m pytest $(SLOWEST) $(or $(ARGS),--ignore=tests/contract)
	@$(if $(ARGS),,$(MAKE) contract SLOW=yes)

test-engines:  ## Real engines, prefill and decode, over kvgrpc: tokens, faults, restarts (ENGINES=vllm; PART=faults; VERSION=0.31.0; ARGS as in test).
	@$(if $(VERSION),$(if $(filter 1,$(words $(ENGINES))),,$(error VERSION is that of one engine: say ENGINES=sglang or ENGINES=vllm)))
	@$(if $(RUN),for engine in $(sort $(ENGINES) $(if $(with_sglang),sglang) $(if $(and $(filter vllm,$(ENGINES)),$(filter faults,$(RUN))),dynamo)); do .ci/setup $$engine; done)
	@$(foreach engine,$(ENGINES),$(foreach part,$(RUN),\
	  $(call engine_pytest,$(engine),$(or $(ARGS),$(strip $(call tests_of,$(engine),$(part)) $(if $(filter sglangadapters,$(engine)$(part)),$(ENGINE_CLASSES)))));))
	@$(if $(filter vllmadapters,$(foreach part,$(RUN),$(ENGINES:%=%$(part)))),.ci/setup main; $(PYTEST) $(BIN)/python -m pytest $(ENGINE_CLASSES))
	@$(if $(filter versions,$(PARTS)),$(foreach engine,$(ENGINES),$(foreach version,$(or $(VERSION),$($(engine)_versions)),\
	  .ci/setup $(engine) $(version); $(call engine_pytest,$(engine)-$(version),$(or $(ARGS),$(call of_version,$(engine))));)))
	@echo "kvgrpc engines: OK ($(ENGINES)$(VERSION:%= %))"

test-install:  ## The lines of Install in docs/engines, typed into an empty environment: 11 GB an engine (ENGINES=vllm for one).
	@.ci/install-pages $(ENGINES)

test-start:  ## The lines of "On a machine without a GPU" in docs/engines, typed: engines start and answer (ENGINES=vllm for one).
	@.ci/start-pages $(ENGINES)

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

soak:  ## Thousands of hand-offs with pulls among them, while ranks are killed, rooms cancelled, writes fail; floods beside a pair (SOAK=full: 20,000 in ten minutes).
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.soak $(if $(filter full,$(SOAK)),--rooms 20000 --seconds 600 --flood-seconds 90) $(ARGS)

mutants:  ## Small faults, one at a time: which does no test notice? (ARGS="protocol --sample 100"; runtime, rpc, server, … for shells)
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m tests.mutants $(ARGS)

coverage:  ## Which lines and branches of the library the quick tests of one process reach.
	@.ci/setup main
	@$(PYTEST) $(BIN)/python -m coverage run -m pytest -q -m "not slow" $(or $(ARGS),tests/unit tests/simulation tests/conformance tests/contract)
	@$(BIN)/python -m coverage report

contract: contract-protobuf6 contract-protobuf7  ## tests/contract without torch and Mooncake: on the floors of pyproject.toml (protobuf 6), and on protobuf 7.

worlds:
	@.ci/setup protobuf6
	@.ci/setup protobuf7

contract-protobuf6 contract-protobuf7: contract-%: worlds
	@echo "contract tests on" $$(.venv-$*/bin/python -c "import grpc, google.protobuf as p; print('protobuf', p.__version__, 'grpcio', grpc.__version__)")
	@$(call contract_on,$*) tests/contract

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

.PHONY: bench-sglang
bench-sglang:  ## The rows of hand-offs beside SGLang's own classes, without an engine (ONLY=handoff.pairs for some).
	@.ci/setup sglang
	@.venv-sglang/bin/python -m benchmarks --against sglang $(if $(ONLY),--only $(ONLY)) $(ARGS)

gen:  ## Generated code of all languages and docs/errors.md from protos/, the settings' page, the benchmarks' chart.
	@.ci/setup gen
	@.ci/setup main
	@.ci/generate .
	@PYTHONPATH=. $(BIN)/python .ci/settings_page.py docs/settings.md
	@PYTHONPATH=. $(BIN)/python .ci/sync_client.py kvgrpc/client/sync.py
	@PYTHONPATH=. $(BIN)/python -m benchmarks.harness.chart
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
