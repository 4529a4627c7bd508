"""Distillation: the predictions in a teacher's folder, students that learn from them, and refusals in one sentence."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.config import ConfigError
from sansgpu.data.teacher_folder import Predictions, TeacherFolder, open_teacher_folder
from tests.processes import digests, events_of, finish, kill_when, options, record, settings, start, write_corpus
from tests.scale.launch import finish_forks
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import chat_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=400)  # tokens for three shards


def ignore(*_: object) -> None:
    """Discards progress reports."""


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    """Trains a tiny decoder with task pretrain, and returns the run's folder."""
    cache = home / "cache"
    command = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=20, model__dropout=0)
    code, _, error = finish(["train", *command, "--output-dir", str(home / "teacher")], cache)
    assert code == 0, error
    return home / "teacher"


def distillation(home: Path, teacher: Path, folder: Path, *more: str) -> list[str]:
    data = ["--data", str(home / "corpus.jsonl"), "--max-length", "32", "--top-k", "8"]
    return ["distill", str(teacher), *data, "--output", str(folder), *more]


@pytest.fixture(scope="module")
def lessons(home: Path, teacher: Path) -> Path:
    code, out, error = finish(distillation(home, teacher, home / "lessons", "--json"), home / "cache")
    assert code == 0, error
    result = json.loads(out)
    assert result["shards"] == 3
    assert result["top_k"] == 8
    return home / "lessons"


def student(lessons: Path, **changes: object) -> list[str]:
    """Returns the arguments of a run that learns from predictions in a folder, which replace its training data."""
    own = {"training__distillation__teacher": lessons, "model__dropout": 0, "training__max_steps": 6}
    arguments = settings(**{**own, **changes})
    ours = ("data.vocab_size", "data.validation_split")
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    return ["train", *(part for flag, pair in pairs if not pair.startswith(ours) for part in (flag, pair))]


