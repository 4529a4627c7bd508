"""Every benchmark command runs with toy sizes."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from benchmarks.critical_path import compile_recorder
from benchmarks.critical_path_worker import makespan
from benchmarks.distributed.hosts import refused
from tools.tiny_model import make_folder
from transformers import AutoModelForSequenceClassification

from sansgpu.machine.instruction_sets import supported
from tests.processes import as_options, environment, options, settings, write_corpus, write_rows
from tests.tasks.folders import chat_rows, conll, labeled_rows, sentence, squad
from tests.tasks.graph.graphs import rows
from tests.tasks.texts import text_rows

ROOT = Path(__file__).parent.parent


def benchmark(module: str, *arguments: str, cache: Path, result: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *arguments, "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(result.read_text())
    assert results["machine"]["packages"]["torch"]
    return results


def test_our_kernels_are_measured_beside_torchs(tmp_path: Path) -> None:
    results = benchmark(
        "benchmarks.speed.kernels", "--quick", "--repeats", "3", cache=tmp_path, result=tmp_path / "kernels.json"
    )
    kinds = {row["name"].split()[0] for row in results["rows"]}
    assert kinds == {"attention", "loss", "linear"}
    for row in results["rows"]:
        assert row["median_seconds"] > 0
        assert row["peer_median_seconds"] > 0
        assert row["ratio"] > 0


@pytest.mark.long
def test_our_products_are_measured_beside_torchs_for_each_instruction_set(tmp_path: Path) -> None:
    results = benchmark(
        "benchmarks.speed.products", "--quick", "--repeats", "3", cache=tmp_path, result=tmp_path / "products.json"
    )
    measured = [(row["instructions"], row["dtype"]) for row in results["rows"]]
    assert measured == [(found.name, dtype) for found in supported() for dtype in ("bf16", "fp32")]
    for row in results["rows"]:
        assert row["ours"] > 0
        assert row["torch"] > 0


@pytest.mark.long
def test_peers_train_the_same_size_on_the_same_data(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=300)
    arguments = f"--size tiny --peers plain,hf-fp32 --steps 2 --rounds 1 --data {data}".split()
    results = benchmark("benchmarks.speed.peers", *arguments, cache=tmp_path, result=tmp_path / "peers.json")
    found = {row["name"]: row for row in results["rows"]}
    assert list(found) == ["sansgpu", "plain", "hf-fp32"]
    if not find_spec("accelerate"):
        assert found.pop("hf-fp32")["status"] == "not installed: accelerate"
    for row in found.values():
        assert row["status"] == "measured"
        assert len(row["runs"][0]["step_seconds"]) == 2
        assert row["median_step_seconds"] > 0
        assert row["peak_rss_bytes"] > 100e6
        assert 3 < row["loss"] < 7  # ln 300 is 5.7
    assert {name: row["documents"] for name, row in found.items() if name != "hf-fp32"} == {
        "sansgpu": "apart", "plain": "seen across",
    }  # fmt: skip
    assert found["sansgpu"]["ratio"] == 1
    assert found["plain"]["ratio"] > 0


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be pinned to a core here")
def test_a_run_is_measured_beside_busy_processes(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.jsonl", documents=300)
    arguments = ["--size", "tiny", "--steps", "2", "--rounds", "1", "--data", str(data)]
    alone, *beside = benchmark(
        "benchmarks.speed.neighbor", *arguments, cache=tmp_path, result=tmp_path / "result.json"
    )["rows"]
    assert (alone["status"], alone["beside"]) == ("measured", "nothing")
    assert [row["beside"] for row in beside] == ["a busy process", "a half busy process"]
    cores = len(os.sched_getaffinity(0))
    for row in beside:
        assert row["ratio"] == pytest.approx(row["tokens_per_second"] / alone["tokens_per_second"])
        assert row["fair_ratio"] == pytest.approx(row["ratio"] * cores / (cores - 0.5))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of threads is only recorded on Linux")
def test_the_longest_path_with_more_threads_is_shorter(tmp_path: Path) -> None:
    arguments = ["--size", "tiny", "--threads", "2,16", "--steps", "2"]
    results = benchmark("benchmarks.critical_path", *arguments, cache=tmp_path, result=tmp_path / "result.json")
    assert [row["threads"] for row in results["rows"]] == [2, 16]
    for row in results["rows"]:
        assert row["projected_speedup"] == pytest.approx(row["work_seconds"] / row["longest_path_seconds"])
        serial = [region["seconds"] for region in row["serial_regions"]]
        assert serial == sorted(serial, reverse=True)
        assert 0 < sum(serial) < row["longest_path_seconds"]
        assert sum(operation["share"] for operation in row["operations"]) == pytest.approx(1)
    promised = ("work_seconds", "longest_path_seconds", "projected_speedup", "serial_regions")
    assert {key: results[key] for key in promised} == {key: results["rows"][-1][key] for key in promised}


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU time of threads is only recorded on Linux")
def test_the_time_of_each_thread_of_a_region_is_recorded(tmp_path: Path) -> None:
    library = compile_recorder(tmp_path)
    program = f"""
