"""The number of steps follows from the time budget."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import ConfigError, TrainingConfig
from sansgpu.config.parse import finish_time
from sansgpu.config.wording import counted
from sansgpu.planning.forecast import Forecast
from sansgpu.tasks.configuration import load_config
from sansgpu.train.run_length import Budget
from sansgpu.train.schedule import UNKNOWN_STEPS, learning_rate, total_steps, warmup_steps
from sansgpu.views.record import RunRecord
from tests.processes import Captured, events_of, json_of, printed, settings, train, write_corpus
from tests.tasks.fine_tuned import made
from tests.tasks.fine_tuned import settings as fine_tuning
from tests.tasks.folders import chat_rows, labeled_rows, model_folder, prompt_rows

NOW = datetime(2026, 3, 1, 22, 30)


def test_a_time_of_day_is_the_next_one() -> None:
    assert finish_time("23:00", NOW) == datetime(2026, 3, 1, 23, 0)
    assert finish_time("07:00", NOW) == datetime(2026, 3, 2, 7, 0)
    assert finish_time("22:30", NOW) == NOW + timedelta(days=1)
    assert finish_time("2026-03-04T05:06", NOW) == datetime(2026, 3, 4, 5, 6)
    with pytest.raises(ConfigError, match="is in the past"):
        finish_time("2026-03-01T22:29", NOW)


def test_a_time_of_another_zone_is_that_moment_here() -> None:
    config, _ = load_config(None, ["training.until=2030-01-31T07:00:00+09:00"])
    there = datetime(2030, 1, 31, 7, tzinfo=timezone(timedelta(hours=9)))
    assert config.training.until is not None
    assert datetime.fromisoformat(config.training.until).astimezone() == there


def test_an_evaluation_that_takes_a_large_part_of_the_run_is_announced(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", documents=600)
    large = {"model__d_model": 512, "model__d_ff": 2048, "model__n_layers": 4, "data__validation_split": 0.6}

    def warnings_of(steps: int, **changes: object) -> list[str]:
        chosen = {**large, "data__dataset_name": corpus, "training__max_steps": steps, **changes}
        assert train(home, tmp_path / "run", "--dry-run", **chosen) == 0
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.startswith("warning: an evaluation takes about ")]

    (warning,) = warnings_of(50)
    assert "% of the time of all training steps; set training.eval_batches to " in warning
    batches = int(warning.split("training.eval_batches to ")[1].split(",")[0])
    assert not warnings_of(50, training__eval_batches=batches)
    assert not warnings_of(100_000)


@pytest.mark.parametrize(
    ("given", "read"), [("07:00", "07:00"), ("17:30", "17:30"), ("2030-01-31 07:00", "2030-01-31T07:00:00")]
)
def test_yaml_does_not_turn_a_time_into_a_number(given: str, read: str) -> None:
    config, _ = load_config(None, [f"training.until={given}"])
    assert config.training.until == read


@given(
    step=st.floats(0.01, 10), noise=st.lists(st.floats(0.8, 1.3), min_size=50, max_size=50),
    steps=st.integers(30, 20_000),
    validation=st.floats(0, 20), evaluate=st.sampled_from([0, 10, 1000]),
)  # fmt: skip
def test_a_run_simulated_on_a_clock_of_its_own_ends_within_its_budget(
    step: float, noise: list[float], steps: int, validation: float, evaluate: int
) -> None:
    clock, done, hours = 30.0, 0, step * steps / 3600
    training = TrainingConfig(max_hours=hours, eval_steps=evaluate, warmup_steps=0)
    budget = Budget(training, lambda: clock, validation, 0, 0)
    total, evaluation = UNKNOWN_STEPS, step * validation / 3
    while done < total:
        seconds = step * noise[done % len(noise)]
        clock += seconds
        done += 1
        if done > 1:
            budget.record_step(seconds)
        if done < total and budget.should_replan() and (left := budget.steps_left(done)) is not None:
            total = done + left
        if evaluate and done % evaluate == 0 and done < total:
            clock += evaluation
            budget.record_evaluation(evaluation)
    clock += evaluation  # the final evaluation
    allowed = hours * 3600
    assert clock <= max(allowed, 30 + 3 * step + evaluation)
    assert clock >= 0.9 * allowed - 2 * evaluation - 4 * step


@given(
    left=st.floats(1, 500), step=st.floats(0.5, 5), evaluation=st.floats(0, 50), every=st.integers(1, 50),
    saving=st.floats(0, 20), saves=st.integers(0, 50), done=st.integers(1, 100),
)  # fmt: skip
def test_steps_left_are_as_many_as_fit_with_what_falls_due_between_them(
    left: float, step: float, evaluation: float, every: int, saving: float, saves: int, done: int
) -> None:
    training = TrainingConfig(max_hours=left / 3600, eval_steps=every, save_steps=saves)
    budget = Budget(training, lambda: 0.0, 0.0, 0, 0)
    budget.record_step(step)
    budget.record_evaluation(evaluation)
    budget.record_save(saving)

    def takes(steps: int) -> float:
        between = range(done, done + steps)  # the current step is evaluated and saved unless it is the last
        pauses = sum((n % every == 0) * evaluation + (saves > 0 and n % max(1, saves) == 0) * saving for n in between)
        return steps * step + pauses + evaluation

    found = budget.steps_left(done)
    assert found is not None
    room = left - 0.01 * left - 1
    assert found == 0 or takes(found) <= room + 1e-6
    assert takes(found + 1) > room - 1e-6


def test_without_a_limit_the_remaining_time_is_infinite() -> None:
    budget = Budget(TrainingConfig(), lambda: 5.0, 1.0, 0, 0)
    assert not budget.should_replan()
    assert budget.seconds_left() == float("inf")


def test_the_schedule_of_a_run_by_the_clock() -> None:
    training = TrainingConfig(max_hours=1, warmup_steps=50)
    assert total_steps(training, 10, 1000) == UNKNOWN_STEPS
    assert total_steps(training.model_copy(update={"max_steps": 7}), 10, 1000) == 7
    assert warmup_steps(training, 100) == 10
    assert warmup_steps(training, 10_000) == 50
    assert warmup_steps(TrainingConfig(warmup_steps=50), 100) == 50
    assert learning_rate(training, 1000, UNKNOWN_STEPS) == training.learning_rate


@given(st.integers(1, 50), st.integers(0, 400), st.integers(1, 400), st.integers(0, 50))
def test_a_forecast_counts_what_falls_due(every: int, first: int, more: int, saves: int) -> None:
    training = TrainingConfig(eval_steps=every, save_steps=saves)
    forecast = Forecast(7.0, 1.0, 100.0, 10_000.0, 0.5)
    last = first + more
    evaluations = len([s for s in range(first + 1, last) if s % every == 0]) + 1
    saved = len([s for s in range(first + 1, last) if saves and s % saves == 0]) + 1
    assert forecast.seconds(training, last, first) == pytest.approx(7.5 + more + 100 * evaluations + 10_000 * saved)


def test_a_run_whose_preparation_took_all_its_time_is_not_said_to_end_early() -> None:
    budget = Budget(TrainingConfig(max_hours=0.01), lambda: 100.0, 0.0, 0, 0)
    assert budget.steps_left(1) == 0
    assert budget.idle_ratio(1, 1000) == 0


def test_the_time_to_save_is_recorded_once_per_snapshot(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves: list[float] = []
    monkeypatch.setattr(Budget, "record_save", lambda budget, seconds: saves.append(seconds))
    assert train(home, tmp_path / "run", training__max_steps=4, training__save_steps=2, training__eval_steps=0) == 0
    assert len(saves) == 1, "the last snapshot is part of an evaluation"


def test_a_deadline_lets_a_fine_tuning_read_its_data_as_often_as_usual(tmp_path: Path, capsys: Captured) -> None:
    chat_rows(tmp_path / "chat.jsonl")
    hours = {"training__max_steps": "null", "training__max_hours": 1, "training__eval_steps": 0}
    run = made(tmp_path, "deadline", **hours)
    start, end = events_of(run, "start", "end")
    assert start["total_steps"] == start["expected_steps"] == end["step"]
    assert (start["total_epochs"], end["reason"]) == (3, "done")
    shown = capsys.readouterr()
    assert "\n3 epochs, which probably end before the time limit\n" in shown.out
    assert "long before its time limit" not in shown.out + shown.err
    rates = [event["lr"] for event in events_of(run, "step")]
    assert rates[-1] < 0.2 * max(rates), "the schedule must fit the epochs"


@pytest.mark.parametrize(
    ("task", "changes", "epochs"),
    [
        ("sft", {}, 3),
        ("sft", {"training__num_epochs": 5}, 5),
        ("sft", {"training__max_steps": 44}, 4),
        ("classify", {}, 3),
        ("classify", {"training__few_shot": "true"}, 20),
        ("classify", {"training__few_shot": "true", "training__num_epochs": "null"}, 3),
    ],
)
def test_a_plan_says_how_often_a_fine_tuning_reads_its_data(
    tmp_path: Path, task: str, changes: dict[str, object], epochs: int, capsys: Captured
) -> None:
    rows = chat_rows(tmp_path / "rows.jsonl") if task == "sft" else labeled_rows(tmp_path / "rows.jsonl")
    base = model_folder("qwen2" if task == "sft" else "bert")
    limits = {"training__max_hours": 1000, "training__max_steps": "null", "data__dataset_name": rows}
    chosen = {"model__name_or_path": base, "training__batch_size": 1, "training__gradient_accumulation_steps": 2}
    plan = json_of(capsys, "plan", *fine_tuning(tmp_path, task, **{**limits, **chosen, **changes}))
    assert plan["total_steps"] == plan["limit_steps"]
    assert plan["epochs"] == pytest.approx(epochs, rel=0.1)


def test_reinforcement_learning_uses_all_of_the_time(tmp_path: Path, capsys: Captured) -> None:
    """Its answers are new in every epoch."""
    limits = {
        "training__max_hours": 1, "training__max_steps": "null",
        "data__dataset_name": prompt_rows(tmp_path / "rows.jsonl"),
        "model__name_or_path": model_folder("qwen2"), "training__gradient_accumulation_steps": 8,
        "training__batch_size": 1, "training__grpo__group_size": 4, "training__grpo__max_completion_length": 8,
    }  # fmt: skip
    plan = json_of(capsys, "plan", *fine_tuning(tmp_path, "grpo", **limits))
    assert plan["limit_steps"] is None
    assert plan["epochs"] > 10


def test_the_smaller_of_all_steps_and_those_that_the_time_allows_is_announced(
    home: Path, tmp_path: Path, capsys: Captured
) -> None:
    limits = {"training__num_epochs": 1_000_000, "training__max_hours": 0.003, "training__eval_steps": 0}
    assert train(home, tmp_path / "run", **limits, training__logging_steps=1_000_000) == 0
    out = capsys.readouterr().out
    start, end = events_of(tmp_path / "run", "start", "end")
    assert start["expected_steps"] < start["total_steps"]
    said = f"about {start['expected_steps']:,} of {start['total_steps']:,} steps, as many as the time allows, of "
    assert said in out
    assert "epochs, which" not in out
    assert end["reason"] == "out_of_time"
    record = RunRecord.open(tmp_path / "run")
    assert replace(record, events=[start]).total_steps == start["expected_steps"]
    chosen = settings(data__dataset_name=home / "corpus.jsonl", **limits)
    plan = json_of(capsys, "plan", *chosen)
    assert plan["total_steps"] < plan["limit_steps"] == start["total_steps"]
    table = " ".join(printed(capsys, "plan", *chosen).split())
    assert f"of {plan['limit_steps']:,} steps, as many as the time allows, " in table


def test_the_steps_that_only_the_time_limits_are_announced(home: Path, tmp_path: Path, capsys: Captured) -> None:
    assert train(home, tmp_path / "run", training__max_hours=0.003, training__max_steps="null") == 0
    start = events_of(tmp_path / "run", "start")[0]
    assert (start["total_steps"], start["total_epochs"]) == (None, None)
    assert start["expected_steps"] >= 1
    assert f"about {counted(start['expected_steps'], 'step')} for 11 s of " in capsys.readouterr().out
