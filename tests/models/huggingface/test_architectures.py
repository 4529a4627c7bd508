"""Architectures compute the same with our kernels as in transformers, are planned and train a step."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.architecture_trials import FINE, HEADS, TRIALS, Verdicts, cases, failures, try_apart, try_architecture
from tools.family_trials import rows_of, write_rows
from tools.tiny_architectures import is_encoder, make_architecture, tokenizer_for
from transformers import AutoConfig, AutoModel, DogeConfig

from sansgpu.cli import run as cli
from sansgpu.models.formats.folders import require_possible_sizes
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.pretrained import HeadType
from tests.processes import options
from tests.tasks.fine_tuned import Captured
from tests.tasks.folders import labeled_rows

PLANNED = {
    "mamba": {},  # its layer types cannot be set
    "rwkv": {},  # it needs two layers
    "smollm3": {"num_hidden_layers": 2},  # it has a list with a value per layer
    "bamba": {},
    "recurrent_gemma": {},
    "gemma4_text": {},  # its last layers use the keys and values of earlier ones
    "bart": {},  # its config has two numbers of layers, so that it is measured whole
}
PLANNED_OFTEN = ("mamba", "bart")  # the others are planned before a release
# What fails for reasons of transformers, which the trials cannot tell from ours.
KNOWN = {"perceiver masked"}  # returns more logits than tokens


@cache
def tokenizer(encoder: bool) -> Any:
    return tokenizer_for("bert" if encoder else "llama")


def tried(model_type: str, head: HeadType, home: Path, *trials: str) -> Verdicts:
    return try_architecture(model_type, head, home, tokenizer(is_encoder(model_type)), trials)


@pytest.mark.parametrize(
    "model_type", ["gte", *(pytest.param(t, marks=pytest.mark.long) for t in ("nomic_bert", "jina_embeddings_v3"))]
)
def test_embedders_learn_embeddings_and_classes(tmp_path: Path, capsys: Captured, model_type: str) -> None:
    """Their attention has no grouped heads, and takes its arguments in another order than Llama's."""
    assert tried(model_type, "sequence", tmp_path / "classify", "equal", "step") == {"equal": FINE, "step": FINE}
    assert tried(model_type, "none", tmp_path / "embed", "step") == {"step": FINE}
    said = capsys.readouterr().err
    assert "no kernels" not in said
    assert "padded" not in said


@pytest.mark.parametrize(
    ("model_type", "head"),
    [
        ("gemma3n_text", "causal"),  # changes outputs of its layers in place, which fused layers do not allow
        ("llama4_text", "causal"),  # names its body differently than it says
        ("fnet", "sequence"),  # mixes padding tokens with others, so that they have gradients
    ],
)
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, model_type: str, head: HeadType) -> None:
    assert tried(model_type, head, tmp_path, "equal") == {"equal": FINE}


@torch.no_grad()
def test_texts_that_padding_would_change_run_alone(tmp_path: Path) -> None:
    """ConvBERT's convolutions mix neighboring tokens, also those of the padding."""
    make_architecture(tmp_path, "convbert", "none", tokenizer(True))
    model = AutoModel.from_pretrained(tmp_path).eval()
    lengths = torch.tensor([5, 40, 17, 5])
    tokens = torch.arange(int(lengths.sum())) * 7 % 1024
    expected = [model(input_ids=ids[None]).last_hidden_state[0] for ids in tokens.split(lengths.tolist())]
    found = UnpaddedModel(model, True).hidden_states(tokens, lengths)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model_type", [pytest.param(t, marks=() if t in PLANNED_OFTEN else pytest.mark.long) for t in PLANNED]
)
def test_a_plan_times_models_that_are_hard_to_shorten(tmp_path: Path, capsys: Captured, model_type: str) -> None:
    model = make_architecture(tmp_path / "model", model_type, "causal", tokenizer(False), **PLANNED[model_type])
    write_rows(tmp_path / "rows.jsonl", rows_of("sft", 6))
    chosen = {
        "task": "sft", "model.name_or_path": model, "data.dataset_name": tmp_path / "rows.jsonl", "data.max_length": 12,
        "data.chat_template": "simple", "data.validation_split": 0.4, "training.batch_size": 1,
        "training.max_steps": 5, "training.precision": "fp32", "training.threads": 1, "device": "cpu",
    }  # fmt: skip
    capsys.readouterr()
    assert cli(["plan", *options(chosen), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] > 0


def test_a_large_number_in_a_config_is_allowed_if_it_is_the_default_of_transformers(tmp_path: Path) -> None:
    """Doge has 16,384 experts by default, and uses none of them."""
    require_possible_sizes(json.loads(DogeConfig().to_json_string()), tmp_path / "config.json")


def test_a_model_without_a_table_of_tokens_is_refused(tmp_path: Path, capsys: Captured) -> None:
    AutoConfig.for_model("perceiver", vocab_size=1024).save_pretrained(tmp_path)
    tokenizer(True).save_pretrained(tmp_path)
    rows = labeled_rows(tmp_path / "rows.jsonl", "single")
    chosen = {"task": "classify", "model.name_or_path": tmp_path, "data.dataset_name": rows}
    assert cli(["train", *options(chosen)]) == 2
    assert "its config has no hidden_size, because perceiver models" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("head", HEADS)
def test_all_architectures_of_transformers(tmp_path: Path, head: HeadType) -> None:
    trials = [trial for trial in TRIALS if "prompt" not in trial]
    found = {
        " ".join(case): failures(try_apart(*case, tmp_path / case[0], tokenizer(is_encoder(case[0])), trials))
        for case in cases([head], [])
    }
    assert {name: failed for name, failed in found.items() if failed and name not in KNOWN} == {}
