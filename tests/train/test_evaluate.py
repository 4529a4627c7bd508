"""Evaluation uses the whole validation split and changes no state."""

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
from tests.processes import TINY, finish, kill_when, record, settings, start, write_corpus

EXECUTION = Execution(3)


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
