"""`sansgpu init` proposes a training time from the data, the task, the model and the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.jobs.init.answers import InitAnswers
from sansgpu.jobs.init.hours import propose_time, round_time
from sansgpu.jobs.init.sample import MAX_ROWS, reading_config, sample_rows
from sansgpu.planning.resolve import ignore_message
from sansgpu.tasks.configuration import load_config
from tests.processes import Captured, write_corpus, write_rows
from tests.tasks.folders import chat_rows, model_folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _hours(*arguments: str) -> float:
    assert cli(["init", "a.yaml", "--yes", "--force", *arguments]) == 0
    hours = load_config(Path("a.yaml"))[0].training.max_hours
    assert hours is not None
    return hours


def test_other_keys_are_used_and_shown_in_the_proposal(tmp_path: Path, capsys: Captured) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"remark": f"a word {n}", "kind": "ab"[n % 2]} for n in range(40)])
    asked = ["--text", str(rows), "--task", "classify", "--model", str(model_folder("bert"))]
    columns = ["--set", "data.text_column=remark", "--set", "data.label_column=kind"]
    _hours(*asked, *columns)
    assert "20 epochs take 40 steps of about " in capsys.readouterr().err
    _hours(*asked, *columns, "--set", "training.num_epochs=4")
    assert "4 epochs take 8 steps of about " in capsys.readouterr().err
    config = load_config(Path("a.yaml"))[0]
    assert (config.training.num_epochs, config.data.text_column) == (4, "remark")
    assert (config.training.logging_steps, config.training.eval_steps) == (1, 5), "a short run shows all steps"
    assert config.training.max_hours == 0.05, "a minute's run may take three, because other programs run, too"


def test_chats_are_recognized_and_get_the_time_of_their_epochs(tmp_path: Path, capsys: Captured) -> None:
    rows, model = chat_rows(tmp_path / "rows.jsonl"), str(model_folder("qwen2"))
    assert _hours("--text", str(rows), "--model", model) < 1
    shown = capsys.readouterr().err
    assert "conversations: messages (24 rows, about " in shown
    assert "for task sft" in shown
    assert "20 epochs take 40 steps of about " in shown, "22 training rows, 16 of them in a step"
    assert " GB of memory" in shown
    assert cli(["plan", "a.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["total_steps"], plan["epochs"]) == (40, pytest.approx(20))


def test_given_hours_decide(tmp_path: Path, capsys: Captured) -> None:
    rows, model = chat_rows(tmp_path / "rows.jsonl"), str(model_folder("qwen2"))
    assert _hours("--text", str(rows), "--model", model, "--hours", "90m") == 1.5
    assert "epochs take" not in capsys.readouterr().err


@pytest.mark.long
def test_more_text_gets_more_time() -> None:
    hours = []
    for size in (1_000, 2_000_000):
        Path("notes.txt").write_text("Some words of a text. " * (size // 22))
        hours.append(_hours("--text", "notes.txt"))
    assert hours[0] < hours[1] <= 24
    assert hours[0] <= 2 / 60


def test_rows_that_no_run_accepts_are_explained(tmp_path: Path, capsys: Captured) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"Say {number}"} for number in range(30)])
    assert _hours("--text", str(rows), "--task", "grpo", "--model", str(model_folder("qwen2"))) == 1
    shown = capsys.readouterr().err
    assert f"a run would stop, because {rows} has no answer" in shown


def test_a_model_that_cannot_be_read_gets_an_hour(tmp_path: Path, capsys: Captured) -> None:
    assert _hours("--text", str(chat_rows(tmp_path / "rows.jsonl")), "--model", "missing/folder/of/a/model") == 1
    assert "the model cannot be read here" in capsys.readouterr().err


def test_a_folder_is_measured_by_its_training_part(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    write_corpus(folder / "train.jsonl")
    (folder / "valid.jsonl").write_text('{"text": "short"}\n')
    found = sample_rows(reading_config(str(folder), "pretrain"), ignore_message)
    assert found.has_validation
    assert found.text_bytes > 1000


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_the_rows_of_a_large_file_are_estimated(suffix: str) -> None:
    file, number = Path(f"rows{suffix}"), 3 * MAX_ROWS
    if suffix == ".csv":
        file.write_text("text,label\n" + "".join(f"words of row {row},{row % 2}\n" for row in range(number)))
    else:
        write_rows(file, [{"text": f"words of row {row}", "label": row % 2} for row in range(number)])
    found = sample_rows(reading_config(str(file), "classify"), ignore_message)
    assert not found.is_exact
    assert found.rows == pytest.approx(number, rel=0.1)
    assert found.describe().startswith("labeled texts: text + label (about ")


@pytest.mark.parametrize(
    ("seconds", "time", "hours"),
    [(1, "1m", 1 / 60), (61, "2m", 1 / 30), (3300, "1h", 1), (5000, "1.5h", 1.5), (1e9, "24h", 24)],
)
def test_times_are_rounded_up(seconds: float, time: str, hours: float) -> None:
    assert round_time(seconds) == (time, pytest.approx(hours))


def test_progress_names_the_data_of_the_user(tmp_path: Path) -> None:
    rows, shown = chat_rows(tmp_path / "rows.jsonl"), list[str]()
    answers = InitAnswers(str(rows), "sft", 1.0, str(model_folder("qwen2")))
    propose_time(answers, lambda doing, *_: shown.append(doing))
    assert f"reading {rows}" in shown
    assert not [doing for doing in shown if "sansgpu-init" in doing]
