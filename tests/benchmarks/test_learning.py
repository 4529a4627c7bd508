"""Benchmarks of fine-tuning, graphs and recipes run with toy sizes."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tools.tiny_model import make_folder
from transformers import AutoModelForSequenceClassification

from tests.benchmarks.running import benchmark
from tests.processes import as_options, environment, options, write_corpus, write_rows
from tests.project import ROOT
from tests.tasks.folders import chat_rows, conll, labeled_rows, sentence, squad
from tests.tasks.graph.graphs import rows
from tests.tasks.texts import text_rows

TINY_GRAPH = (
    "model.vocab_size=600", "model.d_model=32", "model.n_heads=2", "model.n_layers=2", "model.d_ff=64",
    "model.max_seq_len=40", "model.n_relations=null", "data.vocab_size=600", "training.batch_size=1",
)  # fmt: skip


@pytest.mark.long
def test_link_prediction_on_a_small_graph_is_measured_beside_its_baseline(tmp_path: Path) -> None:
    tiny = ["model.d_model=32", "model.n_heads=2", "model.n_layers=1", "training.compile=off", "training.eval_steps=0"]
    changes = as_options(tiny)
    (row,) = benchmark(
        "benchmarks.graph.small_graph", "--steps", "2", *changes, cache=tmp_path, result=tmp_path / "graph.json"
    )["rows"]
    assert (row["candidates"], row["queries"]) == (135, 655)
    assert 0.6 < row["relation_frequency_mrr"] < 0.7
    assert 0 < row["mrr"] < 1
    assert row["cpu_minutes"] > 0


@pytest.mark.long
def test_a_student_is_compared_with_one_that_learns_alone(tmp_path: Path) -> None:
    model, texts = make_folder(tmp_path / "model", "llama"), write_corpus(tmp_path / "texts.jsonl", 300)
    arguments = ["--teacher", str(model), "--data", str(texts), "--tokens", "8192", "--ratios", "0.5"]
    small = {"model.d_model": 32, "model.n_heads": 2, "model.n_layers": 1, "model.max_seq_len": 64}
    arguments += options(small)
    alone, taught = benchmark(
        "benchmarks.fine_tuning.distillation", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert alone["tokens"] == pytest.approx(2 * taught["tokens"], rel=0.2)
    assert alone["loss"] > 0 < taught["loss"]


@pytest.mark.long
def test_shared_beginnings_save_their_tokens(tmp_path: Path) -> None:
    arguments = ["--model", str(make_folder(tmp_path / "model", "llama")), "--rounds", "1"]
    found = benchmark(
        "benchmarks.fine_tuning.shared_beginnings", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert [row["computed"] for row in found] == [1280, 512, 1500, 1733]
    assert all(row["difference"] < 1e-4 for row in found)


@pytest.mark.long
def test_losses_in_integers_are_compared_with_those_in_fp32(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=300)
    arguments = ["--data", str(data), "--sizes", "1M", "--seeds", "2", "--steps", "3", "--precisions", "int16"]
    exact, integers = benchmark(
        "benchmarks.recipe.precisions", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert [exact["precision"], integers["precision"]] == ["fp32", "int16"]
    assert len(exact["losses"]) == len(integers["losses"]) == 2
    assert exact["losses"] != integers["losses"]
    assert abs(integers["difference"]) < 1


@pytest.mark.long
def test_fine_tuning_is_measured_beside_a_trainer(tmp_path: Path) -> None:
    model, talk = make_folder(tmp_path / "model", narrow=True), chat_rows(tmp_path / "rows.jsonl")
    arguments = ["--data", str(talk), "--model", str(model), "--steps", "2", "--rounds", "1"]
    found = benchmark("benchmarks.fine_tuning.trainer", *arguments, cache=tmp_path, result=tmp_path / "result.json")[
        "rows"
    ]
    assert [row["status"] for row in found] == ["measured"] * 9
    assert all(row["tokens_per_second"] > 0 for row in found)
    assert found[0]["loss"] == pytest.approx(found[2]["loss"], rel=0.02)  # full fine-tuning in bf16: ours and theirs


@pytest.mark.long
@pytest.mark.parametrize("task", ["qa", "classify", "tokens", "embed"])
def test_tasks_of_understanding_are_trained_beside_a_peer(tmp_path: Path, task: str) -> None:
    """The last batch of the epoch is smaller than the others."""
    data = tmp_path / {"qa": "rows.json", "tokens": "rows.conll"}.get(task, "rows.jsonl")
    if task == "embed":
        text_rows(data, "scores", count=18)
    else:
        {"qa": squad, "classify": labeled_rows, "tokens": conll}[task](data)
    model = str(make_folder(tmp_path / "model", "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    arguments = ["--task", task, "--model", model, "--train", str(data), "--dev", str(data), "--epochs", "2"]
    arguments += ["--batch", "5", "--learning-rate", "1e-9"]  # so that only rounding makes the scores differ
    ours, theirs = benchmark(
        "benchmarks.fine_tuning.understanding", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    runs = ours["runs"][0], theirs["runs"][0]
    assert runs[0]["tokens"] == runs[1]["tokens"]
    assert len(set(runs[0]["tokens"])) > 1
    assert ours["measure"] == theirs["measure"]
    assert ours["ratio"] == pytest.approx(ours["tokens_per_second"] / theirs["tokens_per_second"])
    if task == "embed":  # no head is randomly initialized
        assert runs[0]["losses"] == pytest.approx(runs[1]["losses"], rel=0.02)
        assert ours["quality"] == pytest.approx(theirs["quality"], abs=0.02)


@pytest.mark.long
def test_the_time_to_a_peers_score_is_measured(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    labeled_rows(data)
    model = str(make_folder(tmp_path / "model", "bert"))
    arguments = ["--task", "classify", "--model", model, "--train", str(data), "--dev", str(data), "--epochs", "2"]
    arguments += ["--batch", "5", "--learning-rate", "1e-9", "--evaluations", "2"]
    ours, theirs = benchmark(
        "benchmarks.fine_tuning.time_to_score", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert ours["runs"][0]["seconds"] > 0
    assert theirs["ratio"] == 1
    reached = [score for _, score in ours["runs"][0]["scores"] if score >= theirs["quality"]]
    assert (ours["seconds_to_score"] < float("inf")) == bool(reached)


@pytest.mark.long
@pytest.mark.parametrize("task", ["encode", "predict"])
def test_vectors_and_labels_are_compared_with_those_of_a_peer(tmp_path: Path, task: str) -> None:
    documents, model = tmp_path / "documents.jsonl", make_folder(tmp_path / "model", "bert")
    documents.write_text(json.dumps({"text": sentence(random.Random(0), 4000)}) + "\n", encoding="utf-8")
    if task == "predict":
        AutoModelForSequenceClassification.from_pretrained(model).save_pretrained(model)
    arguments = ["--task", task, "--model", str(model), "--data", str(documents), "--texts", "8", "--rounds", "1"]
    arguments += ["--batches", "4"]
    *theirs, ours = benchmark(
        "benchmarks.serving.inference", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert len(theirs) == 2  # in fp32 and in bf16
    assert ours["agreement"] > (0.99 if task == "encode" else 0.7)  # in bf16 a label may differ
    assert ours["ratio"] == pytest.approx(ours["texts_per_second"] / max(row["texts_per_second"] for row in theirs))


@pytest.mark.long
def test_the_smoke_trains_resumes_and_talks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.smoke", "--keep", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ended in the same state" in done.stdout
    assert "\n\n\n" not in done.stdout


@pytest.mark.long
def test_graphs_are_learned_beside_a_plain_model(tmp_path: Path) -> None:
    """Both start with the same loss on the same masks."""
    changes = as_options(TINY_GRAPH)
    data = str(write_rows(tmp_path / "rows.jsonl", rows()))
    arguments = [*changes, "--data", data, "--steps", "2", "--set", "model.dropout=0"]
    found = benchmark("benchmarks.graph.encoder", *arguments, cache=tmp_path, result=tmp_path / "result.json")["rows"]
    assert [row["status"] for row in found] == ["measured"] * 4
    assert [row["logits_of"] for row in found] == ["masked nodes", "all nodes"] * 2
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=0.05)
    assert all(row["nodes_per_second"] > 0 for row in found)


@pytest.mark.long
def test_the_ablation_benchmark_leaves_out_each_part_of_the_method(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows(30))
    changes = as_options((*TINY_GRAPH, f"data.dataset_name={data}"))
    arguments = [*changes, "--steps", "2", "--set", "data.validation_split=0.3"]
    found = benchmark("benchmarks.graph.ablations", *arguments, cache=tmp_path, result=tmp_path / "result.json")["rows"]
    assert [row["name"] for row in found][:3] == [
        "as configured",
        "relations shuffled in training",
        "no leaves in training",
    ]
    assert len(found) == 8
    assert all(0 <= row["mlm_acc"] <= 1 for row in found)


@pytest.mark.long
def test_reference_runs_are_equal_until_something_changes(tmp_path: Path) -> None:
    recorded = tmp_path / "runs.json"

    def reference_runs(action: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.reference_runs", action, str(recorded), "--kinds", "qa"]
        return subprocess.run(command, cwd=ROOT, env=environment(tmp_path / "cache"), capture_output=True, text=True)

    assert reference_runs("record").returncode == 0
    results = json.loads(recorded.read_text())
    weights = results["qa"]["resumed"]
    assert weights == results["qa"]["trained"]
    assert any(name.startswith("final/") for name in weights)
    assert reference_runs("compare").returncode == 0
    weights["metrics.jsonl"] = "0" * 64
    recorded.write_text(json.dumps(results))
    changed = reference_runs("compare")
    assert changed.returncode == 1
    assert changed.stdout.startswith("/qa/resumed/metrics.jsonl: ")
