"""Models that a task or a format cannot use are refused with a one-sentence error."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from tools.family_trials import rows_of
from tools.tiny_architectures import make_architecture, tokenizer_for
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, T5EncoderModel

from sansgpu.cli import run as cli
from tests.processes import options, write_rows
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.folders import chat_rows, conll, model_folder, squad

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    """Writes training rows, and encoders with a masked language model head, as they are published on the Hub."""
    chat_rows(home / "chat.jsonl")
    conll(home / "tags.conll")
    squad(home / "squad.json")
    for architecture in ("bert", "roberta"):
        AutoModelForMaskedLM.from_pretrained(model_folder(architecture)).save_pretrained(home / architecture)
        AutoTokenizer.from_pretrained(model_folder(architecture)).save_pretrained(home / architecture)


def refusal(capsys: Captured, tmp_path: Path, chosen: dict[str, object]) -> str:
    """Returns the sentence with which `train` refuses the settings `chosen`."""
    capsys.readouterr()
    assert cli(["train", *options(chosen), "--output-dir", str(tmp_path / "run")]) == 2
    return sentence(capsys)


@pytest.mark.parametrize("architecture", ["bert", pytest.param("roberta", marks=pytest.mark.long)])
@pytest.mark.parametrize("command", ["train", "generate"])
def test_an_encoder_does_not_continue_texts(
    home: Path, tmp_path: Path, capsys: Captured, architecture: str, command: str
) -> None:
    """transformers would load it as a causal model, although its tokens attend to those they should predict."""
    model = home / architecture
    chosen = {"task": "sft", "model.name_or_path": model, "data.dataset_name": home / "chat.jsonl"}
    arguments = {
        "train": [*options(chosen, {"data.chat_template": "simple"}), "--output-dir", str(tmp_path / "run")],
        "generate": [str(model), "--prompt", "red"],
    }
    capsys.readouterr()
    assert cli([command, *arguments[command]]) == 2
    assert sentence(capsys) == (
        f"sansgpu: {model} is an encoder, whose tokens attend to later ones, but this needs a decoder; train it "
        "with task classify, tokens, qa or embed."
    )
    assert not list(tmp_path.iterdir()), "a refusal left a folder"


def test_an_encoder_without_a_head_is_not_called_damaged(home: Path, tmp_path: Path, capsys: Captured) -> None:
    """transformers leaves the missing head of its causal class uninitialized, so that its logits may be NaN."""
    model = make_architecture(tmp_path / "model", "data2vec-text", "none", tokenizer_for("bert"))
    chosen = {"task": "sft", "model.name_or_path": model, "data.dataset_name": home / "chat.jsonl"}
    chosen["data.chat_template"] = "simple"
    assert refusal(capsys, tmp_path, chosen).startswith(
        f"sansgpu: {model} is an encoder, whose tokens attend to later ones, but "
    )


def test_an_encoder_without_its_decoder_is_not_called_damaged(tmp_path: Path, capsys: Captured) -> None:
    model, rows = tmp_path / "encoder", write_rows(tmp_path / "rows.jsonl", [*rows_of("classify")])
    whole = make_architecture(tmp_path / "whole", "t5", "none", tokenizer_for("t5"))
    T5EncoderModel.from_pretrained(whole).save_pretrained(model)
    AutoTokenizer.from_pretrained(whole).save_pretrained(model)
    chosen = {"task": "classify", "model.name_or_path": model, "data.dataset_name": rows}
    assert refusal(capsys, tmp_path, chosen) == (
        f"sansgpu: {model} contains only an encoder, but a T5ForSequenceClassification also has a decoder; choose "
        "another model or task."
    )


def test_a_model_that_compares_the_vectors_of_tokens_is_refused(tmp_path: Path, capsys: Captured) -> None:
    """ColBERT's folders have a Dense module for the vectors of tokens, and no pooling."""
    model, rows = tmp_path / "model", write_rows(tmp_path / "rows.jsonl", [*rows_of("embed")])
    copytree(model_folder("bert"), model)
    modules = ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")
    (model / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in modules]))
    chosen = {"task": "embed", "model.name_or_path": model, "data.dataset_name": rows}
    assert refusal(capsys, tmp_path, chosen).startswith(
        f"sansgpu: {model}/modules.json names no Pooling, because the model compares "
    )


def test_a_head_that_transformers_does_not_have_is_named(home: Path, tmp_path: Path, capsys: Captured) -> None:
    model = model_folder("mamba")
    chosen = {"task": "tokens", "model.name_or_path": model, "data.dataset_name": home / "tags.conll"}
    assert refusal(capsys, tmp_path, chosen) == (
        f"sansgpu: {model} cannot be built as a token classification model: transformers has no such model "
        "for its architecture; choose another model or task."
    )


def test_a_model_whose_blocks_have_no_layers_for_an_adapter_is_refused(tmp_path: Path, capsys: Captured) -> None:
    """SqueezeBERT computes convolutions. Only its pooler is linear, and embeddings do not read it."""
    model = make_architecture(tmp_path / "model", "squeezebert", "none", tokenizer_for("bert"))
    rows = write_rows(tmp_path / "rows.jsonl", [*rows_of("embed")])
    chosen = {"task": "embed", "model.name_or_path": model, "model.adapter": "lora", "data.dataset_name": rows}
    assert refusal(capsys, tmp_path, chosen) == (
        f"sansgpu: model.adapter: the blocks of {model} have no linear layers for an adapter; set model.adapter to "
        "none."
    )


def test_a_model_whose_weights_transformers_names_differently_is_not_called_damaged(
    home: Path, tmp_path: Path, capsys: Captured
) -> None:
    """transformers names weights differently in Qwen's and Llama's QA models than in their language models."""
    model = model_folder("qwen2")
    chosen = {"task": "qa", "model.name_or_path": model, "data.dataset_name": home / "squad.json"}
    assert refusal(capsys, tmp_path, chosen) == (
        f"sansgpu: {model} has none of the weights of a Qwen2ForQuestionAnswering, which transformers names in a "
        "different way; choose another model or task."
    )


@pytest.mark.long
def test_an_operation_that_onnx_does_not_have_is_named(tmp_path: Path, capsys: Captured) -> None:
    """torch's exporter would instead print pages of advice for its developers."""
    folder = tmp_path / "model"
    AutoModel.from_pretrained(model_folder("mixtral")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder("mixtral")).save_pretrained(folder)
    capsys.readouterr()
    assert cli(["export", str(folder), "--format", "onnx", "--output", str(tmp_path / "onnx")]) == 2
    said = sentence(capsys)
    assert said.startswith(f"sansgpu: {folder} cannot be exported as ONNX (No ONNX function found for ")
    assert "grouped_mm" in said
    assert said.endswith(".")
