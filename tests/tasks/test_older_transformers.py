"""Folders that fine-tuning writes are read by transformers 4, which has other keys than version 5."""

from __future__ import annotations

import json
import subprocess
import tempfile
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from tests.processes import TINY as TINY_PRETRAINING
from tests.processes import options, train_once, write_corpus, write_rows
from tests.tasks.fine_tuned import settings
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, squad

pytestmark = pytest.mark.usefixtures("home")

TOKENS = [[number * 23 % 256 for number in range(20)]]
TEXT = "def main(): hello, 'world'"
ONE_STEP = {"training__max_steps": 1, "training__eval_steps": "", "training__save_steps": ""}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
BOTH_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA_3},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "gemma3_text": {"rope_parameters": BOTH_ROPES},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 0.5}},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 900.0}, "hidden_act": "relu2"},
    "qwen3_moe": {},
}
ENCODERS = {"classify": "bert", "tokens": "modernbert", "qa": "roberta", "embed": "mpnet"}
VERSION = "4.57.6"
# Computes the same as `results` below in the other environment; the arguments are folders and their auto classes.
READER = f"""
import json, sys, torch, transformers
found = {{}}
for folder, auto in json.loads(sys.argv[1]).items():
    model = getattr(transformers, auto).from_pretrained(folder, torch_dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor({TOKENS}))[0].tolist()
    inputs = transformers.AutoTokenizer.from_pretrained(folder)({TEXT!r})
    found[folder] = output, {{name: list(values) for name, values in inputs.items()}}
print(json.dumps(found))
"""


def fill(home: Path) -> None:
    chat_rows(home / "chat.jsonl")
    labeled_rows(home / "labels.jsonl")
    conll(home / "tags.conll")
    squad(home / "squad.json")
    write_corpus(home / "corpus.jsonl")
    write_rows(home / "pairs.jsonl", [{"anchor": f"red {n}", "positive": f"blue {n}"} for n in range(40)])


def trained(home: Path, name: str, task: str = "sft", **changes: object) -> Path:
    own = {"data__dataset_name": home / "labels.jsonl"} if task == "classify" else {}
    own |= {"data__dataset_name": home / "pairs.jsonl"} if task == "embed" else {}
    return train_once(home / name, settings(home, task, **{**ONE_STEP, **own, **changes}))


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_final_and_exported_folders_have_the_keys_of_version_4(home: Path, tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", "llama", rope_parameters=LLAMA_3)
    run = trained(home, "llama", model__name_or_path=base, model__adapter="lora", model__merge_adapter="true")
    exported = tmp_path / "exported"
    assert cli(["export", str(run), "--format", "hf", "--output", str(exported)]) == 0
    for folder in (run / "final", exported):
        config, tokenizer = read(folder / "config.json"), read(folder / "tokenizer_config.json")
        assert config["rope_theta"] == 1e6
        assert config["rope_scaling"] == {key: value for key, value in LLAMA_3.items() if key != "rope_theta"}
        assert config["rope_parameters"] == LLAMA_3
        assert config["dtype"] == config["torch_dtype"] == "float32"
        assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]
    assert transformers.AutoConfig.from_pretrained(exported).rope_parameters == LLAMA_3


def test_extra_special_tokens_are_listed_under_the_key_of_version_4(home: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder("llama"))
    tokenizer.add_special_tokens({"extra_special_tokens": ["[CLS]"]})
    transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama")).save_pretrained(base)
    tokenizer.save_pretrained(base)
    assert "extra_special_tokens" in read(base / "tokenizer_config.json")
    run = trained(home, "extra", model__name_or_path=base, model__adapter="lora", model__merge_adapter="false")
    written = read(run / "final/tokenizer_config.json")
    assert written["additional_special_tokens"] == ["[CLS]"]
    assert "extra_special_tokens" not in written
    assert transformers.AutoTokenizer.from_pretrained(run / "final").extra_special_tokens == ["[CLS]"]


@pytest.fixture(scope="module")
def python_of_version_4() -> Path:
    """Returns the Python of an environment with transformers 4, which is created once on a machine."""
    folder = Path(tempfile.gettempdir()) / f"sansgpu-transformers-{VERSION}"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        packages = [f"transformers=={VERSION}", f"torch=={torch.__version__.partition('+')[0]}"]
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return folder / "bin/python"


def results(folder: Path, auto: str) -> tuple[torch.Tensor, dict[str, list[int]]]:
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor(TOKENS))[0]
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(TEXT)
    return output, {name: list(values) for name, values in inputs.items()}


@pytest.mark.long
def test_version_4_computes_the_same_from_every_folder(home: Path, tmp_path: Path, python_of_version_4: Path) -> None:
    folders: dict[Path, str] = {}
    for family, changes in DECODERS.items():
        base = make_folder(tmp_path / f"{family}-base", family, **changes)
        run = trained(home, f"{family}-4", model__name_or_path=base, model__adapter="none")
        exported = tmp_path / family
        assert cli(["export", str(run), "--format", "hf", "--output", str(exported)]) == 0
        folders |= {run / "final": "AutoModelForCausalLM", exported: "AutoModelForCausalLM"}
    heads = {"classify": "SequenceClassification", "tokens": "TokenClassification", "qa": "QuestionAnswering"}
    for task, family in ENCODERS.items():
        run = trained(home, task, task, model__name_or_path=model_folder(family))
        folders[run / "final"] = f"AutoModel{'For' + heads[task] if task in heads else ''}"
    for architecture in ("llama", "apertus"):
        own = {"model.architecture": architecture, "training.max_steps": 1, "model.rope_theta": 900.0}
        own |= {"data.dataset_name": home / "corpus.jsonl", "training.eval_steps": "", "training.save_steps": ""}
        own |= {"model.activation": "relu2"} if architecture == "apertus" else {}
        run = train_once(home / f"own-{architecture}", options(TINY_PRETRAINING, own))
        folders[run / "final"] = "AutoModelForCausalLM"
    asked = json.dumps({str(folder): auto for folder, auto in folders.items()})
    done = subprocess.run([python_of_version_4, "-c", READER, asked], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for folder, auto in folders.items():
        output, inputs = results(folder, auto)
        torch.testing.assert_close(torch.tensor(found[str(folder)][0]), output, rtol=1e-5, atol=1e-5, msg=str(folder))
        assert found[str(folder)][1] == inputs, folder
