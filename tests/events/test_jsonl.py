"""JSON Lines files are split only at newlines (U+000A), and a loss that is not finite is null in every output."""

import io
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sansgpu.cli import run as cli
from sansgpu.events.jsonl import read_events
from tests import processes
from tests.processes import environment, json_lines, record

pytestmark = pytest.mark.usefixtures("home")

# The line boundaries of str.splitlines other than "\n". JSON escapes those below U+0020.
LINE_ENDS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
TEXT = "".join(f"a line{end}" for end in LINE_ENDS)


train = partial(processes.train, training__max_steps=6)


def test_an_event_with_any_line_end_is_one_line(home: Path, tmp_path: Path) -> None:
    """The first event contains the folder's name; samples and warnings may also contain line separators."""
    straight = tmp_path / f"run {LINE_ENDS}"
    assert train(home, straight) == 0
    assert json_lines(straight / "metrics.jsonl")[0]["output_dir"] == str(straight)
    run = Path(shutil.copytree(straight, tmp_path / f"resumed {LINE_ENDS}"))
    assert read_events(run / "metrics.jsonl") == json_lines(run / "metrics.jsonl")
    assert train(home, run, "--resume", "4") == 0
    assert record(run) == record(straight)
    assert cli(["report", str(run)]) == 0


def test_documents_with_any_line_end_are_read_whole(home: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(
        b"".join(json.dumps({"text": f"{n} {TEXT}"}, ensure_ascii=False).encode() + b"\n" for n in range(40))
    )
    run = tmp_path / "r"
    assert train(home, run, data__dataset_name=tmp_path / "rows.jsonl", data__tokenizer="char") == 0
    start = json_lines(run / "metrics.jsonl")[0]
    documents = start["train_tokens"] / len(f"10 {TEXT}")
    assert documents > 30


@pytest.mark.long
def test_standard_input_is_encoded_to_the_character(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(["tokenizer", "train", str(home / "corpus.jsonl"), "--vocab-size", "300", "--output", "t"]) == 0
    capsys.readouterr()
    text = f"one\r\ntwo\r{TEXT}"
    command = [sys.executable, "-m", "sansgpu", "tokenizer", "encode", "t", "--json"]
    piped = subprocess.run(command, input=text.encode(), capture_output=True, env=environment(home / "cache"))
    assert cli(["tokenizer", "encode", "t", "--json", "--text", text]) == 0
    assert json.loads(piped.stdout) == json.loads(capsys.readouterr().out)
    refused = subprocess.run(command, input=b"\xff", capture_output=True, env=environment(home / "cache"))
    assert refused.returncode == 2
    assert refused.stderr.decode() == "sansgpu: standard input is not UTF-8 text (byte 0xff); convert it first.\n"


def test_a_line_that_was_cut_off_within_a_character_is_left_out(home: Path, tmp_path: Path) -> None:
    assert train(home, tmp_path / "straight") == 0
    run = Path(shutil.copytree(tmp_path / "straight", tmp_path / "cut"))
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole + '{"event": "warning", "message": "é'.encode()[:-1])
    assert len(read_events(run / "metrics.jsonl")) == whole.count(b"\n")
    assert train(home, run, "--resume", "4") == 0
    assert record(run) == record(tmp_path / "straight")


# A single step with a huge learning rate; the evaluation after it overflows.
BROKEN = {
    "training__learning_rate": 1e36, "training__optimizer": "adamw", "training__warmup_steps": 0,
    "training__max_steps": 1, "training__eval_steps": 1, "training__logging_steps": 1, "model__activation": "gelu",
    "training__lr_scheduler": "constant", "training__sample_tokens": 4,
}  # fmt: skip


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def broken(home: Path) -> tuple[Path, str]:
    """Trains a run whose only evaluation is not finite; returns its folder and what it printed with --headless."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        assert train(home, home / "broken", "--headless", training__report_to="tensorboard", **BROKEN) == 0
    return home / "broken", printed.getvalue()


def test_an_evaluation_that_is_not_finite_is_null_and_the_record_continues(broken: tuple[Path, str]) -> None:
    run, printed = broken
    assert printed == (run / "metrics.jsonl").read_text("utf-8")
    events = [json.loads(line, parse_constant=no_constant) for line in printed.split("\n") if line]
    assert [event["event"] for event in events] == ["start", "step", "eval", "warning", "snapshot", "end"]
    evaluation, warning = events[2:4]
    assert (evaluation["loss"], evaluation["perplexity"], evaluation["bits_per_byte"]) == (None, None, None)
    assert warning["step"] == 1
    assert "infinite or NaN" in warning["message"]
    state = json.loads((run / "snapshots/step-000001/state.json").read_text(), parse_constant=no_constant)
    assert state["metrics"]["loss"] is None
    assert (state["progress"]["best_step"], state["progress"]["best_loss"]) == (None, None)
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert "train/loss" in board.Tags()["scalars"]
    assert "validation/loss" not in board.Tags()["scalars"]


def test_what_reads_a_run_takes_an_evaluation_that_is_not_finite(
    broken: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = broken
    assert "not finite" in (run / "report.html").read_text("utf-8")
    assert (run / "final/README.md").is_file()
    capsys.readouterr()
    assert cli(["runs", str(run.parent), "--json"]) == 0
    row = next(
        r for r in json.loads(capsys.readouterr().out, parse_constant=no_constant)["runs"] if r["name"] == "broken"
    )
    assert (row["state"], row["best_loss"], row["validation_loss"], row["problem"]) == ("done", None, None, None)
    assert cli(["snapshots", "list", str(run), "--json"]) == 0
    [snapshot] = json.loads(capsys.readouterr().out, parse_constant=no_constant)["snapshots"]
    assert (snapshot["loss"], snapshot["best"]) == (None, False)
    assert cli(["eval", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=no_constant)["loss"] is None
    assert cli(["eval", str(run)]) == 0
    assert "loss not finite" in capsys.readouterr().out
    assert cli(["snapshots", "show", str(run), "--snapshot", "best"]) == 2
    assert "so there is no best one" in capsys.readouterr().err


def test_a_terminal_shows_a_loss_that_is_not_finite_in_words(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(home, tmp_path / "r", **BROKEN) == 0
    out = capsys.readouterr().out
    assert "validation at step 1: loss not finite" in out
    assert "stopped" not in out
