"""Selecting tokens by their excess loss: exact resume, processes, the teacher's folder, refusals in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sansgpu.cli import run as cli
from sansgpu.data.teacher_folder import OF_TARGET, Predictions, open_teacher_folder, record_type
from sansgpu.machine.disk import file_sha256
from tests.processes import digests, events_of, finish, kill_when, record, settings, start, write_corpus
from tests.scale.launch import finish_forks
from tests.tasks.fine_tuned import Captured, sentence

pytestmark = pytest.mark.usefixtures("home")


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=400)


@pytest.fixture(scope="module")
def teacher(home: Path) -> Path:
    command = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=20, model__dropout=0)
    assert cli(["train", *command, "--output-dir", str(home / "teacher")]) == 0
    return home / "teacher"


def lessons_of(home: Path, teacher: Path, top_k: int) -> Path:
    folder = home / f"lessons-{top_k}"
    if not folder.exists():
        data = ["--data", str(home / "corpus.jsonl"), "--max-length", "32", "--top-k", str(top_k)]
        assert cli(["distill", str(teacher), *data, "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def reference(home: Path, teacher: Path) -> Path:
    """Writes a folder with only the teacher's probabilities of the text's own tokens."""
    return lessons_of(home, teacher, 0)


def student(lessons: Path, **changes: object) -> list[str]:
    section = "training__distillation__"
    own = {f"{section}teacher": lessons, f"{section}weight": 0, f"{section}token_share": 0.6}
    sizes = {"model__dropout": 0, "training__max_steps": 6, "data__vocab_size": "", "data__validation_split": ""}
    return ["train", *settings(**{**own, **sizes, **changes})]


def test_the_folder_has_the_probabilities_of_the_exported_teacher(teacher: Path, reference: Path) -> None:
    folder = open_teacher_folder(reference)
    assert folder.record.itemsize == 2
    model = AutoModelForCausalLM.from_pretrained(teacher / "final").eval()
    tokens, ends = folder.array("train_tokens").astype(np.int64), np.cumsum(folder.array("train_lengths"))
    whole = [n for n in range(len(folder.counts) - 1) if not np.any((ends > 32 * n) & (ends < 32 * n + 33))]
    text = torch.from_numpy(tokens[32 * whole[-1] : 32 * whole[-1] + 33])  # a window inside a document
    with torch.no_grad():
        expected = torch.log_softmax(model(text[None, :-1]).logits[0], dim=1).gather(1, text[1:, None])[:, 0]
    found = Predictions(folder, lambda *_: None)._read(whole[-1])[OF_TARGET].astype(np.float32)
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=0.05, rtol=0.02)


@pytest.mark.long
def test_a_killed_run_resumes_exactly_and_evaluates_all_tokens(home: Path, reference: Path, capsys: Captured) -> None:
    straight, killed, cache = home / "straight", home / "killed", home / "cache"
    assert finish([*student(reference), "--output-dir", str(straight)], cache)[0] == 0
    command = [*student(reference), "--output-dir", str(killed)]
    assert kill_when(start(command, cache), (killed / "snapshots/step-000004/MANIFEST.json").exists) == -9
    assert finish([*command, "--resume"], cache)[0] == 0
    found = [{k: v for k, v in digests(run).items() if "step-000006" in k} for run in (straight, killed)]
    assert found[0] == found[1] != {}
    assert record(straight) == record(killed)
    capsys.readouterr()
    assert cli(["eval", str(straight / "final"), "--data", str(home / "corpus.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(
        events_of(straight, "eval")[-1]["loss"], rel=0.1
    )


def test_processes_and_accumulation_select_the_same_tokens_of_each_micro_batch(home: Path, reference: Path) -> None:
    runs, cache = [home / "accumulated", home / "ranks"], home / "cache"
    chosen = student(reference, training__batch_size=1, training__gradient_accumulation_steps=4)
    assert finish([*chosen, "--output-dir", str(runs[0])], cache)[0] == 0
    code, error = finish_forks(2, [*chosen, "--output-dir", str(runs[1])], cache)
    assert code == 0, error
    one, two = (events_of(run, "step") for run in runs)
    for key in ("loss", "grad_norm"):
        assert [e[key] for e in one] == pytest.approx([e[key] for e in two], rel=1e-4)
    assert all("kl" not in e for e in one)


def test_a_folder_of_the_first_version_teaches_but_does_not_select(
    home: Path, teacher: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = lessons_of(home, teacher, 4)
    old = first_version(copytree(folder, tmp_path / "old"))
    plain = {"training__distillation__token_share": 1, "training__distillation__weight": 0.5}
    for lessons, run in ((folder, tmp_path / "new"), (old, tmp_path / "run")):
        assert cli([*student(lessons, **plain), "--output-dir", str(run)]) == 0
    final = "final/model.safetensors"
    assert (tmp_path / "new" / final).read_bytes() == (tmp_path / "run" / final).read_bytes()
    both = student(folder, training__distillation__weight=0.5)
    assert cli([*both, "--output-dir", str(tmp_path / "both")]) == 0
    assert all({"loss", "kl"} <= set(e) for e in events_of(tmp_path / "both", "step"))
    capsys.readouterr()
    assert cli([*student(old), "--output-dir", str(tmp_path / "refused")]) == 2
    assert "was written by an earlier version of `sansgpu distill`" in sentence(capsys)


def first_version(root: Path) -> Path:
    """Rewrites a complete folder as an earlier version of `sansgpu distill` wrote it."""
    manifest, folder = json.loads((root / "MANIFEST.json").read_text()), open_teacher_folder(root)
    for name in manifest["shards"]:
        records = np.fromfile(root / name, folder.record)
        old = np.zeros(len(records), record_type(4, folder.settings["vocab_size"], version=1))
        for field in ("ids", "log_probabilities"):
            old[field] = records[field]
        old.tofile(root / name)
        manifest["shards"][name] = file_sha256(root / name)
    (root / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 1}))
    return root


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight": 0.5}, "was written with --top-k 0"),
        ({"token_share": 1}, "weight is 0, with which the teacher has an effect only if it selects tokens"),
        ({"token_share": 0}, "token_share"),
        ({"temperature": 2}, "temperature has no effect with weight 0"),
        ({"teacher": "null", "weight": 0.5}, "token_share has no effect without a teacher"),
    ],
)
def test_settings_act_or_are_refused(
    reference: Path, tmp_path: Path, capsys: Captured, changes: dict[str, object], words: str
) -> None:
    chosen = {f"training__distillation__{key}": value for key, value in changes.items()}
    assert cli([*student(reference, **chosen), "--output-dir", str(tmp_path / "run")]) == 2
    assert words in sentence(capsys)


def test_task_sft_refuses_to_select_tokens(reference: Path, tmp_path: Path, capsys: Captured) -> None:
    chosen = {"task": "sft", "model.name_or_path": tmp_path, "training.distillation.teacher": reference}
    pairs = [f"{key}={value}" for key, value in chosen.items()]
    pairs.append("training.distillation.token_share=0.5")
    assert cli(["train", *(part for pair in pairs for part in ("--set", pair)), "--output-dir", str(tmp_path)]) == 2
    assert "training.distillation.token_share has no effect because only task pretrain" in sentence(capsys)
