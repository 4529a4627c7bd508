"""A run shows how many rows it trains on and holds out, and warns if too few are held out to measure anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from tests.processes import events_of, options, overrides
from tests.scale.test_tasks import TUNED, overrides_by_task
from tests.tasks.fine_tuned import TINY, Captured
from tests.tasks.folders import labeled_rows, model_folder

pytestmark = pytest.mark.usefixtures("home")
ROWS = {
    "graph": 24, "sft": 24, "tokens": 40, "classify": 48, "few_shot": 48, "preference": 24, "kto": 2 * 24, "qa": 2 * 8,
    "embed": 24, "grpo": 24,
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_task_with_rows_counts_those_it_holds_out(name: str, tmp_path: Path) -> None:
    own = overrides_by_task(tmp_path)[name]
    config, _ = load_config(None, overrides({"task": name}, TUNED, own))
    corpus = task_of(config).prepare(config, tmp_path / "cache", lambda *_: None)[1]
    said = re.fullmatch(
        r"(\d+) \w+ for training, (\d+) held out for validation \(data\.validation_split (.*)\), too few .*",
        corpus.split,
    )
    assert said
    assert int(said[1]) + int(said[2]) == ROWS[name]
    assert float(said[3]) == config.data.validation_split


def chosen(data: Path, run: Path, **changes: object) -> list[str]:
    own = {"task": "classify", "model.name_or_path": model_folder("bert"), "data.dataset_name": data}
    return ["train", *options(TINY, own, changes), "--output-dir", str(run)]


def test_few_rows_that_measure_little_are_shown_as_such(tmp_path: Path, capsys: Captured) -> None:
    data, run = labeled_rows(tmp_path / "rows.jsonl", count=32), tmp_path / "run"
    few = {"training.few_shot": "true", "training.max_steps": 2}
    assert cli(chosen(data, run, **few)) == 0
    said, (last, *_) = capsys.readouterr().out, reversed(events_of(run, "eval"))
    held = int(last["rows"])
    assert f"{32 - held} rows for training, {held} held out for validation (data.validation_split 0.1), too few" in said
    assert "or set data.validation_name to a validation dataset" in said
    low, high = last["accuracy_interval"]
    assert 0 <= low <= last["accuracy"] <= high <= 1
    assert high - low > 0.3
    assert f"accuracy {last['accuracy']:.1%} (95% interval {low:.1%} to {high:.1%})" in said


def test_enough_rows_have_no_interval_and_data_with_a_validation_part_is_not_split(
    tmp_path: Path, capsys: Captured
) -> None:
    data, run = labeled_rows(tmp_path / "rows.jsonl", count=400), tmp_path / "run"
    steps = {"training.max_steps": 1, "data.validation_split": 0.3}
    assert cli(chosen(data, run, **steps)) == 0
    assert re.search(r"^\d+ rows for training, 1\d\d held out for validation \(data\.validation_split 0\.3\)$",
                     capsys.readouterr().out, re.MULTILINE)  # fmt: skip
    assert "accuracy_interval" not in events_of(run, "eval")[-1]
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "a red house", "label": "warm"}) + "\n")
    other = {"training.max_steps": 1, "data.validation_name": tmp_path / "held.jsonl"}
    assert cli(chosen(data, tmp_path / "other", **other)) == 0
    assert "held out" not in capsys.readouterr().out
