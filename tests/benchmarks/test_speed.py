"""Benchmarks of speed, memory and several processes run with toy sizes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.critical_path import compile_recorder
from benchmarks.critical_path_worker import makespan
from benchmarks.distributed.hosts import refused

from sansgpu.machine.instruction_sets import supported
from tests.benchmarks.running import benchmark
from tests.processes import environment, settings, write_corpus
from tests.project import ROOT


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
