"""`--precision` of the commands that use a model."""

import json
from pathlib import Path
from typing import get_args

import pytest

from sansgpu.cli import run as cli
from sansgpu.cli.options import PRECISIONS
from sansgpu.config.training import Precision
from tests.processes import json_of, refused, settings, train_once, write_corpus, write_rows

pytestmark = pytest.mark.usefixtures("home")
PROMPTS = [f"The {word} is" for word in ("house", "fox", "old cat", "red house")]


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=120)
    write_rows(home / "prompts.jsonl", ({"text": prompt} for prompt in PROMPTS))
    large = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=8, model__max_seq_len=128)
    train_once(home / "run", large)
    train_once(home / "torch", [*large, "--set", "training.kernels=torch", "--set", "training.max_steps=1"])


def test_a_run_is_evaluated_in_the_chosen_precision(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {
        precision: json_of(capsys, "eval", home / "run", "--precision", precision)["loss"]
        for precision in ("fp32", "int16", "int8")
    }
    assert len(set(losses.values())) == 3
    assert losses["int16"] == pytest.approx(losses["fp32"], rel=1e-3)
    assert losses["int8"] == pytest.approx(losses["fp32"], rel=1e-2)


def test_texts_are_generated_in_integers_whatever_the_batch(home: Path, tmp_path: Path) -> None:
    outputs = []
    for size in (1, 4):
        outputs.append(tmp_path / f"{size}.jsonl")
        asked = ["generate", str(home / "run"), "--data", str(home / "prompts.jsonl"), "--output", str(outputs[-1])]
        assert cli([*asked, "--max-new-tokens", "20", "--precision", "int8", "--batch-size", str(size)]) == 0
    texts = [[json.loads(line)["completion"] for line in output.read_text().splitlines()] for output in outputs]
    assert len(texts[0]) == len(PROMPTS)
    assert texts[0] == texts[1]


def test_a_teacher_predicts_in_the_precision_that_its_folder_began_with(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["distill", home / "run", "--data", home / "corpus.jsonl", "--output", tmp_path / "lessons"]
    first = json_of(capsys, *asked, "--precision", "int8")
    assert first["precision"] == "int8"
    assert json_of(capsys, *asked)["tokens"] == first["tokens"]
    assert "different precision (int8, now fp32)" in refused(capsys, *asked, "--precision", "fp32")


def test_the_option_takes_the_values_of_the_configuration() -> None:
    assert get_args(Precision) == PRECISIONS


def test_an_unknown_precision_is_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "eval", home / "run", "--precision", "int4")
    assert "int4 must be auto, fp32, bf16, int16, int8" in sentence


def test_integers_without_our_kernels_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "eval", home / "torch", "--precision", "int8")
    assert "int8 requires sansgpu's kernels, which are not loaded; set --precision to auto or fp32." in sentence
