"""Evaluation uses the whole validation split, changes no state, and may end a run whose loss no longer falls."""

import json
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from sansgpu.config import Config
from sansgpu.data.batch import IGNORE
from sansgpu.machine.execution import Execution
from sansgpu.models.generation.sampling import Sampling
from sansgpu.tasks.pretrain.task import Pretrain
from sansgpu.train.evaluate import evaluate
from tests.processes import (
    TINY,
    Captured,
    digests,
    events_of,
    finish,
    json_of,
    kill_when,
    printed,
    record,
    refused,
    settings,
    start,
    write_corpus,
)
from tests.tasks.fine_tuned import made
from tests.tasks.folders import squad

EXECUTION = Execution(3)
PATIENCE = 4
# A model that learns a short text by heart.
OVERFITTED = {
    "training__max_steps": 200, "training__learning_rate": 0.03, "model__dropout": 0.0, "data__validation_split": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Pretrain:
    folder = tmp_path_factory.mktemp("evaluation")
    values: dict[str, dict[str, object]] = {"model": {}, "training": {}, "data": {}}
    for key, value in {**TINY, "data.dataset_name": str(write_corpus(folder / "a.jsonl", 200))}.items():
        section, _, name = key.rpartition(".")
        values.setdefault(section or "training", {})[name] = value
    values["data"]["validation_split"] = 0.3
    config, corpus = Pretrain.prepare(Config.model_validate(values), folder / "cache", lambda *_: None)
    return Pretrain(config, corpus, effective_batch=4)


def test_the_metrics_are_those_of_the_whole_part_computed_plainly(task: Pretrain) -> None:
    windows = task.corpus.validation
    batch = windows.batch(np.arange(len(windows)))
    assert len(windows) % EXECUTION.micro_batch != 0, "the last batch must be smaller"
    with torch.no_grad():
        task.model.eval()
        logits = task.model(batch.inputs, batch.positions, batch.document_ids).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORE).item()
    metrics = evaluate(task.evaluator, EXECUTION)
    assert metrics is not None
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)
    text = task.corpus.tokenizer.decode(
        [t for t in batch.targets.flatten().tolist() if t not in (IGNORE, task.corpus.tokenizer.end_id)]
    )
    bits = expected / math.log(2) * batch.target_count() / len(text.encode())
    assert metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-5)


def test_it_can_be_limited_and_stopped(task: Pretrain) -> None:
    whole, part = evaluate(task.evaluator, EXECUTION), evaluate(task.evaluator, EXECUTION, batches=1)
    assert whole != part
    assert evaluate(task.evaluator, EXECUTION, stop=lambda: True) is None


def test_the_progress_shows_how_many_batches_there_are(task: Pretrain) -> None:
    expected = math.ceil(len(task.corpus.validation) / EXECUTION.micro_batch)
    for limit, total in ((None, expected), (2, 2), (999, expected)):
        shown: list[tuple[int, int]] = []
        evaluate(task.evaluator, EXECUTION, limit, progress=lambda _, done, total, *__: shown.append((done, total)))  # noqa: B023
        assert shown == [(done, total) for done in range(total + 1)]


