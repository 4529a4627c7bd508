"""`sansgpu eval --mteb` gives the scores of mteb's own backend; errors are one sentence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mteb")
from mteb import evaluate
from sentence_transformers import SentenceTransformer

from sansgpu.cli import run as cli
from sansgpu.jobs.mteb import open_tasks, quiet
from tests.processes import options, train_once, write_rows
from tests.tasks.fine_tuned import TINY, Captured
from tests.tasks.fine_tuned import sentence as message
from tests.tasks.folders import WORDS, model_folder, sentence
from tests.tasks.texts import text_rows

pytestmark = pytest.mark.usefixtures("home")

RETRIEVAL = """---
configs:
- {config_name: corpus, data_files: [{split: test, path: corpus.jsonl}]}
- {config_name: queries, data_files: [{split: test, path: queries.jsonl}]}
- {config_name: qrels, data_files: [{split: test, path: qrels.jsonl}]}
---
"""


def fill(home: Path) -> None:
    """Writes training pairs, and a local task of each type."""
    draw = random.Random(0)
    text_rows(home / "pairs.jsonl", "pairs")

    def texts(count: int) -> Iterator[str]:
        return (f"{sentence(draw, 6)} {number}" for number in range(count))

    pairs = list(zip(texts(30), texts(30), strict=True))
    tasks: dict[str, dict[str, list[dict[str, Any]]]] = {
        "STS": {"test": [{"sentence1": a, "sentence2": b, "score": draw.random()} for a, b in pairs]},
        "Classification": {
            split: [{"text": f"{WORDS[n % 2]} {text}", "label": n % 2} for n, text in enumerate(texts(40))]
            for split in ("train", "test")
        },
        "PairClassification": {
            "test": [{"sentence1": a, "sentence2": b, "labels": n % 2} for n, (a, b) in enumerate(pairs)]
        },
        "Clustering": {"test": [{"sentences": list(texts(40)), "labels": [str(n % 4) for n in range(40)]}]},
        "Retrieval": {
            "corpus": [{"id": f"d{n}", "title": "", "text": text} for n, text in enumerate(texts(20))],
            "queries": [{"id": f"q{n}", "text": text} for n, text in enumerate(texts(5))],
            "qrels": [{"query-id": f"q{n}", "corpus-id": f"d{n}", "score": 1} for n in range(5)],
        },
    }  # fmt: skip
    for kind, files in tasks.items():
        folder = home / kind
        folder.mkdir()
        (folder / "task.yaml").write_text(f"type: {kind}\nname: Local{kind}\n")
        for name, rows in files.items():
            write_rows(folder / f"{name}.jsonl", rows)
    (home / "Retrieval/README.md").write_text(RETRIEVAL)


def made(home: Path, task: str) -> Path:
    own = {"task": task, "data.dataset_name": home / "pairs.jsonl", "data.validation_split": 0.2}
    more = {"data.vocab_size": 300} if task == "static" else {"model.name_or_path": model_folder("bert")}
    return train_once(home / task, options(TINY, own, more, {"training.max_steps": 2}))


@pytest.mark.parametrize("task", ["static", "embed"])
def test_the_scores_are_those_of_mteb_with_sentence_transformers(
    home: Path, task: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / "cache"))
    run = made(home, task)
    prompts = {"query": "red: ", "document": "old house: ", "STS": "new: "}
    settings = run / "final/config_sentence_transformers.json"
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": None}))
    kinds = ("STS", "Classification", "PairClassification", "Clustering", "Retrieval")
    names = ",".join(str(home / kind) for kind in kinds)
    precision = [] if task == "static" else ["--precision", "fp32"]
    capsys.readouterr()
    assert cli(["eval", str(run / "final"), "--mteb", names, *precision, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with quiet():
        theirs = SentenceTransformer(str(run / "final"), device="cpu")
        expected = evaluate(theirs, open_tasks(names), cache=None, show_progress_bar=False, co2_tracker=False)
    scores = {result.task_name: result.get_score() for result in expected.task_results}
    assert {row["name"]: row["main_score"] for row in found["tasks"]} == pytest.approx(scores, abs=1e-3)
    assert found["mean_main_score"] == pytest.approx(sum(scores.values()) / len(scores), abs=1e-3)
    assert not (run / "final/mteb").exists()


def test_the_files_of_mteb_are_written_to_the_run(home: Path, capsys: Captured) -> None:
    run = made(home, "static")
    capsys.readouterr()
    assert cli(["eval", str(run), "--mteb", str(home / "STS")]) == 0
    printed = capsys.readouterr().out
    (file,) = run.glob("mteb/results/*/step-000002/LocalSTS.json")
    score = json.loads(file.read_text())["scores"]["test"][0]["main_score"]
    assert f"LocalSTS  STS   cosine_spearman  {score:.4f}" in " ".join(printed.split("\n"))


DESCRIPTIONS = {
    "type: Summary": 'type is "Summary", but must be one of STS, Classification',
    "typ: STS": 'unknown key "typ" (did you mean type?)',
    "type: STS\neval_langs: [klingon]": "klingon",
    "type: STS\neval_splits: 3": "eval_splits is 3, but input should be a valid list",
    "type: STS\neval_splits: [dev]": "its data do not fit the task",
    "type: Classification": "its data do not fit the task",
    "- STS": "contains a value of type list instead of keys and values",
}


@pytest.mark.parametrize("text", DESCRIPTIONS)
def test_a_bad_description_is_one_sentence(home: Path, tmp_path: Path, text: str, capsys: Captured) -> None:
    run = made(home, "static")
    (tmp_path / "task.yaml").write_text(text)
    write_rows(tmp_path / "test.jsonl", [{"sentence1": "red", "sentence2": "old", "score": 1.0}] * 3)
    capsys.readouterr()
    assert cli(["eval", str(run), "--mteb", str(tmp_path)]) == 2
    assert DESCRIPTIONS[text] in message(capsys)


def test_arguments_that_do_not_fit_are_one_sentence(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run = made(home, "static")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/task.yaml").write_text("type: STS")
    (tmp_path / "torn/test.jsonl").write_text('{"sentence1": ')
    (tmp_path / "empty").mkdir()
    for names, said in (
        (str(tmp_path / "empty"), "has no task.yaml; add one with `type: STS` or another type of task."),
        (str(tmp_path / "torn"), "--mteb torn: its data cannot be read ("),
        (str(tmp_path / "nothing"), "does not exist; pass the name of a task or a folder with its data."),
        ("STSBenchmerk", "--mteb STSBenchmerk is not a task of mteb"),
        (" , ", "--mteb names no task"),
    ):
        capsys.readouterr()
        assert cli(["eval", str(run), "--mteb", names]) == 2
        assert said in message(capsys)
    for more in (["--data", "x.jsonl"], ["--link-prediction"], ["--window", "8"], ["--reward", "answer"]):
        capsys.readouterr()
        assert cli(["eval", str(run), "--mteb", "STSBenchmark", *more]) == 2
        assert f"{more[0]} has no effect with --mteb; remove it" in message(capsys)