def hashes(folder: Path) -> dict[str, str]:
    files = (file for file in folder.iterdir() if file.suffix in (".bin", ".npy", ".json"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def assert_predictions_of(folder: TeacherFolder, model: torch.nn.Module, example: int, ids: torch.Tensor) -> None:
    """Compares the predictions of a training example with those of a transformers model for its tokens."""
    records = Predictions(folder, ignore)._read(example)
    with torch.no_grad():
        expected = torch.log_softmax(model(ids[None]).logits[0], dim=1)[:, : folder.settings["vocab_size"]]
    expected = expected[-len(records) :]
    known, found = expected.topk(8), torch.from_numpy(records["log_probabilities"].astype(np.float32))
    torch.testing.assert_close(found[:, :8], known.values, atol=0.05, rtol=0.02)
    torch.testing.assert_close(found.exp().sum(dim=1), torch.ones(len(found)), atol=2e-3, rtol=0)
    at_ids = expected.gather(1, torch.from_numpy(records["ids"].astype(np.int64)))
    torch.testing.assert_close(at_ids, known.values, atol=0.05, rtol=0.02)  # near ties may swap


def test_predictions_are_those_of_the_exported_teacher(teacher: Path, lessons: Path) -> None:
    folder = open_teacher_folder(lessons)
    model = AutoModelForCausalLM.from_pretrained(teacher / "final").eval()
    tokens, lengths = folder.array("train_tokens").astype(np.int64), folder.array("train_lengths")
    ends = np.cumsum(lengths)
    whole = [n for n in range(len(folder.counts)) if not np.any((ends > 32 * n) & (ends < 32 * n + 32))]
    example = whole[-1]  # a window inside a document, in the last shard
    assert_predictions_of(folder, model, example, torch.from_numpy(tokens[32 * example : 32 * example + 32]))


def test_a_killed_distillation_continues_and_a_damaged_shard_is_written_again(
    home: Path, teacher: Path, lessons: Path, capsys: Captured
) -> None:
    folder, cache = home / "killed", home / "cache"
    command = distillation(home, teacher, folder)
    assert kill_when(start(command, cache), (folder / "shard-00000.bin").exists) == -9
    assert cli(student(folder)) == 2
    assert "is incomplete: shard-" in sentence(capsys)
    assert cli(command) == 0
    assert hashes(folder) == hashes(lessons)
    shard = folder / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    capsys.readouterr()
    assert cli(student(folder)) == 2
    assert "shard-00001.bin is missing or was changed; run `sansgpu distill` again" in sentence(capsys)
    assert cli(command) == 0
    assert hashes(folder) == hashes(lessons)
    empty, manifest = folder / "train_lengths.npy", json.loads((folder / "MANIFEST.json").read_text())
    empty.write_bytes(b"")
    manifest["files"][empty.name] = hashlib.sha256(b"").hexdigest()
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    assert cli(student(folder)) == 2
    assert "train_lengths.npy cannot be read (No data left in file)" in sentence(capsys)


def test_a_student_resumes_exactly_and_learns_the_same_in_any_division(home: Path, lessons: Path) -> None:
    cache, step = home / "cache", "snapshots/step-000006"
    runs = {name: home / name for name in ("straight", "killed-student", "divided", "ranks", "alone")}
    code, _, error = finish([*student(lessons), "--output-dir", str(runs["straight"])], cache)
    assert code == 0, error
    killed = [*student(lessons), "--output-dir", str(runs["killed-student"])]
    first = runs["killed-student"] / "snapshots/step-000004/MANIFEST.json"
    assert kill_when(start(killed, cache), first.exists) == -9
    assert finish([*killed, "--resume"], cache)[0] == 0
    same = [
        {k: v for k, v in digests(runs[name]).items() if k.startswith(step)} for name in ("straight", "killed-student")
    ]
    assert same[0] == same[1] != {}
    assert record(runs["straight"]) == record(runs["killed-student"])
    division = {"training__batch_size": 1, "training__gradient_accumulation_steps": 4}
    assert cli([*student(lessons, **division), "--output-dir", str(runs["divided"])]) == 0
    code, error = finish_forks(2, [*student(lessons, **division), "--output-dir", str(runs["ranks"])], cache)
    assert code == 0, error
    steps = {name: events_of(run, "step") for name, run in runs.items() if run.exists()}
    for name in ("divided", "ranks"):
        for key in ("loss", "kl", "grad_norm"):
            assert [e[key] for e in steps[name]] == pytest.approx([e[key] for e in steps["straight"]], rel=1e-4)
    # The loss equals that of a run without a teacher on the same tokens.
    plain = settings(
        data__dataset_name=home / "corpus.jsonl", data__tokenizer=lessons, data__validation_split=0.01,
        training__max_steps=6, model__dropout=0, data__max_length=32, data__vocab_size="",
    )  # fmt: skip
    assert cli(["train", *plain, "--output-dir", str(runs["alone"])]) == 0
    first_loss = [events_of(runs[name], "step")[0]["loss"] for name in ("alone", "straight")]
    assert first_loss[0] == pytest.approx(first_loss[1], rel=0.02)  # only few updates differ so far
    evals = [events_of(runs[name], "eval")[0] for name in ("alone", "straight")]
    assert evals[0]["bits_per_byte"] / evals[0]["loss"] == pytest.approx(evals[1]["bits_per_byte"] / evals[1]["loss"])
    assert (runs["straight"] / "final/tokenizer.json").read_bytes() == (lessons / "tokenizer.json").read_bytes()


def test_conversations(home: Path, tmp_path: Path, capsys: Captured) -> None:
    rows, folder = chat_rows(tmp_path / "chat.jsonl", count=40), tmp_path / "lessons"
    teacher, other = model_folder("qwen2"), model_folder("llama", vocabulary=900)
    assert cli(["distill", str(teacher), "--data", str(rows), "--output", str(folder), "--top-k=8", "--task=sft"]) == 0
    opened = open_teacher_folder(folder)
    tokens, learned = opened.array("train_tokens").astype(np.int64), opened.array("train_learned")
    length = int(opened.array("train_lengths")[0])
    assert opened.counts[0] == learned[1:length].sum()
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    chosen = np.flatnonzero(learned[1:length])
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(tokens[None, : length - 1])).logits[0], dim=1)[chosen]
    found = Predictions(opened, ignore)._read(0)["log_probabilities"][:, :8].astype(np.float32)
    torch.testing.assert_close(torch.from_numpy(found), expected.topk(8).values, atol=0.05, rtol=0.02)
    own = {
        "task": "sft", "data.max_length": "", "model.name_or_path": model_folder("qwen3"), "training.max_steps": 12,
        "training.learning_rate": 0.01, "training.distillation.teacher": folder, "training.distillation.weight": 1.0,
    }  # fmt: skip

    def command(**changes: object) -> list[str]:
        return ["train", *options(TINY, own, changes)]

    assert cli([*command(), "--output-dir", str(tmp_path / "run")]) == 0
    divergence = [e["kl"] for e in events_of(tmp_path / "run", "step")]
    assert divergence[-1] < divergence[0]
    capsys.readouterr()
    assert cli([*command(model__name_or_path=other), "--output-dir", str(tmp_path / "other")]) == 2
    assert (tmp_path / "run/final/chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
    assert "a model with the teacher's tokenizer" in sentence(capsys)
    assert cli(["train", *student(folder)[1:], "--output-dir", str(tmp_path / "text")]) == 2
    assert "was written for task sft; set task to sft" in sentence(capsys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data__dataset_name": "notes"},
            "data.dataset_name has no effect because training.distillation.teacher provides",
        ),
        ({"data__tokenizer": "char"}, "data.tokenizer has no effect"),
        ({"training__label_smoothing": 0.1}, "training.label_smoothing has no effect"),
        ({"data__max_length": 16}, "has examples of at most 32 tokens; remove data.max_length"),
        ({"model__max_seq_len": 16}, "model.max_seq_len is 16"),
        ({"training__distillation__teacher": "nowhere"}, "nowhere is not a folder written by `sansgpu distill`"),
        ({"training__distillation__teacher": "null", "training__distillation__weight": 0.3}, "without a teacher"),
    ],
)
def test_settings_that_conflict_with_a_teacher_are_refused(
    lessons: Path, tmp_path: Path, capsys: Captured, changes: dict[str, object], words: str
) -> None:
    assert cli([*student(lessons, **changes), "--output-dir", str(tmp_path / "run")]) == 2
    assert words in sentence(capsys)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--top-k", "4"], "was written with a different top k (8, now 4)"),
        (["--top-k", "5000"], "must be less than the size of the vocabulary"),
        (["--max-length", "64"], "longer than the teacher's context of 32 tokens"),
        (["--task", "chat"], "must be pretrain or sft"),
        (["--task", "sft"], "was not trained on conversations"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
    ],
)
def test_a_distillation_that_cannot_work_is_refused(
    home: Path, teacher: Path, lessons: Path, capsys: Captured, more: list[str], words: str
) -> None:
    before = hashes(lessons)
    assert cli([*distillation(home, teacher, lessons), *more]) == 2
    assert words in sentence(capsys)
    assert hashes(lessons) == before


