"""Models that classify texts: labels, metrics, predictions, exports and bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import AutoPeftModelForSequenceClassification
from safetensors import safe_open
from sklearn.metrics import confusion_matrix, f1_score, matthews_corrcoef
from sklearn.utils.class_weight import compute_class_weight
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.jobs.snapshots import fork_snapshot
from sansgpu.tasks.classify.data import balanced_weights
from sansgpu.tasks.classify.labels import Labels
from sansgpu.tasks.classify.task import Classify
from sansgpu.tasks.configuration import load_config
from tests.processes import digests, events_of, options, overrides, record, train_once, write_rows
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import labeled_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")
BERT = {"task": "classify", "model.name_or_path": model_folder("bert")}


def fill(home: Path) -> None:
    for kind in ("single", "multiple", "regression"):
        labeled_rows(home / f"{kind}.jsonl", kind)


def settings(data: Path, **changes: object) -> list[str]:
    return options(TINY, BERT, {"data.dataset_name": data}, changes)


def made(home: Path, name: str, kind: str = "single", **changes: object) -> Path:
    """Trains a run in this process unless one with this name exists, and returns its folder."""
    return train_once(home / name, settings(home / f"{kind}.jsonl", **changes))


def printed(capsys: Captured, *arguments: str) -> str:
    capsys.readouterr()
    assert cli(list(arguments)) == 0
    return capsys.readouterr().out


def data_of(run: Path) -> dict[str, Any]:
    section: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())["data"]
    return section


# Learning


def test_labels_are_learned_recorded_and_predicted(home: Path, capsys: Captured) -> None:
    run = made(home, "learned", training__max_steps=40, training__eval_steps=40, training__save_steps=40,
               training__batch_size=8, training__learning_rate=0.003,
               data__validation_name=home / "single.jsonl")  # fmt: skip
    assert (data_of(run)["labels"], data_of(run)["label_kind"]) == (["cold", "warm"], "single")
    last = events_of(run, "eval")[-1]
    assert last["accuracy"] > 0.9
    results = [json.loads(line) for line in printed(
        capsys, "predict", str(run), "--data", str(home / "single.jsonl")
    ).splitlines()]  # fmt: skip
    rows = [json.loads(line) for line in (home / "single.jsonl").read_text().splitlines()]
    given, found = [row["label"] for row in rows], [result["label"] for result in results]
    assert last["confusion"] == confusion_matrix(given, found).tolist()
    assert last["accuracy"] == pytest.approx(sum(a == b for a, b in zip(given, found, strict=True)) / len(given))
    assert last["macro_f1"] == pytest.approx(f1_score(given, found, average="macro"))
    assert last["matthews"] == pytest.approx(matthews_corrcoef(given, found), abs=1e-6)
    assert all(sum(result["scores"].values()) == pytest.approx(1) for result in results)
    text = printed(capsys, "predict", str(run), "--text", "red house is red")
    assert text.startswith(("warm (", "cold ("))
    assert text.endswith("%)\n")


def test_a_folder_for_transformers_gives_equal_probabilities(home: Path, capsys: Captured) -> None:
    run = made(home, "exported")
    theirs = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    assert theirs.config.id2label == {0: "cold", 1: "warm"}
    encoded = AutoTokenizer.from_pretrained(run / "final")("the red house", return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**encoded).logits.softmax(-1)[0]
    for target in (run, run / "final"):
        result = json.loads(printed(capsys, "predict", str(target), "--text", "the red house", "--json"))
        assert list(result["scores"].values()) == pytest.approx(expected.tolist(), abs=1e-5)
    own, other = (
        json.loads(printed(capsys, "eval", str(target), "--data", str(home / "single.jsonl"), "--json"))
        for target in (run, run / "final")
    )
    assert own["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert own["confusion"] == other["confusion"]


def test_several_labels_and_scores(home: Path, capsys: Captured) -> None:
    several = made(home, "several", "multiple")
    event = events_of(several, "eval")[-1]
    assert event.keys() >= {"accuracy", "macro_f1", "micro_f1"}
    assert data_of(several)["labels"] == ["blue", "green", "red"]
    result = json.loads(printed(capsys, "predict", str(several), "--text", "red house", "--json"))
    assert result["labels"] == [name for name, score in result["scores"].items() if score > 0.5]
    numbers = made(home, "numbers", "regression")
    assert events_of(numbers, "eval")[-1].keys() >= {"spearman", "pearson"}
    assert (data_of(numbers)["labels"], data_of(numbers)["label_kind"]) == ([], "regression")
    (note,) = [e["message"] for e in events_of(numbers, "warning") if "label_kind" in e["message"]]
    assert "numbers with fractions" in note
    for target in (numbers, numbers / "final"):
        assert json.loads(printed(capsys, "predict", str(target), "--text", "red", "--json")).keys() == {"score"}


@pytest.mark.parametrize(
    ("labels", "kind", "names"),
    [
        ([1, 0, "1", 1.0], "single", ["0", "1"]),
        ([True, False, True, False], "single", ["false", "true"]),
        (["10", "9", "2", "9"], "single", ["2", "9", "10"]),
        ([["b"], ["a", "b"], [], ["c"]], "multiple", ["a", "b", "c"]),
        (["3.5", "1", "2", "0"], "regression", []),
        (list(range(40)), "regression", []),
        (["nan", "inf", "3.5", "x"], "single", ["3.5", "inf", "nan", "x"]),
    ],
)
def test_the_kind_of_labels_is_found_in_the_data(
    tmp_path: Path, labels: list[Any], kind: str, names: list[str]
) -> None:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    own = {"data.dataset_name": path, "data.validation_name": path}
    config, _ = load_config(None, overrides(TINY, BERT, own))
    config, corpus = Classify.prepare(config, tmp_path, lambda *_: None)
    assert (config.data.label_kind, config.data.labels) == (kind, names)
    assert len(corpus.train) == len(labels)


def test_rare_labels_count_as_much_as_frequent_ones(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"text": f"red {n}", "label": "often"} for n in range(30)] + [{"text": "blue house", "label": "rarely"}] * 3
    path = write_rows(tmp_path / "rows.jsonl", rows)
    scores = []
    for weights in ("none", "balanced"):
        run = tmp_path / weights
        chosen = settings(path, data__class_weights=weights, data__validation_name=path, training__max_steps=12)
        assert cli(["train", *chosen, "--output-dir", str(run)]) == 0
        assert events_of(run, "eval")[-1]["matthews"] == 0, "all predictions are equal"
        result = json.loads(printed(capsys, "predict", str(run), "--text", "blue house", "--json"))
        scores.append(result["scores"]["rarely"])
    assert scores[1] > 1.5 * scores[0]
    expected = compute_class_weight("balanced", classes=np.array([0, 1]), y=np.array([0] * 30 + [1] * 3))
    targets = np.array([[0]] * 30 + [[1]] * 3)
    assert balanced_weights(targets, Labels("single", ("a", "b"))).tolist() == pytest.approx(expected.tolist())


# Behavior that every task guarantees


def test_a_resumed_adapter_is_that_of_the_run_that_was_not_interrupted(home: Path) -> None:
    straight = made(home, "straight", model__adapter="lora", model__lora_dropout=0.1)
    resumed = fork_snapshot(straight, "2", home / "resumed", pytest.fail)
    assert cli(["train", "--resume", "latest", "--output-dir", str(resumed), "-f", str(resumed / "config.yaml")]) == 0
    last = [{k: v for k, v in digests(run).items() if "step-000002" not in k} for run in (straight, resumed)]
    assert last[0] == last[1]
    steps = [[e for e in record(run) if e["event"] in ("step", "eval")] for run in (straight, resumed)]
    assert steps[0] == steps[1]


def test_a_plan_counts_padding_only_where_texts_are_padded(tmp_path: Path, capsys: Captured) -> None:
    texts = ["red " * 60, *("red house" for _ in range(63))]
    data = write_rows(tmp_path / "rows.jsonl", [{"text": text, "label": n % 2} for n, text in enumerate(texts)])

    def activations(architecture: str, pack: bool) -> int:
        chosen = settings(data, model__name_or_path=model_folder(architecture), data__pack_sequences=pack,
                          training__batch_size=32, data__validation_name=data)  # fmt: skip
        planned: int = json.loads(printed(capsys, "plan", *chosen, "--json"))["memory_bytes"]["activations"]
        return planned

    packed, padded = activations("bert", pack=True), activations("bert", pack=False)
    assert padded > 3 * packed, "the plan does not pad all 32 rows of a batch to the longest row"


def test_an_adapter_has_a_trained_head_and_merges_into_the_same_model(home: Path, tmp_path: Path) -> None:
    run = made(home, "lora", model__adapter="lora")
    with safe_open(run / "snapshots/step-000004/model.safetensors", "pt") as file:
        heads = {name for name in file.keys() if "lora_" not in name}  # noqa: SIM118  not a dict
    assert heads == {f"classifier.modules_to_save.default.{part}" for part in ("weight", "bias")}
    assert cli(["export", str(run), "--no-merge", "--output", str(tmp_path / "adapter")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    alone = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=2).eval()
    tokens = torch.arange(20)[None] * 23 % 1000
    with torch.no_grad():
        torch.testing.assert_close(alone(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_report_shows_the_confusion_matrix_and_each_label(home: Path) -> None:
    run = made(home, "exported")
    assert cli(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert '"type":"heatmap"' in page
    assert "Confusion matrix" in page
    assert "recall" in page
    assert "warm" in page


def test_a_model_is_planned_without_its_data(home: Path, capsys: Captured) -> None:
    chosen = settings(home / "missing.jsonl")
    plan = json.loads(printed(capsys, "plan", *chosen, "--json"))
    assert plan["parameters"] > 0


# Errors

BAD_ROWS = {
    '{"text": "red house"}': "has no column label",
    '{"text": "red house", "label": null}': "it has no label",
    '{"text": "red house", "label": {"a": 1}}': "its label is {'a': 1}",
    '{"text": "red house", "label": NaN}': "its label is nan",
    '{"text": "  ", "label": "warm"}': "its text is empty",
    '{"text": 5, "label": "warm"}': "contains a value of type int",
    '{"text": "red house", "text_pair": "", "label": "warm"}': "its text_pair is missing or empty",
    '["red house", "warm"]': "it is of type list",
    '{"text": "\\ud800", "label": "warm"}': "unpaired surrogate",
    "{": "is not valid JSON",
}


@pytest.mark.parametrize(("bad", "said"), BAD_ROWS.items())
def test_a_bad_row_is_named_or_skipped(home: Path, tmp_path: Path, bad: str, said: str, capsys: Captured) -> None:
    good = (home / "single.jsonl").read_text().splitlines()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*good[:2], bad, *good[2:]]) + "\n")
    chosen = settings(path, training__max_steps=1)
    capsys.readouterr()
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "failed")]) == 2
    message = sentence(capsys)
    assert "rows.jsonl, line 3" in message
    assert said in message
    assert "data.on_bad_row to skip" in message
    if bad == "{":
        assert cli(["train", *chosen, "--set", "data.on_bad_row=skip", "--output-dir", str(tmp_path / "run")]) == 0
        assert any("bad rows skipped: 1 of" in e["message"] for e in events_of(tmp_path / "run", "warning"))


def refusal(capsys: Captured, tmp_path: Path, path: Path, **changes: object) -> str:
    capsys.readouterr()
    assert cli(["train", *settings(path, **changes), "--output-dir", str(tmp_path / "refused")]) == 2
    return sentence(capsys)


def test_labels_that_cannot_be_learned_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"text": f"red {number}", "label": "one"} for number in range(5)]
    same = write_rows(tmp_path / "same.jsonl", rows)
    assert "same.jsonl has only one label, 'one', so there is nothing to learn" in refusal(capsys, tmp_path, same)
    other = write_rows(tmp_path / "other.jsonl", [*rows, {"text": "blue", "label": "two"}])
    held = write_rows(tmp_path / "held.jsonl", [rows[0], {"text": "green", "label": "three"}])
    said = refusal(capsys, tmp_path, other, data__validation_name=held)
    assert "held.jsonl, line 2: its label 'three' is not one of the 2 labels of the training data" in said
    said = refusal(capsys, tmp_path, other, data__label_kind="regression")
    assert "line 1: its label is 'one', not a number" in said
    said = refusal(capsys, tmp_path, home / "regression.jsonl", data__class_weights="balanced")
    assert "data.class_weights has no effect because data.label_kind is regression" in said
    said = refusal(capsys, tmp_path, home / "single.jsonl", data__label_kind="single", data__label_separator="|")
    assert "data.label_separator has no effect because data.label_kind is single" in said
    said = refusal(capsys, tmp_path, home / "multiple.jsonl", data__label_kind="single")
    assert "its label is a list, but data.label_kind is single" in said
    assert "only one label" not in said
    assert "set data.label_column" in refusal(capsys, tmp_path, other, data__label_column="class")
    empty = write_rows(tmp_path / "empty.jsonl", [])
    for part in ({"data__dataset_name": empty}, {"data__validation_name": empty}):
        said = refusal(capsys, tmp_path, other, **{"data__validation_name": other, **part})
        assert said.endswith("empty.jsonl has no usable rows; add some.")
    assert "set data.text_pair_column" in refusal(capsys, tmp_path, other, data__text_pair_column="second")


def test_long_texts_are_truncated_and_counted(home: Path, tmp_path: Path) -> None:
    rows = [{"text": "red house " * (200 if n < 2 else 2), "label": n % 2, "text_pair": "warm"} for n in range(8)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    chosen = settings(path, data__validation_name=path, training__max_steps=1)
    assert cli(["train", *chosen, "--output-dir", str(run)]) == 0
    said = [event["message"] for event in events_of(run, "warning")]
    assert any(
        "training data: 2 of 8 texts are truncated, because they are longer than 96 tokens" in message
        for message in said
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", " "], "--text must not be empty"),
        (["--text-pair", "red"], "pass one of --text, --text with --text-pair, "),
        (["--text", "red", "--question", "Who?"], "pass one of --text, --text with --text-pair, "),
        (["--text", "red", "--data", "rows.jsonl"], "pass one of --text, --text with --text-pair, "),
        (["--text", "red", "--null-answers"], "--null-answers has no effect"),
        (
            ["--question", "Who?", "--context", "You."],
            "pass --text or --text with --text-pair instead of --question with --context",
        ),
    ],
)
def test_predict_refuses_what_the_model_cannot_use(
    home: Path, arguments: list[str], said: str, capsys: Captured
) -> None:
    run = made(home, "exported")
    capsys.readouterr()
    assert cli(["predict", str(run), *arguments]) == 2
    assert said in sentence(capsys)


def test_a_run_without_vectors_is_refused_with_the_folder_that_has_some(home: Path, capsys: Captured) -> None:
    run = made(home, "exported")
    capsys.readouterr()
    assert cli(["search", str(run), str(home), "red"]) == 2
    assert sentence(capsys).endswith(f"this command needs one of task embed or static; pass its folder {run}/final.")
    assert cli(["train", *settings(home / "single.jsonl", model__name_or_path=run), "--dry-run"]) == 2
    assert sentence(capsys).endswith(f"it has no config.json; use {run}/final.")


def test_a_pair_of_flags_needs_no_names_of_columns(home: Path, tmp_path: Path, capsys: Captured) -> None:
    """--text and --text-pair work whatever the names of the training data's columns, and both are required."""
    rows = [{"query": f"red {n}", "passage": "old house", "label": n % 2} for n in range(12)]
    chosen = settings(write_rows(tmp_path / "rows.jsonl", rows), data__text_column="query",
                      data__text_pair_column="passage", training__max_steps=1)  # fmt: skip
    run = str(tmp_path / "run")
    assert cli(["train", *chosen, "--output-dir", run]) == 0
    result = json.loads(printed(capsys, "predict", run, "--text", "red", "--text-pair", "old", "--json"))
    given = write_rows(tmp_path / "given.jsonl", [{"query": "red", "passage": "old"}])
    assert result == json.loads(printed(capsys, "predict", run, "--data", str(given)))
    assert cli(["predict", run, "--text", "red"]) == 2
    assert sentence(capsys).endswith("task classify on pairs of texts; pass --text with --text-pair instead of --text.")


def test_an_evaluation_leaves_bad_rows_out_and_counts_them(home: Path, tmp_path: Path, capsys: Captured) -> None:
    """data.on_bad_row is a setting of training, so `eval`, which has no settings, must not ask for it."""
    good = [json.loads(line) for line in (home / "single.jsonl").read_text().splitlines()]
    rows = write_rows(tmp_path / "rows.jsonl", [*good, {"text": "red"}, {"text": "red", "label": "blue"}])
    run = str(made(home, "exported"))
    found = json.loads(printed(capsys, "eval", run, "--data", str(rows), "--json"))
    assert (found["rows"], found["skipped"]) == (len(good), 2)
    rows = write_rows(tmp_path / "none.jsonl", [{"title": "red", "label": "warm", "body": "old"}])
    assert cli(["eval", run, "--data", str(rows)]) == 2
    captured = capsys.readouterr()
    assert "none.jsonl has no examples to evaluate on;" in captured.err
    assert "bad rows skipped: 1 of " in captured.err