import torch
from benchmarks.critical_path_worker import RegionRecorder
torch.set_num_threads(4)
a = torch.ones(1000, 1000)
a @ a
regions, serial = RegionRecorder({library!r}).record(lambda: a @ a)
print(regions["work_ns"].sum() / regions["longest_ns"].sum(), serial)
"""
    passive = {"LD_PRELOAD": library, "OMP_WAIT_POLICY": "passive", "OMP_DYNAMIC": "FALSE"}
    command, variables = [sys.executable, "-c", program], {**environment(tmp_path), **passive}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    threads, serial = map(float, done.stdout.split())
    assert 2 < threads <= 4
    assert 0 < serial < 0.1


def test_units_go_to_the_thread_that_is_free_first() -> None:
    assert makespan([3, 1, 1, 1, 4], 2) == 7
    assert makespan([3, 1, 1, 1, 4], 1) == 10
    assert makespan([3, 1], 64) == 3
    assert makespan([], 4) == 0


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
def test_memory_as_planned_is_measured_beside_a_run(tmp_path: Path) -> None:
    (row,) = benchmark("benchmarks.speed.memory", "--quick", cache=tmp_path, result=tmp_path / "memory.json")["rows"]
    assert row["peak_rss_bytes"] > 100e6
    assert abs(row["error"]) < 0.3


@pytest.mark.long
def test_time_as_planned_is_measured_beside_a_run(tmp_path: Path) -> None:
    arguments = ["--quick", "--minutes", "0.02"]
    (row,) = benchmark("benchmarks.speed.forecast", *arguments, cache=tmp_path, result=tmp_path / "forecast.json")[
        "rows"
    ]
    assert row["steps"] >= 3
    assert row["planned_seconds"] > 0
    assert row["measured_seconds"] > 0


@pytest.mark.long
def test_measurements_on_two_hosts_are_compared_with_estimates(tmp_path: Path) -> None:
    if reason := refused():
        pytest.skip(reason)
    arguments = ["--size", "toy", "--steps", "2"]
    rows = benchmark("benchmarks.distributed.cluster", *arguments, cache=tmp_path, result=tmp_path / "cluster.json")[
        "rows"
    ]
    assert [row.get("status") for row in rows] == [None] * len(rows)
    hosts = {row["name"]: row for row in rows if "estimated_seconds" in row}
    assert list(hosts) == ["unshaped", "5gbit", "1gbit", "100mbit"]
    assert hosts["100mbit"]["communication_seconds"] > hosts["1gbit"]["communication_seconds"] > 0


@pytest.mark.long
def test_engines_keep_the_contracts_that_they_can(tmp_path: Path) -> None:
    """Two processes, and half as many after a resume, compute the same steps as one; a lost rank ends the others."""
    arguments = ["--size", "tiny", "--steps", "1", "--rounds", "1", "--comparisons", "optimizer"]
    rows = benchmark("benchmarks.distributed.engines", *arguments, cache=tmp_path, result=tmp_path / "engines.json")[
        "rows"
    ]
    timed = {row["name"]: row for row in rows if row["comparison"] == "optimizer"}
    assert list(timed) == ["ours, ZeRO-1", "ours again", "DDP, ZeroRedundancyOptimizer"]
    for row in timed.values():
        assert row["median_step_seconds"] > 0
        assert row["cpu_seconds"] > 0
        assert row["peak_rss_bytes"] > 100e6
    ours, theirs = (row for row in rows if row["comparison"] == "contracts")
    for row in (ours, theirs):
        assert max(row["loss_error"], row["gradient_error"], row["elastic_error"]) < 1e-4
        assert row["equal_on_repeat"]
        assert row["lost_seconds"] < 60
    assert ours["equal_on_resume"]
    assert ours["lost_rank_named"]
    assert not theirs["lost_rank_named"]


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


TINY_GRAPH = (
    "model.vocab_size=600", "model.d_model=32", "model.n_heads=2", "model.n_layers=2", "model.d_ff=64",
    "model.max_seq_len=40", "model.n_relations=null", "data.vocab_size=600", "training.batch_size=1",
)  # fmt: skip


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
def test_steps_with_a_picture_are_compared_with_those_around_them(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl")
    small = {"data__dataset_name": corpus, "training__logging_steps": 1, "training__eval_steps": 0}
    results = benchmark(
        "benchmarks.speed.live_view",
        "--pictures",
        "4",
        *settings(**small),
        cache=tmp_path / "cache",
        result=tmp_path / "live.json",
    )
    assert results["pictures"] >= 3
    assert results["seconds_between"] > 0.25
    assert 0.5 < results["ratio"] < 1.5


@pytest.mark.long
@pytest.mark.parametrize("how", ["", "--signals", "--disk"])
def test_disturbed_runs_end_as_undisturbed_ones(tmp_path: Path, how: str) -> None:
    if how == "--disk" and (os.geteuid() or not sys.platform.startswith("linux")):
        pytest.skip("mounting a small disk requires Linux and root")
    arguments = ["--kills", "6", "--kinds", "GPT-2,LoRA,sharded", *([how] if how else [])]
    found = benchmark("tools.chaos", *arguments, cache=tmp_path / "cache", result=tmp_path / "chaos.json")["rows"]
    assert sum(len(row["disturbed"]) for row in found) >= 6
    assert [row["differences"] for row in found] == [[]] * len(found)


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