def test_it_leaves_mode_randomness_and_gradients_as_they_were(task: Pretrain) -> None:
    task.model.train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    evaluate(task.evaluator, EXECUTION)
    task.sample("the", 5, Sampling(seed=1))
    assert torch.equal(torch.rand(2), expected)
    assert task.model.training
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_a_signal_before_the_first_step_leaves_nothing_that_hinders_a_resume(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    arguments = [
        "train",
        *settings(data__dataset_name=corpus, training__max_steps=4),
        "--output-dir",
        str(tmp_path / "r"),
    ]
    process = start(arguments, tmp_path / "cache")
    metrics = tmp_path / "r/metrics.jsonl"
    code = kill_when(process, lambda: metrics.exists() and metrics.stat().st_size > 0, signal.SIGTERM)
    assert code in (143, -15, 0)  # by the handler, before it was installed, or after the last step
    assert finish([*arguments, "--resume"], tmp_path / "cache")[0] == 0
    assert record(tmp_path / "r")[-1]["step"] == 4


def test_an_evaluation_on_start_comes_first_and_changes_no_result(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a.jsonl")
    chosen = settings(data__dataset_name=corpus, training__max_steps=4, training__learning_rate=5.0)  # diverges
    for name in ("without", "with"):
        first = ["--set", "training.eval_on_start=true"] if name == "with" else []
        done = finish(["train", *chosen, *first, "--output-dir", str(tmp_path / name)], tmp_path / "cache")
        assert done[0] == 0, done[2]
    events = record(tmp_path / "with")
    assert [(event["event"], event["step"]) for event in events[:2]] == [("start", 0), ("eval", 0)]
    last = [event["loss"] for event in events if event["event"] == "eval"][-1]
    assert last > events[1]["loss"], "the untrained weights, which have no snapshot, must be the best"
    weights = [(tmp_path / name / "final/model.safetensors").read_bytes() for name in ("without", "with")]
    assert weights[0] == weights[1]
    code, shown, _ = finish(["snapshots", "list", str(tmp_path / "with")], tmp_path / "cache")
    assert (code, "step-000004" in shown, "step-000000" in shown) == (0, True, False)


def overfitting(folder: Path, run: str, *more: str, **changes: object) -> list[str]:
    corpus = folder / "short.jsonl"
    if not corpus.exists():
        write_corpus(corpus, 12)
    chosen = {**OVERFITTED, "data__dataset_name": corpus, **changes}
    return ["train", *settings(**chosen), *more, "--output-dir", str(folder / run)]


def trained(folder: Path, run: str, *more: str, **changes: object) -> Path:
    code, _, error = finish(overfitting(folder, run, *more, **changes), folder / "cache")
    assert code == 0, error
    return folder / run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early stopping")
    return trained(folder, "stopped", "--early-stopping-patience", str(PATIENCE))


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events_of(run, "eval")}


def best_step(run: Path) -> int:
    found = losses(run)
    return min(found, key=lambda step: found[step])


def test_a_run_stops_early_with_the_best_model(stopped: Path, capsys: Captured) -> None:
    end, best, found = events_of(stopped, "end")[0], best_step(stopped), losses(stopped)
    assert end["reason"] == "early_stopping"
    assert list(found)[-PATIENCE - 1 :] == list(range(best, end["step"] + 1, 3)), "as many evaluations after the best"
    assert (end["final_step"], end["snapshot"]) == (best, f"step-{end['step']:06d}")
    for target, step in (("", best), ("--snapshot=latest", end["step"])):
        assert json_of(capsys, "eval", stopped, *filter(None, [target]))["loss"] == pytest.approx(found[step], rel=1e-6)
    exported = stopped.parent / "exported"
    assert finish(["export", str(stopped), "--snapshot", "best", "--output", str(exported)], stopped.parent)[0] == 0
    assert (exported / "model.safetensors").read_bytes() == (stopped / "final/model.safetensors").read_bytes()
    assert f"at step {best:,}:" in (stopped / "final/README.md").read_text()
    assert f"of step {best:,}, the best snapshot" in (stopped / "report.html").read_text()


def test_a_run_that_is_killed_before_it_stops_early_is_the_same(stopped: Path) -> None:
    folder, patience = stopped.parent, ("--early-stopping-patience", str(PATIENCE))
    run = folder / "killed"
    process = start(overfitting(folder, run.name, *patience), folder / "cache")
    metrics = run / "metrics.jsonl"

    def between_evaluations_after_the_best() -> bool:
        return (
            metrics.exists()
            and sum('"eval"' in line for line in metrics.read_text().splitlines()) > len(losses(stopped)) - PATIENCE + 1
        )

    assert kill_when(process, between_evaluations_after_the_best) == -9
    trained(folder, run.name, *patience, "--resume")
    last = events_of(stopped, "end")[0]["snapshot"]
    names = {name for name in digests(stopped) if name.startswith(("final", f"snapshots/{last}"))}
    assert {name: digests(run)[name] for name in names} == {name: digests(stopped)[name] for name in names}
    assert record(run) == record(stopped)


def test_a_stopped_run_continues_with_more_patience(stopped: Path) -> None:
    folder = stopped.parent
    whole = trained(folder, "patient", "--early-stopping-patience", str(PATIENCE + 2))
    run = trained(folder, "continued", "--early-stopping-patience", str(PATIENCE))
    trained(folder, run.name, "--early-stopping-patience", str(PATIENCE + 2), "--resume")
    assert record(run)[1:] == record(whole)[1:]
    assert digests(run)["final/model.safetensors"] == digests(whole)["final/model.safetensors"]


def test_the_best_model_is_loaded_at_the_end_if_asked_for(stopped: Path) -> None:
    folder, steps = stopped.parent, events_of(stopped, "end")[0]["step"]
    for name, more in (("best", ["--load_best_model_at_end", "True"]), ("last", [])):
        run = trained(folder, name, *more, training__max_steps=steps, training__lr_scheduler="constant")
        end = events_of(run, "end")[0]
        assert (end["reason"], end["step"]) == ("done", steps)
        assert end["final_step"] == (best_step(run) if more else steps)
        assert best_step(run) < steps
    weights = [digests(folder / name)["final/model.safetensors"] for name in ("best", "last")]
    assert weights[0] != weights[1]


def test_a_damaged_best_snapshot_is_reported_and_the_last_model_is_kept(stopped: Path) -> None:
    folder, patience = stopped.parent, ("--early-stopping-patience", str(PATIENCE))
    run = trained(folder, "damaged", *patience)
    (run / f"snapshots/step-{best_step(run):06d}/model.safetensors").write_bytes(b"torn")
    trained(folder, run.name, *patience, "--resume")
    end = events_of(run, "end")[0]
    assert (end["reason"], end["final_step"]) == ("early_stopping", end["step"])
    assert [event for event in events_of(run, "warning") if "that of the last step" in event["message"]]


@pytest.mark.parametrize("flags", [("--early-stopping-patience", "3"), ("--load-best-model-at-end",)])
def test_stopping_early_needs_evaluations(tmp_path: Path, flags: tuple[str, ...], capsys: Captured) -> None:
    key = flags[0].removeprefix("--").replace("-", "_")
    message = refused(capsys, *overfitting(tmp_path, "run", *flags, training__eval_steps=0))
    assert f"{key} compares evaluations during the run, but eval_steps is 0; set eval_steps" in message


def test_written_answers_are_those_of_the_best_model(tmp_path: Path, capsys: Captured) -> None:
    questions = squad(tmp_path / "squad.json")
    unsteady = {
        "data__validation_name": questions, "training__learning_rate": 0.05, "training__warmup_steps": 0,
        "training__lr_scheduler": "constant", "training__eval_steps": 1,
    }  # fmt: skip
    run = made(tmp_path, "run", "qa", training__load_best_model_at_end="true", **unsteady)
    assert events_of(run, "end")[0]["final_step"] == best_step(run) < 4, "otherwise the test proves nothing"
    written = json.loads((run / "predictions.json").read_text())
    for snapshot, is_same in (("final", True), ("latest", False)):
        lines = printed(capsys, "predict", run, "--data", questions, "--snapshot", snapshot).splitlines()
        assert ([json.loads(line)["answer"] for line in lines] == list(written.values())) is is_same
