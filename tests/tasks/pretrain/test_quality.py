"""A text classifier chooses the documents that a decoder is trained on."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import Config
from sansgpu.events.progress import ignore_progress
from sansgpu.tasks.configuration import as_config
from sansgpu.tasks.pretrain import quality
from sansgpu.tasks.pretrain.data import open_documents
from tests.data.test_sources import documents
from tests.processes import (
    digests,
    events_of,
    finish,
    kill_when,
    options,
    record,
    settings,
    start,
    train_once,
    write_rows,
)
from tests.tasks.fine_tuned import TINY, Captured, sentence
from tests.tasks.folders import labeled_rows, model_folder
from tests.tasks.folders import sentence as words

pytestmark = pytest.mark.usefixtures("home")
TEXTS = 60


def texts(count: int, seed: int, most: int = 20) -> list[str]:
    draw = random.Random(seed)
    return [f"{words(draw, draw.randint(1, most))} {number}" for number in range(count)]


def fill(home: Path) -> None:
    """Trains classifiers, and writes corpora with documents of different lengths and without text."""
    for kind in ("single", "regression"):
        labeled_rows(home / f"{kind}.jsonl", kind)
        data = {
            "task": "classify",
            "model.name_or_path": model_folder("bert"),
            "data.dataset_name": home / f"{kind}.jsonl",
        }
        steps = {
            "training.max_steps": 20,
            "training.batch_size": 8,
            "training.eval_steps": 20,
            "training.save_steps": 20,
        }
        train_once(home / kind, options(TINY, data, steps))
    mixed = [*texts(TEXTS, 1), " \n", *texts(3, 2, most=2000), "a"]
    write_rows(home / "corpus.jsonl", ({"text": text} for text in mixed))
    write_rows(home / "many.jsonl", ({"text": text} for text in texts(5000, 3)))


def configured(home: Path, name: str = "corpus.jsonl", **data: object) -> Config:
    chosen = {"dataset_name": str(home / name), "quality_model": str(home / "single"), "quality_label": "warm"}
    return as_config({"data": {**chosen, **data}})


def cleaned(config: Config, cache: Path) -> tuple[list[str], list[str]]:
    sources, notes = open_documents(config, cache, ignore_progress)
    return documents(sources.train), notes


def predicted(home: Path, capsys: Captured, model: str) -> list[dict[str, object]]:
    """Returns what `sansgpu predict` says of the documents with text."""
    rows = [
        row for line in (home / "corpus.jsonl").read_text().splitlines() if (row := json.loads(line))["text"].strip()
    ]
    capsys.readouterr()
    assert cli(["predict", str(home / model), "--data", str(write_rows(home / "rows.jsonl", rows))]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [{**row, **result} for row, result in zip(rows, found, strict=True)]


@pytest.mark.parametrize("share", [pytest.param(0.001, marks=pytest.mark.long), 0.3, 0.98])
def test_the_best_documents_stay_in_their_order(home: Path, tmp_path: Path, capsys: Captured, share: float) -> None:
    rows = predicted(home, capsys, "single")
    kept, notes = cleaned(configured(home, quality_share=share), tmp_path / "cache")
    scores = {row["text"]: row["scores"]["warm"] for row in rows}  # type: ignore[index]
    lowest = min(scores[text] for text in kept)
    assert kept == [text for text in scores if scores[text] >= lowest]
    assert len(kept) == {0.001: 1, 0.3: 20, 0.98: TEXTS + 4}[share]  # one document of all TEXTS + 5 has no text
    shown = f'data.quality_model: {len(kept)} of 65 documents kept, whose probability of "warm" is {lowest:.4g} or more'
    assert notes == [shown]


def test_the_number_of_a_regression_is_a_score(home: Path, tmp_path: Path, capsys: Captured) -> None:
    scores = {row["text"]: row["score"] for row in predicted(home, capsys, "regression")}
    config = configured(home, quality_model=str(home / "regression"), quality_label=None)
    kept, notes = cleaned(config, tmp_path / "cache")
    best = sorted(scores, key=lambda text: -float(scores[text]))[:33]  # type: ignore[arg-type]
    assert kept == [text for text in scores if text in best]
    assert "33 of 65 documents kept, whose score is" in notes[0]


def test_scores_are_cached_for_a_text_a_model_and_a_label(home: Path, tmp_path: Path) -> None:
    def count(**data: object) -> int:
        cleaned(configured(home, **data), tmp_path / "cache")
        return len([path for path in (tmp_path / "cache/scores").iterdir() if path.is_dir()])

    assert count() == 1
    assert count(quality_share=0.2) == 1
    moved = shutil.copytree(home / "single", tmp_path / "moved")
    assert count(quality_model=str(moved)) == 1
    assert count(quality_label="cold") == 2
    assert count(max_gb=1e-6) == 3
    assert count(quality_model=str(home / "regression"), quality_label=None) == 4
    assert count(quality_model=str(home / "single/final")) == 5  # final/ does not record the run's data.max_length


@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.long), 7, pytest.param(1000, marks=pytest.mark.long)]
)
def test_documents_are_scored_in_parts(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    expected = cleaned(configured(home), tmp_path / "cache")[0]
    monkeypatch.setattr(quality, "SAVED_DOCUMENTS", size)
    assert cleaned(configured(home), tmp_path / f"cache of {size}")[0] == expected


def test_one_document_and_documents_without_text(home: Path, tmp_path: Path) -> None:
    for number, (given, expected) in enumerate(((["red"], ["red"]), ([" ", "\n"], [" "]), (["red"] * 5, ["red"] * 3))):
        write_rows(home / f"{number}.jsonl", ({"text": text} for text in given))
        assert cleaned(configured(home, f"{number}.jsonl"), tmp_path / "cache")[0] == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"quality_model": "nowhere"}, "nowhere is not a folder; set data.quality_model to a finished run of task"),
        (
            {"quality_model": "bert"},
            " is not a text classifier; set data.quality_model to a finished run of task classify",
        ),
        ({"quality_model": "decoder"}, "decoder is not a text classifier"),
        ({"quality_model": "unfinished"}, "unfinished is a run that has not finished, so it has no final/"),
        ({"quality_label": "good"}, 'data.quality_label is "good", but must be a label of'),
        ({"quality_label": "null"}, "single: cold, warm."),
        ({"quality_model": "regression"}, "regression predicts a number and has no labels; remove data.quality_label."),
        (
            {"quality_model": "null"},
            "data.quality_label has no effect because data.quality_model is not set; remove it",
        ),
        ({"quality_share": 1}, "data.quality_share is 1, but input should be less than 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(
    home: Path, tmp_path: Path, capsys: Captured, data: dict[str, object], message: str
) -> None:
    (home / "unfinished").mkdir(exist_ok=True)
    (home / "unfinished/config.yaml").write_text("task: classify\n")
    train_once(home / "decoder", settings(data__dataset_name=home / "many.jsonl", training__max_steps=2))
    paths = {"bert": model_folder("bert"), "null": "null"}
    given = {"quality_model": "single", "quality_label": "warm", **data}
    given["quality_model"] = paths.get(str(given["quality_model"]), home / str(given["quality_model"]))
    given["dataset_name"] = home / "many.jsonl"
    capsys.readouterr()
    changes = {f"data__{key}": value for key, value in given.items()}
    assert cli(["train", *settings(**changes), "--output-dir", str(tmp_path / "run")]) == 2
    assert message in sentence(capsys)


def arguments(home: Path, run: Path, *more: str) -> list[str]:
    data = {
        "data__dataset_name": home / "many.jsonl",
        "data__quality_model": home / "single",
        "data__quality_label": "warm",
    }
    return [
        "train",
        *settings(**data, data__deduplicate="near", training__max_steps=8),
        "--output-dir",
        str(run),
        *more,
    ]


def outcome(run: Path) -> tuple[dict[str, str], list[dict[str, object]]]:
    return {name: digest for name, digest in digests(run).items() if "000008" in name or "final" in name}, record(run)


@pytest.mark.long
def test_a_run_that_is_killed_while_scoring_or_training_ends_the_same(home: Path, tmp_path: Path) -> None:
    """Neither does it matter whether the scores come from the cache."""
    straight, killed, again = (tmp_path / name for name in ("straight", "killed", "again"))
    code, _, error = finish(arguments(home, straight), tmp_path / "cache")
    assert code == 0, error
    other = tmp_path / "other cache"
    first_part = "scores/*.parts/000002.npy"
    assert kill_when(start(arguments(home, killed), other), lambda: bool([*other.glob(first_part)])) == -9
    assert [*other.glob(first_part)]
    assert not [*other.glob("scores/*/documents.npy")]
    training = start(arguments(home, killed), other)
    assert kill_when(training, (killed / "snapshots/step-000004/MANIFEST.json").exists) == -9
    code, _, error = finish(arguments(home, killed, "--resume"), other)
    assert code == 0, error
    assert not [*other.glob("scores/*.parts")]
    code, out, error = finish(arguments(home, again), other)
    assert code == 0, error
    assert outcome(straight) == outcome(killed) == outcome(again)
    cleaning = events_of(again, "start")[0]["cleaning"]
    assert [line.split(":")[0] for line in cleaning] == ["data.deduplicate near", "data.quality_model"]
    assert all(line in out for line in cleaning)
