"""Few-shot classification: it learns, exports and resumes like every task, and refuses rows it cannot use."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression

from sansgpu.cli import run as cli
from sansgpu.jobs.snapshots import fork_snapshot
from sansgpu.tasks.classify.few_shot import logistic_regression, pair_loss
from tests.processes import digests, events_of, options, record, train_once, write_rows
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import WORDS, labeled_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")
SHOTS = 4
TOPICS = ("colors", "food", "sport")


def fill(home: Path) -> None:
    texts = [(topic, f"{WORDS[3 * n]} {WORDS[3 * n + k % 3]}") for n, topic in enumerate(TOPICS) for k in range(SHOTS)]
    write_rows(home / "rows.jsonl", [{"text": text, "label": topic} for topic, text in texts])


def settings(data: Path, **changes: object) -> list[str]:
    own = {
        "task": "classify", "training.few_shot": "true", "model.name_or_path": model_folder("bert"),
        "data.dataset_name": data, "data.validation_name": data, "training.eval_steps": 0,
    }  # fmt: skip
    return options(TINY, own, changes)


def made(home: Path, name: str, **changes: object) -> Path:
    """Trains a run in this process unless one with this name exists, and returns its folder."""
    return train_once(home / name, settings(home / "rows.jsonl", **changes))


def printed(capsys: Captured, *arguments: object) -> list[Any]:
    capsys.readouterr()
    assert cli(list(map(str, arguments))) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def learned(home: Path) -> Path:
    return made(home, "learned", training__max_steps=20, training__gradient_accumulation_steps=6)


def test_a_few_examples_of_each_label_are_learned_and_predicted(home: Path, capsys: Captured) -> None:
    run = learned(home)
    last = events_of(run, "eval")[-1]
    assert last["accuracy"] == 1
    assert last["confusion"] == (SHOTS * np.eye(3)).astype(int).tolist()
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    for target in (run, run / "final"):
        found = printed(capsys, "predict", target, "--data", home / "rows.jsonl")
        assert [row["label"] for row in found] == [row["label"] for row in rows]
        assert all(list(row["scores"]) == sorted(TOPICS) for row in found)
        assert all(sum(row["scores"].values()) == pytest.approx(1) for row in found)
        (evaluated,) = printed(capsys, "eval", target, "--data", home / "rows.jsonl", "--json")
        assert evaluated["loss"] == pytest.approx(last["loss"], abs=1e-5)
    assert "Confusion matrix" in (run / "report.html").read_text()


def test_the_exported_classifier_is_scikit_learns_on_the_exported_vectors(home: Path, capsys: Captured) -> None:
    folder = learned(home) / "final"
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    vectors = SentenceTransformer(str(folder), device="cpu").encode([row["text"] for row in rows])
    expected = LogisticRegression(tol=1e-8, max_iter=1000).fit(vectors, [row["label"] for row in rows])
    head = load_file(folder / "head.safetensors")
    np.testing.assert_allclose(head["weight"], expected.coef_, atol=1e-3)
    np.testing.assert_allclose(head["bias"], expected.intercept_, atol=1e-3)
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert code
    known: dict[str, Any] = {}
    exec(code[1].replace("MODEL", str(folder)).replace("A text.", rows[0]["text"]), known)
    (found,) = printed(capsys, "predict", folder, "--text", rows[0]["text"], "--json")
    assert known["labels"][0] == found["label"]


@pytest.mark.parametrize(
    ("asked", "steps", "size"),
    [(5, 3, 4), *(pytest.param(*case, marks=pytest.mark.long) for case in ((32, 1, 12), (8, 2, 6)))],
)
def test_the_rows_are_divided_evenly_among_the_steps_of_an_epoch(
    home: Path, asked: int, steps: int, size: int, capsys: Captured
) -> None:
    chosen = {"training__batch_size": "auto", "training__gradient_accumulation_steps": asked}
    long = {"training__max_steps": "null", "training__num_epochs": 10}
    (plan,) = printed(capsys, "plan", *settings(home / "rows.jsonl", **chosen, **long), "--json")
    assert plan["total_steps"] == 10 * steps
    assert plan["batch_size"] * plan["gradient_accumulation_steps"] == size
    assert plan["fits"]


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"model__adapter": "lora", "model__lora_dropout": 0.1}], ids=["full", "lora"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    home: Path, changes: dict[str, object], capsys: Captured
) -> None:
    straight = made(home, f"straight-{len(changes)}", **changes)
    before = printed(capsys, "predict", straight, "--snapshot", "2", "--data", home / "rows.jsonl")
    assert len({row["label"] for row in before}) > 1, "the classifier of a snapshot without an evaluation is not fitted"
    for step in ("2", "4"):  # during the training on pairs, and after it
        resumed = fork_snapshot(straight, step, home / f"resumed-{step}-{len(changes)}", pytest.fail)
        again = ["--output-dir", str(resumed), "-f", str(resumed / "config.yaml")]
        assert cli(["train", "--resume", "latest", *again]) == 0
        last = [{k: v for k, v in digests(run).items() if "step-000002" not in k} for run in (straight, resumed)]
        assert last[0] == last[1]
        assert [e for e in record(resumed) if e["event"] == "eval"] == [
            e for e in record(straight) if e["event"] == "eval"
        ]


@pytest.mark.long
def test_an_onnx_file_has_the_logits(home: Path, capsys: Captured) -> None:
    import onnxruntime
    from transformers import AutoTokenizer

    run = learned(home)
    assert cli(["export", str(run), "--format", "onnx"]) == 0
    session = onnxruntime.InferenceSession(run / "onnx-f32/model.onnx", providers=["CPUExecutionProvider"])
    encoded = AutoTokenizer.from_pretrained(run / "onnx-f32")(["red fox"], return_tensors="np")
    (logits,) = session.run(["logits"], {node.name: encoded[node.name] for node in session.get_inputs()})
    (found,) = printed(capsys, "predict", run, "--text", "red fox", "--json")
    assert torch.tensor(logits[0]).softmax(0).tolist() == pytest.approx(list(found["scores"].values()), abs=1e-4)


# Losses and the fitted classifier


def test_the_loss_is_that_of_all_pairs() -> None:
    draws = torch.Generator().manual_seed(0)
    vectors = F.normalize(torch.randn(9, 16, generator=draws), dim=-1)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    errors: dict[bool, list[float]] = {True: [], False: []}
    for one in range(9):
        for other in range(one):
            alike = bool(labels[one] == labels[other])
            errors[alike].append((float(F.cosine_similarity(vectors[one], vectors[other], dim=0)) - alike) ** 2)
    assert float(pair_loss(vectors, labels)) == pytest.approx((np.mean(errors[True]) + np.mean(errors[False])) / 2)
    assert float(pair_loss(vectors[:2], labels[:2])) == pytest.approx(errors[False][0])
    assert float(pair_loss(vectors[:1], labels[:1])) == 0


def test_the_classifier_does_not_depend_on_the_threads() -> None:
    vectors, targets = torch.randn(200, 384, generator=torch.Generator().manual_seed(1)), torch.arange(200) % 7
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(logistic_regression(F.normalize(vectors, dim=-1), targets, 7))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(head.weight, found[0].weight) and torch.equal(head.bias, found[0].bias) for head in found)


# Errors


def refusal(capsys: Captured, tmp_path: Path, path: Path, **changes: object) -> str:
    chosen = settings(path, **changes)  # may build the base model, which prints messages
    capsys.readouterr()
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "refused")]) == 2
    return sentence(capsys)


def test_rows_that_it_cannot_learn_from_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    for kind in ("multiple", "regression"):
        rows = labeled_rows(tmp_path / f"{kind}.jsonl", kind, 12)
        expected = f"training.few_shot requires rows with one label each, but data.label_kind is {kind}"
        assert expected in refusal(capsys, tmp_path, rows)
        assert expected in refusal(capsys, tmp_path, rows, data__label_kind=kind)
    pairs = labeled_rows(tmp_path / "pairs.jsonl", count=12, pairs=True)
    said = refusal(capsys, tmp_path, pairs)
    assert "pairs.jsonl, line 1: it has a second text, but training.few_shot supports only single texts" in said
    said = refusal(capsys, tmp_path, home / "rows.jsonl", data__validation_name=pairs)
    assert "pairs.jsonl, line 1" in said
    assert "pairs.jsonl, line 1" in refusal(capsys, tmp_path, pairs, data__on_bad_row="skip")
    bad = write_rows(tmp_path / "bad.jsonl", [{"text": "red", "label": "a"}, {"text": " ", "label": "b"}])
    assert "bad.jsonl, line 2: its text is empty" in refusal(capsys, tmp_path, bad)
    two = write_rows(tmp_path / "two.jsonl", [{"text": "red", "label": "a"}, {"text": "blue", "label": "b"}])
    said = refusal(capsys, tmp_path, two, data__validation_name="null")
    assert "two.jsonl: all training rows have the label" in said
    assert "held out for validation" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training__label_smoothing": 0.1}, "training.label_smoothing is for task"),
        ({"data__class_weights": "balanced"}, "data.class_weights is for task classify"),
        ({"data__text_pair_column": "other"}, "data.text_pair_column is for task"),
        ({"model__adapter": "lora", "model__merge_adapter": "false"}, "set model.merge_adapter to true"),
        ({"task": "embed"}, "training.few_shot is for task classify, and has no effect in embed"),
        ({"training__few_shot": "yes, please"}, "training.few_shot"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    home: Path, tmp_path: Path, changes: dict[str, object], said: str, capsys: Captured
) -> None:
    assert said in refusal(capsys, tmp_path, home / "rows.jsonl", **changes)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (
            {"weight": np.ones((2, 64), np.float32), "bias": np.ones(2, np.float32)},
            "does not match the model's 3 labels",
        ),
        ({"weight": np.ones((3, 64), np.float32)}, "lacks a matrix `weight` and a vector `bias`"),
        (b"{", "is a damaged safetensors file"),
    ],
)
def test_a_damaged_classifier_is_refused(home: Path, tmp_path: Path, head: Any, said: str, capsys: Captured) -> None:
    folder = shutil.copytree(learned(home) / "final", tmp_path / "final")
    if isinstance(head, bytes):
        (folder / "head.safetensors").write_bytes(head)
    else:
        save_file(head, folder / "head.safetensors")
    capsys.readouterr()
    assert cli(["predict", str(folder), "--text", "red"]) == 2
    assert said in sentence(capsys)


def test_commands_refuse_what_the_model_cannot_do(home: Path, tmp_path: Path, capsys: Captured) -> None:
    adapted = made(home, "straight-2", model__adapter="lora", model__lora_dropout=0.1)
    for arguments, said in {
        ("export", adapted, "--no-merge", "--output", tmp_path / "out"): "remove --no-merge",
        ("predict", adapted, "--text", "red", "--text-pair", "blue"): "it has a second text",
    }.items():
        capsys.readouterr()
        assert cli(list(map(str, arguments))) == 2
        assert said in sentence(capsys)
