"""Families of encoders are trained with adapters, also on quantized weights, for labels and embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.family_trials import rows_of, write_rows
from tools.outcome import json_lines
from tools.tiny_model import make_folder

from sansgpu.cli import run as cli
from sansgpu.config import ModelConfig
from sansgpu.models.huggingface.adapters import add_adapter
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from tests.processes import overrides
from tests.tasks.fine_tuned import Captured
from tests.tasks.folders import model_folder

# The adapted layers of a block and, after them, the trained layers of a head with two labels.
LAYERS = {
    "modernbert": ("Wi Wo Wqkv", "classifier dense norm"),
    "eurobert": ("down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", "classifier dense"),
    "deberta-v2": ("dense key_proj query_proj value_proj", "classifier dense"),
    "xlm-roberta": ("dense key query value", "dense out_proj"),
    "bert": ("dense key query value", "classifier"),
    "mpnet": ("dense k o q v", "dense out_proj"),
    "qwen3": ("down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", "score"),
}
OFTEN = ("deberta-v2",)  # the other families are trained before a release


def asked(home: Path, run: str, task: str, model: Path, **changes: object) -> list[str]:
    write_rows(home / f"{task}.jsonl", rows_of(task))
    chosen = {
        "task": task, "model.name_or_path": model, "data.dataset_name": home / f"{task}.jsonl", "data.max_length": 96,
        "training.batch_size": 4, "training.gradient_accumulation_steps": 1, "training.max_steps": 2,
        "training.warmup_steps": 0, "training.threads": 1, "training.precision": "fp32", "training.report_to": "none",
        "device": "cpu",
    }  # fmt: skip
    settings = (part for override in overrides(chosen, changes) for part in ("--set", override))
    return ["train", *settings, "--output-dir", str(home / run)]


def layers_of(names: list[str]) -> str:
    return " ".join(sorted({name.split(".")[-1] for name in names}))


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.long) for f in LAYERS])
def test_all_linear_layers_of_the_blocks_have_adapters_and_new_heads_are_trained(family: str) -> None:
    settings = ModelConfig(name_or_path=str(model_folder(family)), adapter="lora")
    adapted: Any = add_adapter(load_pretrained(settings, Head("sequence", ("a", "b")), 0), settings, 0)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    blocks = [name.split(".lora_")[0] for name in trained if ".lora_" in name and "pooler" not in name]
    heads = [
        name.rpartition(".")[0].replace(".modules_to_save.default", "") for name in trained if ".lora_" not in name
    ]
    assert (layers_of(blocks), layers_of(heads)) == LAYERS[family]


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.long) for f in LAYERS])
@pytest.mark.parametrize("task", [pytest.param("classify", marks=pytest.mark.long), "embed"])
def test_adapters_on_quantized_weights_give_equal_results_from_a_run_and_its_final_folder(
    tmp_path: Path, capsys: Captured, family: str, task: str
) -> None:
    quantized = {"model__adapter": "lora", "model__base_precision": "int4"}
    assert cli(asked(tmp_path, "run", task, model_folder(family), **quantized)) == 0
    said = capsys.readouterr().err
    assert "padded" not in said
    assert "no kernels" not in said
    found = []
    for number, model in enumerate((tmp_path / "run", tmp_path / "run/final")):
        file = tmp_path / f"{number}.{'jsonl' if task == 'classify' else 'npy'}"
        use = ["predict"] if task == "classify" else ["embed", "--text-column", "anchor"]
        assert cli([*use, str(model), "--data", str(tmp_path / f"{task}.jsonl"), "--output", str(file)]) == 0
        rows = np.load(file) if task == "embed" else [[*row["scores"].values()] for row in json_lines(file)]
        found.append(np.array(rows))
    assert len(found[0]) == 24
    tolerance = 1e-3 if task == "classify" else 1e-2  # vectors of a quantized folder are computed in bf16
    np.testing.assert_allclose(found[0], found[1], atol=tolerance)


def test_transformers_code_is_used_for_eurobert_although_its_hub_folder_has_code_of_its_own(tmp_path: Path) -> None:
    model, canary = make_folder(tmp_path / "model", "eurobert"), tmp_path / "canary"
    config = json.loads((model / "config.json").read_text())
    classes = {"AutoConfig": "configuration_eurobert.EuroBertConfig", "AutoModel": "modeling_eurobert.EuroBertModel"}
    classes["AutoModelForSequenceClassification"] = "modeling_eurobert.EuroBertForSequenceClassification"
    old = {"rope_theta": 250000, "rope_scaling": None, "transformers_version": "4.40.0.dev0"}
    kept = {key: value for key, value in config.items() if key not in ("rope_parameters", "classifier_pooling")}
    (model / "config.json").write_text(json.dumps({**kept, **old, "auto_map": classes}))
    for name in ("configuration_eurobert", "modeling_eurobert"):
        (model / f"{name}.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    assert cli(asked(tmp_path, "run", "classify", model)) == 0
    assert not canary.exists()
    trained = json.loads((tmp_path / "run/final/config.json").read_text())
    assert trained["rope_parameters"]["rope_theta"] == 250000
