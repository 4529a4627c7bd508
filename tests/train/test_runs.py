"""Whole runs have the requested length and write the promised events and files."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sansgpu.cli import run as cli
from sansgpu.events.event import Event, EventBuffer, Sinks
from sansgpu.jobs.train import TrainRequest
from sansgpu.jobs.train import train as train_job
from sansgpu.machine.instruction_sets import allowed
from sansgpu.tasks.configuration import load_config
from sansgpu.train.snapshots import snapshots
from tests import processes
from tests.processes import digests, events_of, finish, json_lines, record, settings, start_apart, write_corpus

pytestmark = pytest.mark.usefixtures("home")

# Keys that the documentation promises to other programs.
STEP_KEYS = {
    "event", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "it/s", "mfu",
    "rss_bytes", "cpu_percent", "eta_seconds", "elapsed_seconds", "total_steps", "phase_seconds", "system",
    "gemm_flops_per_second", "threads",
}  # fmt: skip
EVAL_KEYS = {"event", "step", "epoch", "loss", "perplexity", "bits_per_byte", "seconds"}
END_KEYS = {"event", "step", "time", "reason", "seconds", "snapshot", "final_step"}


def train(home: Path, run: Path, *more: str, **changes: object) -> list[dict[str, Any]]:
    assert processes.train(home, run, *more, **changes) == 0
    return events_of(run)


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_max_steps_is_exactly_that_many(home: Path, tmp_path: Path) -> None:
    events = train(home, tmp_path / "r", "--max-steps", "10", training__logging_steps=1)
    assert [e["step"] for e in of(events, "step")] == list(range(1, 11))
    assert [e["step"] for e in of(events, "eval")] == [3, 6, 9, 10]
    assert of(events, "end") == [{**of(events, "end")[0], "step": 10, "reason": "done", "snapshot": "step-000010"}]


def test_the_steps_before_the_first_logged_one_end_with_the_run(home: Path, tmp_path: Path) -> None:
    config = load_config(None, settings(data__dataset_name=home / "corpus.jsonl", training__logging_steps=10)[1::2])[0]
    shown: list[tuple[int, int]] = []

    def progress(doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        if doing.startswith("training up to"):
            shown.append((done, total))

    changes = ("training.max_steps=3",)
    train_job(TrainRequest(config=config, overrides=changes, output_dir=tmp_path / "r"), [], progress)
    assert shown == [(0, 3), (1, 3), (2, 3)]


def test_a_warm_up_longer_than_the_run_is_reported(home: Path, tmp_path: Path) -> None:
    changes = {"training__warmup_steps": 500, "training__max_steps": 4, "training__logging_steps": 1}
    events = train(home, tmp_path / "r", **changes)
    message = (
        "training.warmup_steps is 500, but the run ends after 4 steps, when the learning rate has reached only 1% of "
        "training.learning_rate; set warmup_steps to 0."
    )
    assert [e["message"] for e in of(events, "warning") if "warmup" in e["message"]] == [message]


def test_the_events_carry_what_is_promised(home: Path, tmp_path: Path) -> None:
    events = train(home, tmp_path / "r", "--max-steps", "6", training__sample_tokens=5)
    assert {frozenset(e) for e in of(events, "step")} == {frozenset(STEP_KEYS)}
    assert {frozenset(e) for e in of(events, "eval")} == {frozenset(EVAL_KEYS | {"sample"})}
    assert {frozenset(e) for e in of(events, "end")} == {frozenset(END_KEYS)}
    assert events[0]["event"] == "start"
    assert {e["event"] for e in events} <= {"start", "step", "eval", "snapshot", "warning", "end"}
    for event in of(events, "step"):
        assert event["tokens_per_second"] > 0
        assert 0 < event["mfu"] < 1
        assert event["rss_bytes"] > 50_000_000


def test_max_tokens_ends_the_run(home: Path, tmp_path: Path) -> None:
    events = train(home, tmp_path / "r", training__max_tokens=1000, training__logging_steps=1)
    seen = [e["tokens"] for e in of(events, "step")]
    assert seen[-2] < 1000 <= seen[-1]


@pytest.mark.parametrize("pack", ["true", "false"])
def test_an_epoch_is_every_token_once(home: Path, tmp_path: Path, pack: str) -> None:
    short = write_corpus(tmp_path / "short.jsonl", documents=12)
    once = {"training__num_epochs": 2, "training__eval_steps": 0, "training__save_steps": 0}
    events = train(home, tmp_path / "r", data__dataset_name=short, data__pack_sequences=pack, **once)
    assert of(events, "step")[-1]["tokens"] == 2 * events[0]["train_tokens"]


def test_max_hours_ends_the_run_in_time_with_its_decay_complete(home: Path, tmp_path: Path) -> None:
    started, allowed = time.monotonic(), 0.0025 * 3600
    changes = {
        "training__max_hours": 0.0025, "training__max_steps": "null", "training__lr_scheduler": "wsd",
        "training__warmup_steps": 1000, "training__logging_steps": 1,
        # Pauses must be rare, because on a busy machine one of them may take as long as many steps.
        "training__eval_steps": 20, "training__save_steps": 24, "training__sample_tokens": 0,
    }  # fmt: skip
    events = train(home, tmp_path / "r", **changes)
    assert time.monotonic() - started < allowed + 1  # this process has already started
    end, steps = of(events, "end")[0], of(events, "step")
    assert end["reason"] == "out_of_time"
    assert 0.5 * allowed < end["seconds"] < allowed
    rates = [event["lr"] for event in steps]
    peak = rates.index(max(rates))
    assert 0 < peak < 0.25 * len(rates), "a warmup that is too long must be shortened"
    assert rates[-1] < 0.2 * max(rates)  # on a busy machine the last few steps may be missing
    assert of(events, "eval")[-1]["step"] == end["step"] == snapshots(tmp_path / "r/snapshots")[-1].step
    assert (tmp_path / "r/final/model.safetensors").exists()


def test_a_limit_that_ends_the_run_long_before_its_time_is_reported(home: Path, tmp_path: Path) -> None:
    events = train(home, tmp_path / "r", training__max_hours=100, training__max_steps=12)
    assert of(events, "end")[0]["reason"] == "done"
    assert [e["message"] for e in of(events, "warning") if "long before its time limit" in e["message"]]


def test_an_end_time_in_the_past_or_of_wrong_form_is_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(data__dataset_name=home / "corpus.jsonl")
    assert cli(["train", *chosen, "--until", "2020-01-01T07:00", "--output-dir", str(tmp_path / "r")]) == 2
    assert "is in the past; set a later time" in capsys.readouterr().err
    assert cli(["train", *chosen, "--until", "tomorrow", "--output-dir", str(tmp_path / "r")]) == 2
    assert "write 18:00, 6PM or 2030-01-31T18:00" in capsys.readouterr().err


@pytest.mark.long
def test_headless_prints_the_same_lines_and_nothing_else(home: Path, tmp_path: Path) -> None:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=4)
    code, out, _ = finish(["train", *chosen, "--headless", "--output-dir", str(tmp_path / "r")], home / "cache")
    assert code == 0
    assert out == (tmp_path / "r/metrics.jsonl").read_text()


@pytest.mark.parametrize("flags", [(), pytest.param(("--headless",), marks=pytest.mark.long)])
def test_a_reader_that_leaves_does_not_end_the_run(home: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=12, training__logging_steps=1)
    process = start_apart(["train", *chosen, *flags, "--output-dir", str(tmp_path / "r")], home / "cache")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()  # as `head -1` does
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    end = json_lines(tmp_path / "r/metrics.jsonl")[-1]
    assert (end["event"], end["step"]) == ("end", 12)


def test_two_runs_with_one_seed_are_byte_identical(home: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(home, tmp_path / name, "--max-steps", "5")
    assert digests(tmp_path / "a") == digests(tmp_path / "b") != {}
    assert record(tmp_path / "a") == record(tmp_path / "b")


def test_what_can_be_learned_is_learned_in_validation_too(home: Path, tmp_path: Path) -> None:
    """If labels were shifted twice or not at all, one of the two losses would stay high."""
    (tmp_path / "abc.txt").write_text("abcdefghij" * 3000)
    changes = {
        "data__dataset_name": tmp_path / "abc.txt", "data__tokenizer": "char", "training__max_steps": 80,
        "training__learning_rate": 0.01, "model__dropout": 0.0, "training__eval_steps": 40,
    }  # fmt: skip
    events = train(home, tmp_path / "r", **changes)
    assert of(events, "step")[-1]["loss"] < 0.3
    assert of(events, "eval")[-1]["loss"] < 0.3


def test_accumulation_changes_neither_loss_nor_tokens(home: Path, tmp_path: Path) -> None:
    runs = []
    for name, micro, count in (("a", 4, 1), ("b", 1, 4)):
        changes = {"training__batch_size": micro, "training__gradient_accumulation_steps": count}
        runs.append(train(home, tmp_path / name, "--max-steps", "6", model__dropout=0.0, **changes))
    for first, second in zip(of(runs[0], "step"), of(runs[1], "step"), strict=True):
        assert first["tokens"] == second["tokens"]
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


def test_batch_size_auto_keeps_the_effective_batch(home: Path, tmp_path: Path) -> None:
    events = train(
        home, tmp_path / "r", "--batch-size", "auto", "--max-steps", "2", training__gradient_accumulation_steps=6
    )
    start = events[0]
    assert start["micro_batch"] * start["gradient_accumulation_steps"] == 6
    assert start["tokens_per_step"] == 6 * 32


@pytest.mark.long  # a busy machine's measurements are not cached
def test_a_long_run_measures_its_micro_batch_once(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"training__max_steps": 10**9, "training__gradient_accumulation_steps": 6}
    chosen = settings(data__dataset_name=home / "corpus.jsonl", data__cache_dir=tmp_path / "cache", **long)
    arguments = ["train", *chosen, "--batch-size", "auto", "--dry-run", "--output-dir", str(tmp_path / "r")]
    assert cli(arguments) == 0
    first = yaml.safe_load(capsys.readouterr().out)["run"]
    assert 6 % first["micro_batch"] == 0
    (answer,) = (tmp_path / "cache/measured").iterdir()
    known = json.loads(answer.read_text())
    assert known["answer"]["micro_batch"] == first["micro_batch"]
    answer.write_text(json.dumps({**known, "answer": {**known["answer"], "micro_batch": 3}}))
    assert cli(arguments) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"]["micro_batch"] == 3


def test_added_losses_train_but_are_not_reported_as_the_validation_loss(home: Path, tmp_path: Path) -> None:
    plain = train(home, tmp_path / "plain", "--max-steps", "2", training__eval_steps=0)
    added = train(
        home, tmp_path / "added", "--max-steps", "2", training__eval_steps=0, training__label_smoothing=0.5,
        training__z_loss=0.1,
    )  # fmt: skip
    assert of(added, "step")[0]["loss"] > of(plain, "step")[0]["loss"] + 1
    assert of(added, "eval")[0]["loss"] == pytest.approx(of(plain, "eval")[0]["loss"], rel=0.05)


def test_without_native_kernels_the_same_is_learned(home: Path, tmp_path: Path) -> None:
    native = train(home, tmp_path / "native", "--max-steps", "6", training__kernels="native", model__dropout=0.0)
    plain = train(home, tmp_path / "plain", "--max-steps", "6", training__kernels="torch", model__dropout=0.0)
    assert [run[0]["kernels"] for run in (native, plain)] == [f"native {allowed()[-1].name}", "torch"]
    for first, second in zip(of(native, "step"), of(plain, "step"), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


def test_a_dry_run_shows_everything_and_writes_nothing(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=4)
    assert cli(["train", *chosen, "--dry-run", "--output-dir", str(tmp_path / "r")]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert not (tmp_path / "r").exists()
    assert shown["config"]["training"]["beta2"] == 0.98
    assert shown["config"]["model"]["vocab_size"] == 320
    assert shown["run"]["total_steps"] == 4
    assert shown["run"]["memory_bytes"]["total"] > 0


def test_tensorboard_holds_the_same_numbers(home: Path, tmp_path: Path) -> None:
    often = {"training__logging_steps": 25, "training__eval_steps": 40, "training__save_steps": 0}
    events = train(home, tmp_path / "r", "--max-steps", "100", training__report_to="tensorboard", **often)
    board = EventAccumulator(str(tmp_path / "r/tensorboard"))
    board.Reload()
    for tag, kind, part in (
        ("train/loss", "step", None),
        ("validation/bits_per_byte", "eval", None),
        ("phase_seconds/backward", "step", "phase_seconds"),
        ("system/memory_available_bytes", "step", "system"),
    ):
        key = tag.split("/")[1]
        told = [(event["step"], event[part] if part else event) for event in of(events, kind)]
        wanted = [(step, pytest.approx(values[key], rel=1e-6)) for step, values in told if values]
        assert wanted, f"the run must have recorded {tag}"
        assert [(scalar.step, scalar.value) for scalar in board.Scalars(tag)] == wanted
    for event in of(events, "step"):
        assert event["it/s"] * event["step_seconds"] == pytest.approx(1)
        phases = sum(event["phase_seconds"].values())
        assert 0.3 * event["step_seconds"] < phases < 1.05 * event["step_seconds"]  # other programs take time between


def test_no_board_is_written_where_none_is_wanted(home: Path, tmp_path: Path) -> None:
    train(home, tmp_path / "r", "--max-steps", "2", training__report_to="none")
    assert not (tmp_path / "r/tensorboard").exists()


def test_a_failing_sink_is_removed_and_the_others_get_a_warning() -> None:
    class Failing:
        def emit(self, event: Event) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("disk full")

    collecting = EventBuffer()
    sinks = Sinks([Failing(), collecting])
    for step in (1, 2):
        sinks.emit({"event": "step", "step": step})
    sinks.close()
    assert [e["event"] for e in collecting.events] == ["step", "warning", "step"]
    assert "disk full" in collecting.events[1]["message"]


def test_warnings_before_the_start_are_recorded_once(home: Path, tmp_path: Path) -> None:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=2, training__compile="on")
    command = ["train", *chosen, "--headless", "--output-dir", str(tmp_path / "r")]
    code, out, error = finish(command, home / "cache")
    assert code == 0, error
    said = [line for line in out.splitlines() if json.loads(line)["event"] == "warning" and "compile" in line]
    assert len(said) == 1
    assert json.loads(out.splitlines()[0])["event"] == "start", "`start` must be the first event"
    metrics = tmp_path / "r/metrics.jsonl"
    assert metrics.read_text() == out, "earlier warnings must be recorded, too"
    again = [*command, "--max-steps=3", "--resume"]
    _, out, _ = finish(again, home / "cache")
    assert said[0] in out
    assert metrics.read_text().splitlines().count(said[0]) == 1, "a warning must be recorded once"


def test_a_missing_compiler_is_named_where_compiling_would_pay(home: Path, tmp_path: Path) -> None:
    plain = {"training__compile": "auto", "training__kernels": "torch"}
    command = ["train", *settings(data__dataset_name=home / "corpus.jsonl", **plain), "--dry-run"]
    for steps, warnings in ((2, 0), (10**9, 1)):
        run = ["--max-steps", str(steps), "--output-dir", str(tmp_path / "r")]
        code, out, error = finish([*command, *run], home / "cache", PATH=str(tmp_path))
        assert code == 0, error
        assert (out + error).count("a C++ compiler is missing") == warnings
    code, _, error = finish([*command, "--set", "training.compile=on"], home / "cache", PATH=str(tmp_path))
    assert code == 2
    assert "C++ compiler" in error
    ours = ["--set", "training.compile=on", "--set", "training.kernels=native"]
    code, out, error = finish([*command, *ours], home / "cache", PATH=str(tmp_path))
    assert code == 0, error
    assert error.count("has no effect") == 1
    assert "compile: 'off'" in out


def test_the_default_folder_is_named_after_the_configuration_and_never_reused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=2)
    (tmp_path / "mine.yaml").write_text("task: pretrain\n")
    for _ in range(2):
        assert cli(["train", "mine.yaml", *chosen]) == 0
    assert sorted(os.listdir("runs")) == ["mine", "mine-2"]
    assert cli(["train", "mine.yaml", *chosen, "--max-steps", "3", "--resume"]) == 0
    assert snapshots(Path("runs/mine-2/snapshots"))[-1].step == 3
