"""`sansgpu export --format gguf` writes a file that generate, eval and chat accept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from sansgpu.cli import run as cli
from sansgpu.config.training import Precision
from sansgpu.jobs.generate import open_generator
from sansgpu.models.formats.gguf_file import write_gguf
from sansgpu.models.huggingface.tokenizer_files import tokenizer_parts
from sansgpu.train.loading import ModelRequest
from sansgpu.train.snapshots import snapshots
from tests.models.formats.gguf_models import ABOUT, base, write_base
from tests.processes import (
    Captured,
    options,
    printed,
    refused,
    settings,
    train_once,
    write_corpus,
    write_rows,
)
from tests.tasks.folders import chat_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")

ADAPTED = {
    "task": "sft", "data.max_length": 96, "training.batch_size": 2, "training.max_steps": 2, "training.warmup_steps": 1,
    "training.gradient_accumulation_steps": 1, "training.learning_rate": 0.01, "training.precision": "fp32",
    "training.compile": "off", "training.report_to": "none", "training.threads": 1, "model.adapter": "lora",
    "device": "cpu",
}  # fmt: skip


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=120)
    chat_rows(home / "chat.jsonl")
    plain = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=8)
    relu = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=1, model__activation="relu")
    tuned = {**ADAPTED, "data.dataset_name": home / "chat.jsonl"}
    train_once(home / "plain", plain)
    train_once(home / "relu", relu)
    for name, architecture in (("qwen", "qwen2"), ("doge", "doge")):
        train_once(home / name, options(tuned, {"model.name_or_path": model_folder(architecture)}))


def test_a_run_and_its_file_write_and_measure_the_same(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file = printed(capsys, "export", home / "plain", "--format", "gguf", "--type", "f32").strip()
    assert file == str(home / "plain/plain-f32.gguf")
    writing = ("--prompt", "the model", "--max-new-tokens", 40, "--seed", 3)
    assert printed(capsys, "generate", file, *writing) == printed(capsys, "generate", home / "plain", *writing)
    measuring = ("--data", home / "corpus.jsonl", "--window", 32, "--json")
    of_run, of_file = (json.loads(printed(capsys, "eval", target, *measuring)) for target in (home / "plain", file))
    assert of_file["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert of_file["bits_per_byte"] == pytest.approx(of_run["bits_per_byte"], rel=1e-6)
    assert of_file["step"] is None
    small = printed(capsys, "export", home / "plain", "--format", "gguf", "--output", tmp_path / "small.gguf").strip()
    assert Path(small).stat().st_size < Path(file).stat().st_size
    by_default = {tensor.tensor_type.name for tensor in gguf.GGUFReader(small).tensors}
    assert by_default == {"F16", "F32"}


def test_any_snapshot_is_exported_and_takes_the_place_of_a_file_before(home: Path, capsys: Captured) -> None:
    contents = []
    for snapshot in snapshots(home / "plain/snapshots"):
        chosen = ("--snapshot", snapshot.step, "--output", home / "any.gguf")
        contents.append(
            Path(printed(capsys, "export", home / "plain", "--format", "gguf", *chosen).strip()).read_bytes()
        )
        text = gguf.GGUFReader(home / "any.gguf").fields["general.description"].contents()
        assert text.startswith(f"Step {snapshot.step} of a run of task pretrain")
    assert len({*contents}) == len(contents) > 1
    assert printed(capsys, "export", home / "plain", "--format", "gguf", "--output", home / "any.gguf")
    assert (home / "any.gguf").read_bytes() == contents[-1], "exporting a run twice must write the same file"


def test_a_fine_tuned_models_file_talks_as_the_run_does(home: Path, capsys: Captured) -> None:
    file = printed(capsys, "export", home / "qwen", "--format", "gguf", "--type", "f32").strip()
    talking = ("--prompt", "red house", "--max-new-tokens", 12, "--temperature", 0)
    answer = printed(capsys, "chat", file, *talking)
    assert answer == printed(capsys, "chat", home / "qwen", *talking)
    assert answer != printed(capsys, "chat", model_folder("qwen2"), *talking), "the file must contain what was learned"
    assert printed(capsys, "generate", file, *talking) == printed(capsys, "generate", home / "qwen", *talking)
    loss = json.loads(printed(capsys, "eval", file, "--data", home / "corpus.jsonl", "--json"))["loss"]
    final = json.loads(printed(capsys, "eval", home / "qwen/final", "--data", home / "corpus.jsonl", "--json"))["loss"]
    assert loss == pytest.approx(final, rel=1e-5)
    text = gguf.GGUFReader(file).fields
    assert text["general.base_model.0.name"].contents() == model_folder("qwen2").name
    assert str(home) not in "".join(str(f.contents()) for n, f in text.items() if n.startswith("general."))


def test_a_chat_model_is_measured_on_the_answers_of_conversations(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file = printed(capsys, "export", home / "qwen", "--format", "gguf", "--type", "f32").strip()
    marked = [{"id": str(n), **json.loads(line)} for n, line in enumerate((home / "chat.jsonl").open())]
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, marked)
    of_run = json.loads(printed(capsys, "eval", home / "qwen", "--data", rows, "--json"))
    for target in (home / "qwen/final", file):
        found = json.loads(printed(capsys, "eval", target, "--data", rows, "--window", 96, "--json"))
        assert found.keys() == of_run.keys()
        assert (found["event"], found["step"]) == ("eval", None)
        for name in ("loss", "perplexity", "bits_per_byte"):
            assert found[name] == pytest.approx(of_run[name], rel=1e-4)
    for arguments, sentence in [
        ((file, "--data", rows, "--window", 513), "--window 513 is longer than the model's context of 512 tokens"),
        ((home / "qwen", "--window", 96), "--window requires --data"),
        ((home / "plain/final", "--data", rows), "line 1: the model's tokenizer has no chat template"),
        ((home / "plain", "--data", rows), "these are conversations, not documents"),
        ((model_folder("bert"), "--data", rows), "bert"),
    ]:
        assert sentence in refused(capsys, "eval", *arguments)


def test_rows_that_are_not_whole_blocks_take_no_more_than_the_next_type(home: Path, capsys: Captured) -> None:
    """This model's rows have 64 and 96 values, but a block of a K-quant has 256."""
    sizes = {}
    for kind in ("q4_k", "q4_1", "q6_k", "q8_0"):
        file = home / f"{kind}.gguf"
        exported = ("--format", "gguf", "--quantization", kind, "--output", file)
        assert cli([str(a) for a in ("export", home / "qwen", *exported)]) == 0
        note = capsys.readouterr().err
        sizes[kind] = file.stat().st_size
        types = Counter(tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors)
        assert types.keys() == {"F32", "Q8_0", *({"Q4_1"} if kind.startswith("q4") else ())}
        assert ("1 as q8_0 instead of q6_k and 14 as q4_1 instead of q4_k" in note) == (kind == "q4_k")
        assert ("1 matrix is stored in a different type" in note) == (kind == "q4_1")
        assert ("15 as q8_0 instead of q6_k" in note) == (kind == "q6_k")
    assert sizes["q4_k"] == sizes["q4_1"] < sizes["q6_k"] == sizes["q8_0"]


