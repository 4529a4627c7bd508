"""`sansgpu export --format onnx` writes files whose results in onnxruntime equal those of transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

from sansgpu.cli import run as cli
from tests.processes import Captured, messages, settings, write_corpus
from tests.tasks.fine_tuned import made, sentence
from tests.tasks.folders import model_folder, squad

pytestmark = pytest.mark.usefixtures("home")

Outputs = dict[str, NDArray[Any]]
# Runs an ONNX file on each batch of inputs without importing sansgpu or torch.
ELSEWHERE = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
for path in sys.argv[2:]:
    numpy.savez(path + ".out.npz", **dict(zip(names, session.run(None, dict(numpy.load(path))))))
"""


def fill(home: Path) -> None:
    squad(home / "squad.json")
    write_corpus(home / "corpus.jsonl")
    answering_run(home, "bert")
    for name, chosen in {"decoder": {}, "graph": {"task": "graph"}}.items():
        own = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=1, **chosen)
        assert cli(["train", *own, "--output-dir", str(home / name)]) == 0


def answering_run(home: Path, name: str, architecture: str = "bert", **changes: object) -> Path:
    model = model_folder(architecture)
    return made(home, name, "qa", model__name_or_path=model, training__max_steps=2, **changes)


def exported(capsys: Captured, model: Path, *options: object) -> tuple[Path, str]:
    """Exports a model; returns the written file and the message about its check."""
    capsys.readouterr()
    assert cli(["export", str(model), "--format", "onnx", *map(str, options)]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    (checked,) = messages(captured.err)
    return Path(captured.out.strip()), checked


def run_elsewhere(file: Path, batches: list[Any], folder: Path) -> list[Outputs]:
    paths = [folder / f"{number}.npz" for number in range(len(batches))]
    for path, batch in zip(paths, batches, strict=True):
        np.savez(path, **{name: value.numpy() for name, value in batch.items()})
    subprocess.run([sys.executable, "-c", ELSEWHERE, file, *paths], check=True, cwd=folder)
    return [dict(np.load(f"{path}.out.npz")) for path in paths]


def assert_close(file: Path, model: Any, names: set[str], folder: Path, tolerance: float) -> None:
    """Compares an ONNX file with a transformers model on batches of two shapes, one of them with padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent)
    texts = (["the red fox"], ["which colour has the fox", "a much longer text about quiet dark round words", "so"])
    batches = [tokenizer(part, padding=True, return_tensors="pt") for part in texts]
    assert (batches[1]["attention_mask"] == 0).any()
    for batch, found in zip(batches, run_elsewhere(file, batches, folder), strict=True):
        assert found.keys() == names
        with torch.no_grad():
            expected = model.eval()(**batch)
        mask = batch["attention_mask"].bool().numpy()
        for name, values in found.items():
            wanted = expected[name].numpy()
            assert values.shape == wanted.shape
            per_token = values.shape[:2] == mask.shape
            np.testing.assert_allclose(
                *((values[mask], wanted[mask]) if per_token else (values, wanted)), atol=tolerance
            )


def answering(folder: Path) -> Any:
    return transformers.AutoModelForQuestionAnswering.from_pretrained(folder, dtype=torch.float32)


def test_a_run_becomes_a_file_that_answers_as_it_does(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file, checked = exported(capsys, home / "bert")
    assert file == home / "bert/onnx-f32/model.onnx"
    assert re.fullmatch(r"checked with onnxruntime: largest difference .*, 100.0% of predictions equal", checked)
    assert_close(file, answering(home / "bert/final"), {"start_logits", "end_logits"}, tmp_path, 1e-5)
    assert json.loads((file.parent / "config.json").read_text())["model_type"] == "bert"
    assert str(Path(transformers.__file__).parent).encode() not in file.read_bytes()


@pytest.mark.long
def test_the_final_folder_becomes_the_same_file(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file, _ = exported(capsys, home / "bert", "--output", tmp_path / "run")
    again, _ = exported(capsys, home / "bert/final", "--output", tmp_path / "final")
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.long
def test_an_adapter_is_merged(home: Path, capsys: Captured, tmp_path: Path) -> None:
    run = answering_run(home, "adapted", model__adapter="lora")
    file, _ = exported(capsys, run, "--output", tmp_path / "out")
    assert_close(file, answering(home / "adapted/final"), {"start_logits", "end_logits"}, tmp_path, 1e-5)


@pytest.mark.long
def test_int8_weights_are_a_quarter_and_nearly_agree(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file, checked = exported(capsys, answering_run(home, "roberta", "roberta"), "--type", "int8")
    assert file == home / "roberta/onnx-int8/model_quantized.onnx"
    assert "of predictions equal" in checked
    assert_close(file, answering(home / "roberta/final"), {"start_logits", "end_logits"}, tmp_path, 0.05)
    assert file.stat().st_size < 0.5 * (home / "roberta/final/model.safetensors").stat().st_size
    assert sorted(path.name for path in file.parent.iterdir() if not path.name.startswith(".")) == [
        "config.json", "model_quantized.onnx", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("head", "names"),
    [
        pytest.param("ForSequenceClassification", {"logits"}, marks=pytest.mark.long),
        pytest.param("ForTokenClassification", {"logits"}, marks=pytest.mark.long),
        pytest.param("", {"last_hidden_state"}, marks=pytest.mark.long),
    ],
)
def test_other_heads_have_their_own_outputs(capsys: Captured, tmp_path: Path, head: str, names: set[str]) -> None:
    auto = getattr(transformers, f"AutoModel{head}")
    model = auto.from_pretrained(model_folder("bert"), **({"num_labels": 3} if head else {}))
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(model_folder("bert")).save_pretrained(tmp_path / "model")
    file, _ = exported(capsys, tmp_path / "model", "--output", tmp_path / "out")
    assert_close(file, model, names, tmp_path, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["mean", *(pytest.param(m, marks=pytest.mark.long) for m in ("cls", "lasttoken"))])
def test_a_sentence_transformers_folder_has_vectors(capsys: Captured, tmp_path: Path, mode: str) -> None:
    transformer = Transformer(str(model_folder("bert")), max_seq_length=64)
    modules = [transformer, Pooling(64, pooling_mode=mode), Dense(64, 24), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")
    model.save(str(tmp_path / "model"))
    file, checked = exported(capsys, tmp_path / "model", "--output", tmp_path / "out")
    assert "lowest cosine similarity 1.0000" in checked
    texts = ["the red fox", "a much longer text about quiet dark round words", "so"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent)
    (found,) = run_elsewhere(file, [tokenizer(texts, padding=True, return_tensors="pt")], tmp_path)
    assert found.keys() == {"last_hidden_state", "sentence_embedding"}
    np.testing.assert_allclose(found["sentence_embedding"], model.encode(texts), atol=1e-5)
    assert (file.parent / "1_Pooling/config.json").is_file()


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("decoder", (), "is a decoder, but --format onnx needs an encoder; export its run with --format gguf."),
        ("decoder/final", ("--output", "new"), "is a decoder, but --format onnx needs an encoder"),
        ("graph", (), "its architecture in config.json is none;"),
        ("bert", ("--type", "f16"), "--type is f16, but with --format onnx must be one of f32, int8."),
        ("bert", ("--no-merge",), "--merge and --no-merge require --format hf"),
        ("bert/final", (), "is not a run; set --output to the folder to write."),
        ("bert/final", ("--output", "new", "--snapshot", "best"), "is not a run; remove --snapshot"),
        ("nowhere", (), "is neither a run nor a Hugging Face folder"),
        ("bert", ("--output", "corpus.jsonl"), "is a file, not a folder"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    home: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, model: str, options: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(home)
    before = sorted(home.rglob("*"))
    capsys.readouterr()
    assert cli(["export", model, "--format", "onnx", *options]) == 2
    assert expected in sentence(capsys)
    assert sorted(home.rglob("*")) == before
