"""`sansgpu data --ask` lets a chat model write questions about documents that tasks qa and sft learn."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from sansgpu.jobs.data.asking import conversation
from tests.processes import Captured, json_of, kill_when, options, refused, start, write_rows
from tests.real_model import real_model
from tests.tasks.fine_tuned import made
from tests.tasks.folders import WORDS, model_folder

pytestmark = pytest.mark.usefixtures("home")

REPLIES = ["Which color is the fox?", "Where does the fox live?", "1. What eats the fox?", "I do not know."]


def passage(draw: random.Random) -> str:
    return (
        f"The fox is {' and '.join(draw.sample(WORDS, 12))}, and it lives in a den near the {draw.choice(WORDS)} sea."
    )


@pytest.fixture(scope="module")
def asker(home: Path) -> Path:
    """Returns a chat model that has learned to reply with one of a few questions, or with no question."""
    draw, rows = random.Random(0), []
    for number in range(16):
        reply = {"role": "assistant", "content": REPLIES[number % len(REPLIES)]}
        rows.append({"messages": [*conversation(passage(draw), None, True), reply]})
    write_rows(home / "replies.jsonl", rows)
    return made(
        home, "asker", model__name_or_path=model_folder("qwen2", max_position_embeddings=4096),
        data__dataset_name=home / "replies.jsonl", data__learn="last", data__max_length=2048,
        training__batch_size=4, training__gradient_accumulation_steps=1, training__max_steps=60,
        training__learning_rate=0.01, training__eval_steps=0, training__save_steps=0,
    )  # fmt: skip


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder, draw = tmp_path / "documents", random.Random(1)
    folder.mkdir()
    html = "".join(f"<p>{passage(draw)}</p>" for _ in range(5))
    (folder / "foxes.html").write_text(f"<h1>Foxes</h1>{html}", encoding="utf-8")
    (folder / "notes.txt").write_text("\n\n".join(passage(draw) for _ in range(5)), encoding="utf-8")
    return folder


def asked(capsys: Captured, model: Path, documents: Path, output: Path, *more: str) -> dict[str, Any]:
    return json_of(capsys, "data", documents, "--ask", model, "--write", output, *more)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_of_task_qa_are_quotes(asker: Path, documents: Path, tmp_path: Path, capsys: Captured) -> None:
    output = tmp_path / "qa.jsonl"
    summary = asked(capsys, asker, documents, output, "--questions", "3")
    rows = rows_of(output)
    assert (summary["passages"], summary["rows"]) == (10, len(rows))
    assert len(rows) + sum(summary["left_out"].values()) == 30
    assert {"replies that are no question", "repeated questions"} <= set(summary["left_out"])
    for row in rows:
        assert re.fullmatch(r"\D.*\?", row["question"])  # without its number
        start, answer = row["answers"]["answer_start"][0], row["answers"]["text"][0]
        assert row["context"][start : start + len(answer)] == answer
        assert re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", row["context"])
        assert re.match(r"foxes\.html, paragraph \d+, question \d+|notes\.txt:\d+, question \d+", row["id"])
    look = json_of(capsys, "data", output)
    assert (look["task"], look["splits"][0]["rows"], look["splits"][0]["left_out"]) == ("qa", len(rows), [])
    chosen = options({"task": "qa", "model.name_or_path": model_folder("bert"), "data.dataset_name": output})
    assert cli(["train", *chosen, "--dry-run", "--output-dir", str(tmp_path / "run")]) == 0
    assert "exists; choose another name" in refused(capsys, "data", documents, "--ask", asker, "--write", output)


@pytest.mark.long
def test_a_killed_command_continues(asker: Path, documents: Path, tmp_path: Path, capsys: Captured) -> None:
    output, whole, partial = tmp_path / "qa.jsonl", tmp_path / "whole.jsonl", tmp_path / "qa.jsonl.partial"
    more = "--questions", "9", "--seed", "3"
    arguments = ["data", str(documents), "--ask", str(asker), "--write", str(output), *more]
    kill_when(start(arguments, tmp_path / "cache"), lambda: partial.exists() and b"\n" in partial.read_bytes())
    assert not output.exists()
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(lines[:7]) + lines[7][:9])  # the line was being written
    assert "was started with a different model, data or options" in refused(capsys, *arguments[:-1], "4")
    assert asked(capsys, asker, documents, output, *more)["resumed"] == 7
    assert asked(capsys, asker, documents, whole, *more)["resumed"] == 0
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("qa*")) == ["qa.jsonl"]


def test_task_sft_learns_the_questions_as_conversations(
    asker: Path, documents: Path, tmp_path: Path, capsys: Captured
) -> None:
    output = tmp_path / "sft.jsonl"
    summary = asked(capsys, asker, documents, output, "--task", "sft")
    for row in rows_of(output):
        assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
    look = json_of(capsys, "data", output)
    assert (look["task"], look["splits"][0]["rows"]) == ("sft", summary["rows"])


def test_a_model_without_a_usable_reply_is_named(documents: Path, tmp_path: Path, capsys: Captured) -> None:
    model = model_folder("qwen2", max_position_embeddings=4096)
    arguments = ["data", str(documents), "--ask", str(model), "--write", str(tmp_path / "rows.jsonl")]
    assert cli(arguments) == 1
    assert "no reply of the model is of use (10 replies that are no question)" in capsys.readouterr().err
    assert list(tmp_path.glob("rows*")) == []


def test_what_cannot_be_asked_is_refused(asker: Path, documents: Path, tmp_path: Path, capsys: Captured) -> None:
    write, ask = ["--write", str(tmp_path / "rows.jsonl")], ["--ask", str(asker)]
    (tmp_path / "short").mkdir()
    (tmp_path / "short/a.txt").write_text("Only a heading.", encoding="utf-8")
    short = model_folder("qwen2", max_position_embeddings=128)
    for arguments, words in (
        ([documents, *ask], "--ask needs a file for the questions; add --write FILE.jsonl"),
        ([documents, *ask, *write, "--row", "1"], "--ask and --row exclude each other"),
        ([documents, *ask, *write, "--set", "data.max_length=9"], "--ask and --set exclude each other"),
        ([documents, "--seed", "1"], "--questions and --seed require --ask"),
        (
            [documents, *ask, *write, "--task", "embed"],
            "--task is embed, but --ask writes rows of the tasks qa and sft",
        ),
        ([tmp_path / "short", *ask, *write], "has no paragraph of at least 80 bytes"),
        ([documents, "--ask", short, *write], "has a context of 128 tokens, but --ask needs at least"),
    ):
        assert words in refused(capsys, "data", *arguments)


@pytest.mark.long
def test_a_real_model_asks_about_a_page(tmp_path: Path, capsys: Captured) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<h1>The lighthouse of Mell</h1><p>The lighthouse of Mell was built in 1873 by the engineer Anna Lindqvist "
        "after eleven ships had sunk on the reef. It is 42 meters high.</p><p>Until 1924 the lamp burned rapeseed oil, "
        "which the keeper carried up 204 steps every evening. Electricity arrived with a cable from the mainland.</p>",
        encoding="utf-8",
    )
    for task in ("qa", "sft"):
        output = tmp_path / f"{task}.jsonl"
        summary = asked(capsys, real_model(tmp_path), page, output, "--task", task, "--questions", "5")
        assert summary["rows"] >= 1
        assert json_of(capsys, "data", output)["task"] == task
