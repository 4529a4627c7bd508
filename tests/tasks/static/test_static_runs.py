"""Runs of task static export folders of Sentence Transformers, resume byte for byte, and refuse what cannot work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.normalize import Normalize
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from sansgpu.cli import run as cli
from tests.processes import digests, events_of, finish, kill_when, options, record, start, train_once, write_rows
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import model_folder
from tests.tasks.texts import text_rows
from tests.tasks.tokenizer_kinds import tokenizer_of

pytestmark = pytest.mark.usefixtures("home")

TEXTS = ["red old house", "a", "new cat " * 400, "The fox is brown.", "[SEP] ?"]
STEPS = 6


def fill(home: Path) -> None:
    for form in ("pairs", "scores"):
        text_rows(home / f"{form}.jsonl", form)
    write_rows(home / "texts.jsonl", ({"text": text} for text in TEXTS))


def settings(home: Path, form: str = "pairs", **changes: object) -> list[str]:
    own = {
        "task": "static", "data.dataset_name": home / f"{form}.jsonl", "data.validation_split": 0.2,
        "training.gradient_accumulation_steps": 4,
    }  # fmt: skip
    return options(TINY, own, changes)


def made(home: Path, name: str, form: str = "pairs", **changes: object) -> Path:
    return train_once(home / name, settings(home, form, **changes))


def from_encoder(home: Path) -> Path:
    return made(home, "distilled", model__name_or_path=model_folder("bert"), model__embedding_dim=16)


def vectors(target: Path, home: Path, output: Path) -> np.ndarray:
    assert cli(["embed", str(target), "--data", str(home / "texts.jsonl"), "--output", str(output)]) == 0
    found: np.ndarray = np.load(output)
    return found


@pytest.mark.parametrize("base", ["random", "encoder", "static"])
def test_sentence_transformers_computes_the_same_vectors(home: Path, tmp_path: Path, base: str) -> None:
    if base == "random":
        run = made(home, "random", data__vocab_size=300, model__embedding_dim=8)
    elif base == "encoder":
        run = from_encoder(home)
    else:
        run = made(home, "static", "scores", model__name_or_path=from_encoder(home) / "final")
        assert "spearman" in events_of(run, "eval")[-1]
    expected = SentenceTransformer(str(run / "final"), device="cpu").encode(TEXTS)
    for number, target in enumerate((run, run / "final")):
        np.testing.assert_allclose(vectors(target, home, tmp_path / f"{number}.npy"), expected, atol=1e-6)
    assert "StaticEmbedding" in (run / "final/modules.json").read_text()
    assert "SentenceTransformer" in (run / "final/README.md").read_text(encoding="utf-8")


def test_a_run_starts_from_the_vectors_of_its_base(home: Path, tmp_path: Path) -> None:
    """An export without training has the first vectors; so has a run with a learning rate that changes nothing."""
    distilled = tmp_path / "static"
    asked = ["export", str(model_folder("bert")), "--format", "static", "--dimensions", "16", "--output"]
    assert cli([*asked, str(distilled)]) == 0
    table = load_file(distilled / "model.safetensors")["embedding.weight"]
    still = {"training__learning_rate": 1e-12, "training__max_steps": 1}
    for name, base in (("still-encoder", model_folder("bert")), ("still-static", distilled)):
        dims = {"model__embedding_dim": 16} if name == "still-encoder" else {}
        run = made(home, name, model__name_or_path=base, **dims, **still)
        found = load_file(run / "final/model.safetensors")["embedding.weight"]
        # On some processors the encoder is multiplied in bf16, which rounds differently in different batches.
        assert (found - table).abs().mean() < (0.05 if name == "still-encoder" else 1e-9)


def test_folders_of_sentence_transformers_and_model2vec_are_embedded_as_they_are(home: Path, tmp_path: Path) -> None:
    """Truncation in the tokenizer, prompts, other names of the weights, and narrow types are kept."""
    static = StaticEmbedding(tokenizer_of("wordpiece"), embedding_dim=8)
    static.tokenizer.enable_truncation(4)
    prompts = {"query": "cat: ", "other": "sells "}
    SentenceTransformer(modules=[static, Normalize()], device="cpu", prompts=prompts, default_prompt_name="other").save(
        str(tmp_path / "theirs")
    )
    expected = SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors(tmp_path / "theirs", home, tmp_path / "a.npy"), expected, atol=1e-6)
    tuned = made(home, "tuned", model__name_or_path=tmp_path / "theirs", training__max_steps=1)
    written = json.loads((tuned / "final/config_sentence_transformers.json").read_text())
    assert (written["prompts"]["query"], written["default_prompt_name"]) == ("cat: ", "other")
    again = SentenceTransformer(str(tuned / "final"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors(tuned, home, tmp_path / "b.npy"), again, atol=1e-6)
    weights = load_file(tmp_path / "theirs/model.safetensors")["embedding.weight"]
    save_file({"embeddings": weights.half()}, tmp_path / "theirs/model.safetensors")
    np.testing.assert_allclose(vectors(tmp_path / "theirs", home, tmp_path / "c.npy"), expected, atol=0.01)


def test_search_and_eval_take_a_static_folder(home: Path, tmp_path: Path, capsys: Captured) -> None:
    final = from_encoder(home) / "final"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("\n\n".join(TEXTS[:1] + TEXTS[3:4]))
    capsys.readouterr()
    assert cli(["search", str(final), str(tmp_path / "texts"), TEXTS[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passages"][0]["text"].startswith(TEXTS[0])
    assert cli(["eval", str(final), "--data", str(home / "scores.jsonl"), "--json"]) == 0
    assert -1 <= json.loads(capsys.readouterr().out)["spearman"] <= 1


@pytest.mark.parametrize("base", ["random", pytest.param("encoder", marks=pytest.mark.long)])
def test_a_killed_run_resumes_byte_for_byte(home: Path, tmp_path: Path, base: str) -> None:
    changes: dict[str, object] = {"training__max_steps": STEPS, "training__matryoshka_dims": [16, 8]}
    changes |= {"model__embedding_dim": 16}
    changes |= {"data__vocab_size": 300} if base == "random" else {"model__name_or_path": model_folder("bert")}
    runs = tmp_path / "straight", tmp_path / "killed"
    commands = [["train", *settings(home, **changes), "--output-dir", str(run)] for run in runs]
    assert finish(commands[0], home / "cache")[0] == 0
    ready = runs[1] / "snapshots/step-000002/MANIFEST.json"
    assert kill_when(start(commands[1], home / "cache"), ready.exists) == -9
    code, _, error = finish([*commands[1], "--resume"], home / "cache")
    assert code == 0, error
    kept = [
        {k: v for k, v in digests(run).items() if k.startswith((f"snapshots/step-{STEPS:06d}", "final"))}
        for run in runs
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 3
    assert record(runs[0]) == record(runs[1])


def test_a_run_ends_at_its_time_limit(home: Path, tmp_path: Path) -> None:
    limited = settings(home, model__embedding_dim=16, training__max_steps=10**6, training__max_hours=0.001)
    assert cli(["train", *limited, "--output-dir", str(tmp_path / "run")]) == 0
    end = events_of(tmp_path / "run", "end")[0]
    assert end["reason"] == "out_of_time"
    assert 0 < end["step"] < 10**6
    assert (tmp_path / "run/final/model.safetensors").is_file()


def test_a_plan_knows_the_table(home: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert cli(["plan", *settings(home, data__vocab_size=300, model__embedding_dim=8), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    rows = events_of(made(home, "random", data__vocab_size=300, model__embedding_dim=8), "start")[0]
    assert plan["parameters"] == rows["parameters"] == 8 * rows["vocab_size"]
    assert plan["total_seconds"] > 0


BAD = {
    "data.tokenizer=char model.name_or_path=ENCODER": "data.tokenizer has no effect because model.name_or_path has its",
    "model.sif_coefficient=0.1": "model.sif_coefficient has no effect because model.name_or_path is not set",
    "model.name_or_path=ENCODER model.embedding_dim=65": "have only 64 dimensions, so they cannot be reduced to 65",
    "model.name_or_path=STATIC model.embedding_dim=8": "have 16 dimensions; remove it",
    "training.matryoshka_dims=[300]": "contains 300, but the vectors have only 256 dimensions",
    "training.precision=int8": "training.precision int8 has no effect in task static",
    "model.adapter=lora": "model.adapter is for task",
    "model.pooling=cls": "model.pooling is for task",
    "model.name_or_path=ENCODER model.vocab_size=10": "model.vocab_size 10 is smaller than the vocabulary of",
    "data.dataset_name=python-stdlib": "task static requires rows; set data.dataset_name",
    "model.name_or_path=./nothing": "does not exist",
}


@pytest.mark.parametrize("asked", BAD)
def test_a_setting_that_cannot_work_is_one_sentence(home: Path, asked: str, capsys: Captured) -> None:
    places = {"ENCODER": str(model_folder("bert")), "STATIC": str(from_encoder(home) / "final")}
    chosen = [part for pair in asked.split() for part in ("--set", pair)]
    for name, place in places.items():
        chosen = [part.replace(name, place) for part in chosen]
    capsys.readouterr()
    assert cli(["train", *settings(home, data__vocab_size=8192), *chosen, "--output-dir", str(home / "bad")]) == 2
    assert BAD[asked] in sentence(capsys)


def test_a_damaged_folder_is_one_sentence(home: Path, tmp_path: Path, capsys: Captured) -> None:
    final, folder = from_encoder(home) / "final", tmp_path / "model"

    def refused(said: str) -> None:
        capsys.readouterr()
        asked = ["embed", str(folder), "--data", str(home / "texts.jsonl"), "--output", str(tmp_path / "a.npy")]
        assert cli(asked) == 2
        assert said in sentence(capsys)
        shutil.copytree(final, folder, dirs_exist_ok=True)

    shutil.copytree(final, folder)
    table = load_file(folder / "model.safetensors")["embedding.weight"]
    (folder / "model.safetensors").unlink()
    refused("is a static embedding model without model.safetensors; download it again")
    save_file({"embedding.weight": table[:5].clone()}, folder / "model.safetensors")
    refused("but there are only 5 embeddings; download the model again")
    save_file({"embeddings": table, "mapping": torch.zeros(3)}, folder / "model.safetensors")
    refused("does not contain a single matrix of embeddings")
    (folder / "model.safetensors").write_bytes(b"x")
    refused("is a damaged safetensors file")
    (folder / "tokenizer.json").write_text("{}")
    refused("tokenizer.json is not a usable tokenizer")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "models.Dense", "path": "2_Dense"}]))
    refused("names the module Dense, but sansgpu supports StaticEmbedding and Normalize; choose another model.")
    (folder / "modules.json").write_text(json.dumps([{**modules[0], "path": "../.."}]))
    refused("which is outside its folder")


def test_commands_that_do_not_fit_are_one_sentence(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run = from_encoder(home)
    embed = ["--data", str(home / "texts.jsonl"), "--output", str(tmp_path / "a.npy")]
    for command, said in (
        (["embed", run, *embed, "--precision", "bf16"], "--precision has no effect on"),
        (["eval", run, "--precision", "bf16"], "--precision has no effect on"),
        (["export", run, "--format", "static"], "already has static embeddings; choose an encoder"),
        (["export", run, "--format", "onnx"], "has static embeddings, which --format onnx does not support"),
        (["export", run, "--dimensions", "8"], "--dimensions requires --format static"),
        (["export", run / "final", "--format", "static"], "is not a run; set --output to the file to write"),
    ):
        capsys.readouterr()
        assert cli([str(part) for part in command]) == 2
        assert said in sentence(capsys)
    task = ["--set", "task=embed", "--set", f"model.name_or_path={run / 'final'}"]
    capsys.readouterr()
    assert (
        cli(["train", *task, "--set", f"data.dataset_name={home / 'pairs.jsonl'}", "--output-dir", str(tmp_path / "r")])
        == 2
    )
    assert "is not a model folder: it has no config.json" in sentence(capsys)
