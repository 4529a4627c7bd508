"""Texts are classified from folders of labels and from tables, and lines of a text file are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from sansgpu.cli import run as cli
from tests.processes import options
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import labeled_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")
RUN = {"task": "classify", "training.max_steps": 2, "training.eval_steps": 2, "training.save_steps": 2}


def trained(data: Path, run: Path, **changes: object) -> list[str]:
    own = {"model.name_or_path": model_folder("bert"), "data.dataset_name": data}
    return ["train", *options(TINY, RUN, own, changes), "--output-dir", str(run)]


def predictions(capsys: Captured, run: Path, data: Path) -> list[str]:
    capsys.readouterr()
    assert cli(["predict", str(run), "--data", str(data)]) == 0, capsys.readouterr().err
    return [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]


def texts(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(row["text"], row["label"]) for row in rows]


def test_a_folder_per_label_is_learned_and_predicted(tmp_path: Path, capsys: Captured) -> None:
    rows, run = texts(labeled_rows(tmp_path / "rows.jsonl", "single")), tmp_path / "run"
    for number, (text, label) in enumerate(rows):
        file = tmp_path / "data" / ("train" if number % 4 else "dev") / label / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert cli(trained(tmp_path / "data", run)) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["labels"] == ["cold", "warm"]
    assert cli(["eval", str(run), "--data", str(tmp_path / "data/dev"), "--json"]) == 0
    (tmp_path / "lines.txt").write_text("".join(f"{text}\n\n" for text, _ in rows), encoding="utf-8")
    assert predictions(capsys, run, tmp_path / "lines.txt") == predictions(capsys, run, tmp_path / "rows.jsonl")
    (tmp_path / "data/train/warm/bad.txt").write_bytes(b"one\n\xff\n")
    assert cli(trained(tmp_path / "data", tmp_path / "bad")) == 2
    assert "train/warm/bad.txt, line 2 is not UTF-8 text" in sentence(capsys)
    (tmp_path / "data/train/warm/bad.txt").write_text(" ")
    assert cli(trained(tmp_path / "data", tmp_path / "bad")) == 2
    assert "train/warm/bad.txt" in sentence(capsys)


def test_a_table_without_a_header_is_learned_and_predicted(tmp_path: Path, capsys: Captured) -> None:
    rows, run = texts(labeled_rows(tmp_path / "rows.jsonl", "single")), tmp_path / "run"
    table = tmp_path / "rows.tsv"
    table.write_text("".join(f"id\t{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    columns = {"data__text_column": 1, "data__label_column": -1}
    assert cli(trained(table, run, **columns)) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["labels"] == ["cold", "warm"]
    assert len(predictions(capsys, run, table)) == len(rows)
    table.write_text("id\ttext\twarm\nid\t \twarm\n", encoding="utf-8")
    assert cli(["predict", str(run), "--data", str(table)]) == 2
    assert "rows.tsv, line 2" in sentence(capsys)


def test_a_table_of_texts_and_labels_needs_no_header_and_no_numbers(tmp_path: Path, capsys: Captured) -> None:
    rows, run = texts(labeled_rows(tmp_path / "rows.jsonl", "single")), tmp_path / "run"
    rows.sort(key=lambda row: len(row[0].split()) < 2)  # a single word could be the name of a column
    table, headed = tmp_path / "rows.tsv", tmp_path / "headed.tsv"
    table.write_text("".join(f"{text}\t{label}\n" for text, label in rows), encoding="utf-8")
    headed.write_text("text\tlabel\n" + table.read_text(), encoding="utf-8")
    assert cli(trained(table, run)) == 0
    said = "".join(capsys.readouterr())
    assert (
        f"{table}: its first line looks like data, so the file is read without a header: text = column 0, label = "
        "column 1, 2 labels." in said
    )
    data = yaml.safe_load((run / "config.yaml").read_text())["data"]
    assert (data["text_column"], data["label_column"], data["labels"]) == (0, 1, ["cold", "warm"])
    assert len(predictions(capsys, run, table)) == len(rows)
    assert cli([*trained(table, run, training__max_steps=4), "--resume"]) == 0
    assert cli(trained(headed, tmp_path / "named")) == 0
    assert cli(["eval", str(tmp_path / "named"), "--data", str(table)]) == 0
    assert f"{table}: its first line looks like data" in capsys.readouterr().err
    for command in ("eval", "predict"):
        assert cli([command, str(run), "--data", str(headed)]) == 2
        assert f"{headed}: its first line is a header with the column label" in sentence(capsys)