HOSTILE: list[tuple[str, str, Any]] = [
    ("settings", "top_k", "8"), ("settings", "top_k", 10**30), ("settings", "top_k", float("nan")),
    ("settings", "top_k", -1), ("settings", "vocab_size", [300]), ("settings", "vocab_size", 2**40),
    ("settings", "max_length", -1), ("settings", "max_length", {}), ("settings", "teacher", None),
    ("files", "../mine.txt", "a"), ("files", "/dev/zero", "a"), ("files", "x" * 999, "a"), ("files", "counts.npy", 5),
]  # fmt: skip


def test_a_manifest_with_odd_values_is_refused_in_one_sentence(lessons: Path, tmp_path: Path) -> None:
    folder = copytree(lessons, tmp_path / "lessons")
    known = (folder / "MANIFEST.json").read_text()
    for part, name, value in HOSTILE:
        values = json.loads(known)
        values[part][name] = value
        (folder / "MANIFEST.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError) as error:
            open_teacher_folder(folder)
        assert len(str(error.value)) < 500
        assert str(folder) in str(error.value)
        assert name[:9] in str(error.value)


def test_other_folders_and_several_processes_are_refused(
    home: Path, teacher: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert cli(distillation(home, teacher, tmp_path)) == 2
    assert "contains files that `sansgpu distill` did not write" in sentence(capsys)
    (tmp_path / "link").symlink_to(home / "lessons")
    assert cli(distillation(home, teacher, tmp_path / "link")) == 2
    assert f"{tmp_path / 'link'} is a symlink, which is not followed" in sentence(capsys)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli(distillation(home, teacher, tmp_path / "new")) == 2
    assert "runs in one process, which uses all cores, but 2 were started; start it without torchrun" in sentence(
        capsys
    )
    rows = ["--data", str(home / "corpus.jsonl"), "--output", str(tmp_path / "rows.jsonl")]
    assert cli(["generate", str(teacher), *rows]) == 2
    assert "sansgpu generate --data runs in one process" in sentence(capsys)
