"""`sansgpu eval --predictions` shows conversations with the answers of the model."""

import json
from pathlib import Path

import pytest

from tests.processes import Captured, printed, refused, write_rows
from tests.tasks.folders import model_folder

pytestmark = pytest.mark.usefixtures("home")
QUESTIONS = ("when do you open", "what is a fox", "why")


def test_the_last_answer_of_each_conversation_is_the_one_that_chat_gives(tmp_path: Path, capsys: Captured) -> None:
    first = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good morning"}]
    rows = [
        {"messages": [*first, {"role": "user", "content": asked}, {"role": "assistant", "content": f"{asked} indeed"}]}
        for asked in QUESTIONS
    ]
    rows.insert(1, {"text": "a text that no question precedes"})
    model, file = model_folder("qwen2"), tmp_path / "answers.jsonl"
    asked = ["eval", model, "--data", write_rows(tmp_path / "rows.jsonl", rows), "--predictions", str(file)]
    plain = printed(capsys, *asked, "--precision", "fp32")
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["label"].strip() for row in found] == [f"{question} indeed" for question in QUESTIONS]
    for row, question in zip(found, QUESTIONS, strict=True):
        assert "good morning" in row["text"]
        assert question in row["text"]
        assert "indeed" not in row["text"]
    prompts = [{"messages": one["messages"][:-1]} for one in rows if "messages" in one]
    printed(
        capsys, "generate", model, "--data", write_rows(tmp_path / "prompts.jsonl", prompts), "--temperature", "0",
        "--max-new-tokens", "256", "--precision", "fp32", "--output", output := tmp_path / "generated.jsonl",
    )  # fmt: skip
    lines = map(json.loads, output.read_text(encoding="utf-8").splitlines())
    assert [row["predicted"] for row in found] == [line["messages"][-1]["content"].strip() for line in lines]
    file.unlink()
    assert printed(capsys, *asked, "--precision", "fp32", "--limit", "2") == plain
    assert file.read_text(encoding="utf-8").count("\n") == 2


def test_a_limit_needs_something_to_limit(tmp_path: Path, capsys: Captured) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    said = refused(capsys, "eval", model_folder("qwen2"), "--data", rows, "--limit", 2)
    assert "--limit requires --link-prediction, --harness or --predictions" in said
