"""Runs that tag words learn, resume, export and predict; errors are one sentence with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seqeval.metrics import precision_score, recall_score
from seqeval.metrics.sequence_labeling import get_entities
from transformers import AutoModelForTokenClassification, AutoTokenizer

from sansgpu.cli import run as cli
from sansgpu.jobs.snapshots import fork_snapshot
from sansgpu.train.loading import ModelRequest, open_model
from tests.processes import digests, events_of, json_lines, json_of, write_rows
from tests.tasks.fine_tuned import Captured, made, sentence, settings
from tests.tasks.folders import conll, model_folder

pytestmark = pytest.mark.usefixtures("home")

LABELS = ["O", "B-person", "I-person", "B-place", "I-place"]
ADAPTED = {"model__adapter": "lora", "training__learning_rate": 0.01}
LEARNING = {
    "training__max_steps": 40, "training__batch_size": 8, "training__gradient_accumulation_steps": 1,
    "training__learning_rate": 0.005, "training__save_steps": 40, "training__eval_steps": 40,
}  # fmt: skip
LONG = " ".join(["red", "Ada", "Zoe", "green", "Rome", "fast", "slow"] * 30)  # fills several windows


def fill(home: Path) -> None:
    conll(home / "tags.conll")
    conll(home / "held.conll", sentences=12, seed=5)


def learned(home: Path, **changes: object) -> Path:
    """Returns a run that has learned to find the entities; it is trained once per set of changes."""
    chosen = {**LEARNING, "data__max_length": 128, "data__validation_name": home / "held.conll", **changes}
    return made(home, "learned" + "-".join(map(str, changes.values())).replace("/", ""), "tokens", **chosen)


def predicted(capsys: Captured, target: Path, rows: list[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    write_rows(folder / "rows.jsonl", rows)
    command = ["predict", str(target), "--data", str(folder / "rows.jsonl"), "--output", str(folder / "out.jsonl")]
    (folder / "out.jsonl").unlink(missing_ok=True)
    assert cli(command) == 0, capsys.readouterr().err
    return [line["spans"] for line in json_lines(folder / "out.jsonl")]


def test_a_run_learns_to_find_entities(home: Path, capsys: Captured) -> None:
    run = learned(home)
    last = events_of(run, "eval")[-1]
    assert last["entity_f1"] > 0.8
    assert last["accuracy"] > 0.9
    assert set(last["by_label"]) == {"person", "place"}
    own, other = json_of(capsys, "eval", run), json_of(capsys, "eval", run, "--data", str(home / "held.conll"))
    for found in (own, other):
        assert found["loss"] == pytest.approx(last["loss"], rel=1e-5)
        assert {key: found[key] for key in last if key.startswith("entity")} == {
            key: last[key] for key in last if key.startswith("entity")
        }
        assert found["skipped"] == 0
    assert "entity F1" in (run / "final/README.md").read_text()
    assert "<th>person</th>" in (run / "report.html").read_text()


def test_the_exported_model_has_the_labels_and_equal_logits(home: Path, capsys: Captured) -> None:
    run = learned(home)
    theirs = AutoModelForTokenClassification.from_pretrained(run / "final")
    assert list(theirs.config.id2label.values()) == LABELS
    ours = open_model(ModelRequest(str(run)), "evaluate", pytest.fail).objective.model
    tokens = torch.arange(40).reshape(2, 20) * 23 % 1000
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, ours(tokens).logits, rtol=1e-4, atol=1e-4)
    held = ("--data", str(home / "held.conll"))
    assert json_of(capsys, "eval", run / "final", *held)["loss"] == pytest.approx(
        json_of(capsys, "eval", run, *held)["loss"], rel=1e-4
    )


def tags_of(folder: Path, words: list[str]) -> tuple[list[str], np.ndarray]:
    """Returns the tags of words and their probabilities with transformers, like run_ner.py."""
    model, tokenizer = (
        AutoModelForTokenClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    encoded = tokenizer(" ".join(words), return_tensors="pt", return_offsets_mapping=True)
    ends = np.cumsum([len(word) + 1 for word in words])
    owner = np.searchsorted(ends - 1, encoded.pop("offset_mapping")[0, 1:-1, 0].numpy(), side="right")
    with torch.no_grad():
        logits = model(**encoded).logits[0, 1:-1]
    firsts = [int(np.flatnonzero(owner == number)[0]) for number in range(len(words))]
    probabilities, labels = logits[firsts].softmax(dim=1).max(dim=1)
    return [model.config.id2label[number] for number in labels.tolist()], probabilities.numpy()


def test_predictions_are_those_of_transformers(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, words = learned(home), ["red", "Ada", "Zoe", "green", "Riga", "fast", "Amy", "Zed", "warm"]
    row, by_text = predicted(capsys, run, [{"tokens": words}, {"text": " ".join(words)}], tmp_path)
    tags, probabilities = tags_of(run / "final", words)
    expected = [(label, first, last + 1) for label, first, last in get_entities(tags)]
    assert len(expected) >= 2
    assert [(span["label"], span["token_start"], span["token_end"]) for span in row] == expected
    for span, plain, (_, first, stop) in zip(row, by_text, expected, strict=True):
        assert span["text"] == " ".join(words)[span["start"] : span["end"]] == " ".join(words[first:stop])
        assert span["score"] == pytest.approx(float(probabilities[first:stop].mean()), abs=1e-4)
        assert plain == {key: pytest.approx(value) for key, value in span.items() if not key.startswith("token")}


def test_no_entity_of_a_long_text_is_lost(home: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"text": LONG}, {"text": "red"}, {"text": "🎉 — \u200b 世界"}]
    spans = predicted(capsys, learned(home), rows, tmp_path)[0]
    found = {(span["label"], span["start"]) for span in spans}
    expected = {("person", 4 + at) for at in range(0, 33 * 30, 33)} | {
        ("place", 18 + at) for at in range(0, 33 * 30, 33)
    }
    assert len(expected) == 60
    assert len(found & expected) >= 57
    assert len({span["start"] for span in spans}) == len(spans)


@pytest.mark.parametrize(
    "architecture", ["qwen2", *(pytest.param(a, marks=pytest.mark.long) for a in ("roberta", "modernbert"))]
)
def test_other_models_learn_and_predict(home: Path, tmp_path: Path, architecture: str, capsys: Captured) -> None:
    """Qwen2 is a decoder: its tokens attend only to earlier ones."""
    run = learned(home, model__name_or_path=model_folder(architecture))
    assert events_of(run, "eval")[-1]["entity_f1"] > 0.5
    whole, alone = (predicted(capsys, run, [{"text": "red Ada Zoe"}] * count, tmp_path)[0] for count in (9, 1))
    assert whole == [{key: pytest.approx(value, abs=1e-4) for key, value in span.items()} for span in alone]


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(home: Path, adapter: str) -> None:
    chosen = {"data__validation_split": 0.2, **(ADAPTED if adapter == "lora" else {})}
    straight = made(home, f"straight-{adapter}", "tokens", **chosen)
    resumed = fork_snapshot(straight, "2", home / f"resumed-{adapter}", pytest.fail)
    assert cli(["train", "--resume", "--output-dir", str(resumed)]) == 0
    last = [{k: v for k, v in digests(run).items() if "step-000002" not in k} for run in (straight, resumed)]
    assert last[0] == last[1]
    assert [e["loss"] for e in events_of(straight, "step")] == [e["loss"] for e in events_of(resumed, "step")]


def test_a_resume_keeps_the_recorded_labels(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "tags.conll"
    conll(data)
    run = tmp_path / "run"
    chosen = settings(home, "tokens", data__dataset_name=data)
    assert cli(["train", *chosen, "--output-dir", str(run)]) == 0
    data.write_text(data.read_text().replace("I-person", "B-place"))
    more = ["--set", "training.max_steps=6", "--output-dir", str(run)]
    assert cli(["train", *chosen, *more, "--resume"]) == 0
    assert list(AutoModelForTokenClassification.from_pretrained(run / "final").config.id2label.values()) == LABELS


def test_an_adapter_is_exported_with_its_head(home: Path, capsys: Captured) -> None:
    run = learned(home, model__adapter="lora", training__learning_rate=0.01)
    assert events_of(run, "eval")[-1]["entity_f1"] > 0.3
    held = ("--data", str(home / "held.conll"))
    ours, theirs = (json_of(capsys, "eval", target, *held) for target in (run, run / "final"))
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-3)


def test_plain_tags_are_units_by_themselves(home: Path, tmp_path: Path, capsys: Captured) -> None:
    tagged = tmp_path / "pos.conll"
    tags = {"B-person": "NOUN", "I-person": "NOUN", "B-place": "NOUN", "O": "ADJ"}
    lines = (line.split() for line in (home / "tags.conll").read_text().split("\n"))
    tagged.write_text("\n".join(f"{line[0]} {tags[line[1]]}" if line else "" for line in lines))
    chosen = settings(home, "tokens", data__dataset_name=tagged, data__validation_name=tagged, **LEARNING)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 0
    last = events_of(tmp_path / "run", "eval")[-1]
    assert last["accuracy"] == last["entity_f1"] == last["entity_recall"] > 0.7
    (spans,) = predicted(capsys, tmp_path / "run", [{"text": "red Ada Zed"}], tmp_path)
    assert [span["text"] for span in spans] == ["red", "Ada", "Zed"]
    assert {span["label"] for span in spans} == {"ADJ", "NOUN"}


def test_other_schemes_are_converted_with_a_note(home: Path, tmp_path: Path, capsys: Captured) -> None:
    bioes = (home / "tags.conll").read_text().replace("I-person", "E-person").replace("B-place", "S-place")
    (tmp_path / "tags.conll").write_text(bioes)
    chosen = settings(home, "tokens", data__dataset_name=tmp_path / "tags.conll", training__max_steps=1)
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run"), "--headless"]) == 0
    assert "training texts: the tags are BIOES and were converted to IOB2" in capsys.readouterr().out
    assert (
        list(AutoModelForTokenClassification.from_pretrained(tmp_path / "run/final").config.id2label.values()) == LABELS
    )


def test_scores_are_those_of_seqeval_on_the_predictions(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run = made(home, "brief", "tokens", data__validation_name=home / "held.conll", training__max_steps=12)
    sentences = [
        [line.split() for line in block.splitlines()]
        for block in (home / "held.conll").read_text().strip().split("\n\n")
    ]
    rows = [{"tokens": [word for word, _ in block]} for block in sentences]
    found = []
    for block, spans in zip(sentences, predicted(capsys, run, rows, tmp_path), strict=True):
        tags = ["O"] * len(block)
        for span in spans:
            first, stop = span["token_start"], span["token_end"]
            tags[first:stop] = [f"B-{span['label']}", *[f"I-{span['label']}"] * (stop - first - 1)]
        found.append(tags)
    gold = [[tag for _, tag in block] for block in sentences]
    scored = json_of(capsys, "eval", run)
    assert scored["entity_precision"] == pytest.approx(precision_score(gold, found))
    assert scored["entity_recall"] == pytest.approx(recall_score(gold, found))


def test_a_plan_needs_no_data(home: Path, capsys: Captured) -> None:
    chosen = settings(home, "tokens")
    assert cli(["plan", *chosen, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    missing = ["--set", f"data.dataset_name={home}/missing.conll", "--set", "data.max_length=96"]
    assert cli(["plan", *chosen, *missing, "--json"]) == 0
    unknown = json.loads(capsys.readouterr().out)
    assert 0 < known["parameters"] - unknown["parameters"] < 1000  # the head has five labels instead of two
    assert unknown["memory_bytes"]["logits"] < 1 << 20


# Errors

BAD = {
    "York\n": "line 1 has 1 column, so there is no tag in column -1",
    "York person\n": "line 1: its tag 'person' is neither O nor starts with B-",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_named_or_skipped(home: Path, tmp_path: Path, bad: str, capsys: Captured) -> None:
    data = tmp_path / "bad.conll"
    data.write_text(f"{bad}\n{(home / 'tags.conll').read_text()}")
    chosen = settings(home, "tokens", data__dataset_name=data, training__max_steps=1)
    capsys.readouterr()
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 2
    assert f"bad.conll, {BAD[bad]}" in sentence(capsys)
    skipping = [*chosen, "--set", "data.on_bad_row=skip"]
    assert cli(["train", *skipping, "--output-dir", str(tmp_path / "run"), "--headless"]) == 0
    printed = capsys.readouterr().out
    assert "training texts: bad rows skipped: 1 of " in printed
    assert f"the first: {data}, {BAD[bad]}" in printed


def test_an_unknown_tag_of_the_validation_data_is_named(home: Path, tmp_path: Path, capsys: Captured) -> None:
    data = tmp_path / "held.conll"
    data.write_text("red O\n\nold B-thing\n")
    words = "held.conll, line 3: its tag 'B-thing' is not one of the model's labels (O, B-person, I-person"
    capsys.readouterr()
    assert (
        cli(["train", *settings(home, "tokens", data__validation_name=data), "--output-dir", str(tmp_path / "r")]) == 2
    )
    assert words in sentence(capsys)
    assert cli(["eval", str(learned(home)), "--data", str(data), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["skipped"] == 1
    assert "bad rows skipped: 1 of " in captured.err
    assert f"; the first: {tmp_path}/{words}" in captured.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("red O\n\nblue O\n", "every word has the tag 'O', so there is nothing to learn"),
        ("red B-x\n", "has 1 usable text, too few distinct ones to hold some out for validation"),
        ("", "has no usable texts; add some."),
    ],
)
def test_too_little_data_is_refused(home: Path, tmp_path: Path, content: str, words: str, capsys: Captured) -> None:
    (tmp_path / "few.conll").write_text(content)
    chosen = settings(home, "tokens", data__dataset_name=tmp_path / "few.conll")
    capsys.readouterr()
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 2
    said = sentence(capsys)
    assert "few.conll" in said
    assert words in said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": " "}, "rows.jsonl, line 2: it has no text"),
        ({"tokens": ["a", ""]}, "rows.jsonl, line 2: token 1 is empty"),
        ({"words": 1}, "rows.jsonl, line 2: it has"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_named(
    home: Path, tmp_path: Path, row: dict[str, Any], words: str, capsys: Captured
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "red"}) + "\n" + json.dumps(row))
    run = learned(home)
    capsys.readouterr()
    assert cli(["predict", str(run), "--data", str(tmp_path / "rows.jsonl")]) == 2
    assert words in sentence(capsys)


def test_a_single_text_is_answered_with_a_line_per_span(home: Path, capsys: Captured) -> None:
    run = learned(home)
    capsys.readouterr()
    assert cli(["predict", str(run), "--text", "red Rome blue"]) == 0
    assert capsys.readouterr().out.startswith("4-8  place  Rome  (")


def test_evaluations_and_predictions_read_the_same_forms(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, text = learned(home), "red Ada Zoe green Rome"
    spans = [[4, 11, "person"], [18, 22, "place"]]
    studio = [{"value": {"start": start, "end": end, "labels": [label]}} for start, end, label in spans]
    forms: dict[str, Any] = {
        "doccano": [{"text": text, "label": spans}],
        "spacy": [[text, {"entities": spans}]],
        "studio": [{"data": {"text": text}, "annotations": [{"result": studio}]}],
        "gliner": [{"tokenized_text": text.split(), "ner": [[1, 2, "person"], [4, 4, "place"]]}],
        "emoji": [{"text": f"😀 {text}", "spans": [{"start": s + 3, "end": e + 3, "label": n} for s, e, n in spans]}],
    }
    by_form = {}
    for name, rows in forms.items():
        path, output = tmp_path / f"{name}.json", tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps(rows))
        found = json_of(capsys, "eval", run, "--data", str(path))
        assert found["skipped"] == 0
        assert sum(scores["count"] for scores in found["by_label"].values()) == 2
        assert cli(["predict", str(run), "--data", str(path), "--output", str(output)]) == 0
        by_form[name] = [(span["text"], span["label"]) for span in json_lines(output)[0]["spans"]]
    assert len(by_form.pop("emoji")) >= 1
    assert [*by_form.values()] == [by_form["doccano"]] * 4
    assert "token_start" in json_lines(tmp_path / "gliner.jsonl")[0]["spans"][0]
    capsys.readouterr()
    assert cli(["eval", str(run), "--data", str(tmp_path / "emoji.json"), "--json"]) == 0
    assert "emoji.json: the offsets of spans count UTF-16 units: so 2 of 2 fit" in capsys.readouterr().err


def test_repeated_labels_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    chosen = settings(home, "tokens", data__labels='["O", "B-x", "O"]')
    assert cli(["train", *chosen, "--output-dir", str(tmp_path / "run")]) == 2
    assert "data.labels needs at least two distinct tags" in sentence(capsys)