def test_a_text_that_ends_right_after_the_prompt_is_explained(tmp_path: Path, capsys: Captured) -> None:
    model, tokenizer = base(tmp_path / "base", "llama")
    model.lm_head.weight.data.zero_()  # all logits are equal, so token 0 is always chosen
    parts = replace(tokenizer_parts(tokenizer), eos_id=0)
    write_gguf(tmp_path / "silent.gguf", model.config.to_dict(), model.state_dict(), parts, "f32", ABOUT)
    capsys.readouterr()
    assert cli(["generate", str(tmp_path / "silent.gguf"), "--prompt", "red", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "red\n"
    assert (
        "generated no text, because its first token ends the text; use `sansgpu chat` if it is a chat model"
        in captured.err
    )


def test_a_chat_model_in_a_file_runs_without_the_models_of_transformers(tmp_path: Path) -> None:
    """Importing transformers' models takes more memory and time than a small quantized model."""
    model, tokenizer = base(tmp_path / "base", "llama3")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    file = tmp_path / "model.gguf"
    write_base(file, model, tokenizer, "q4_1")
    chosen = ["--max-new-tokens", "3", "--temperature", "0"]
    commands = [["chat", str(file), "--prompt", "red", *chosen], ["generate", str(file), "--prompt", "red", *chosen]]
    chat_rows(tmp_path / "chat.jsonl")
    commands.append(["eval", str(file), "--data", str(tmp_path / "chat.jsonl"), "--json"])
    script = f"""
import sys
from sansgpu.cli import run
for command in {commands}:
    assert run(command) == 0
print(any(name in ("transformers.modeling_utils", "sympy") for name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert found.splitlines()[-1] == "False"


def test_a_quantized_file_generates_in_the_chosen_precision(tmp_path: Path) -> None:
    model, tokenizer = base(tmp_path / "base", "llama3")
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    write_base(tmp_path / "model.gguf", model, tokenizer, "q4_1")
    logits = {}
    precisions: tuple[Precision, ...] = ("fp32", "bf16")
    for precision in precisions:
        loaded = open_generator(ModelRequest(str(tmp_path / "model.gguf"), precision=precision), pytest.fail)
        generator, found = loaded.task_class.batch_model(loaded), []
        for prompts in ([[5, 6, 7]], [[5, 6, 7], [8]]):
            reader = generator.open_reader(2, 32)
            found.append((reader.add(prompts)[0], reader.step([9] * len(prompts))[0]))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), "the batch changes nothing"
        logits[precision] = found[0]
    for exact, rounded in zip(*logits.values(), strict=True):
        assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
        assert 0 < (rounded - exact).abs().max() < 0.03 * exact.abs().max()


def test_training_continues_from_a_gguf_file(home: Path, tmp_path: Path, capsys: Captured) -> None:
    file = printed(capsys, "export", home / "qwen", "--format", "gguf", "--type", "q8_0").strip()
    chosen = {**ADAPTED, "data.dataset_name": home / "chat.jsonl", "model.name_or_path": file}
    assert cli(["train", *options(chosen), "--output-dir", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/final/adapter_config.json").exists(), "a quantized base stays quantized"
    printed(capsys, "chat", tmp_path / "run", "--prompt", "red", "--max-new-tokens", 2)


def test_what_does_nothing_or_cannot_work_is_refused(home: Path, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    plain, as_gguf = home / "plain", ("--format", "gguf")
    for task in ("qa", "graph"):
        (tmp_path / task).mkdir()
        given = f"task: {task}\nmodel: {{name_or_path: base}}\ndata: {{dataset_name: rows.jsonl}}\n"
        (tmp_path / task / "config.yaml").write_text(given)
    for arguments, sentence in [
        ((plain, "--type", "f16"), "--type requires --format gguf, ollama or onnx"),
        ((plain, *as_gguf, "--type", "q5_k"), "--type is q5_k, but must be one of f32, f16, bf16, q8_0, q6_k"),
        ((plain, "--format", "ollama", "--merge"), "--merge and --no-merge require --format hf or gguf"),
        ((plain, "--format", "tflite"), "--format is tflite, but must be hf, gguf, ollama, onnx or static"),
        ((plain, *as_gguf, "--output", tmp_path / "notes.txt"), "exists and was not written by this command"),
        ((plain, *as_gguf, "--output", tmp_path), "is a folder"),
        ((plain, *as_gguf, "--snapshot", "9999"), "9999"),
        ((plain / "final", *as_gguf), "is not a run"),
        ((home / "relu", *as_gguf), "this model uses relu; use --format hf"),
        ((home / "doge", *as_gguf), "this model has the architecture doge"),
        ((tmp_path / "qa", *as_gguf), "is a run of task qa, but --format gguf needs one of task pretrain or sft"),
        ((tmp_path / "graph", *as_gguf), "is a run of task graph, but --format gguf needs one of task pretrain or sft"),
    ]:
        assert sentence in refused(capsys, "export", *arguments)
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_a_file_that_is_no_model_is_refused_by_every_command(home: Path, capsys: Captured, tmp_path: Path) -> None:
    file = Path(printed(capsys, "export", home / "plain", "--format", "gguf").strip())
    (tmp_path / "torn.gguf").write_bytes(file.read_bytes()[:-5000])
    (tmp_path / "notes.txt").write_text("no model")
    for name, sentence in [
        ("torn.gguf", "is a damaged GGUF"),
        ("notes.txt", "is not a GGUF"),
        ("none.gguf", "does not exist"),
    ]:
        target = tmp_path / name
        assert sentence in refused(capsys, "generate", target, "--prompt", "a")
        assert sentence in refused(capsys, "chat", target, "--prompt", "a")
        assert sentence in refused(capsys, "eval", target, "--data", home / "corpus.jsonl")
    assert "no chat template" in refused(capsys, "chat", file, "--prompt", "a")
    assert "is not a run, so it has no validation split; pass a dataset with --data" in refused(capsys, "eval", file)
    for target in (file, home / "plain/final"):
        assert "has no snapshots" in refused(capsys, "generate", target, "--snapshot", "best")
