"""The monitor measures real load, memory and disk use."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sansgpu.machine import cgroup
from sansgpu.machine.description import energy_joules
from sansgpu.machine.distributed.peers import this_process
from sansgpu.machine.monitor import Monitor, mean_of, usable_cpus


def watched(folder: Path, work: Callable[[], object]) -> dict[str, Any]:
    monitor = Monitor(seconds=0.1)
    monitor.start(folder)
    work()
    time.sleep(0.25)
    seen = monitor.mean()
    monitor.stop()
    assert seen is not None
    return seen


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_work_and_writes_of_this_process_are_measured(tmp_path: Path) -> None:
    def work() -> None:
        busy(1.0)
        with (tmp_path / "file").open("wb") as file:
            file.write(bytes(50 << 20))
            file.flush()
            os.fsync(file.fileno())

    seen = watched(tmp_path, work)
    assert seen["cpu_percent"] > 20  # other tests may use the core, too
    assert seen["rss_bytes"] > 10 << 20
    assert 0 < seen["memory_available_bytes"] < seen["memory_limit_bytes"]
    assert seen["disk_free_bytes"] > 0
    assert all(0 <= core <= 100 for core in seen["core_percent"])
    if sys.platform == "linux":
        assert seen["minor_faults_per_second"] > 0


def test_a_neighbor_is_seen(tmp_path: Path) -> None:
    program = "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass"
    neighbor = subprocess.Popen([sys.executable, "-c", program])
    seen = watched(tmp_path, lambda: time.sleep(1.5))
    neighbor.wait()
    assert seen["other_percent"] + seen["stolen_percent"] > 40
    assert seen["cpu_percent"] < 60


def test_without_a_new_sample_the_last_one_is_returned(tmp_path: Path) -> None:
    monitor = Monitor(seconds=0.05)
    assert monitor.mean() is None
    monitor.start(tmp_path)
    while monitor.latest() is None:
        time.sleep(0.01)
    monitor.stop()
    first = monitor.mean()
    assert first is not None
    assert monitor.mean() == monitor.latest()


def test_means_sum_events_and_ignore_missing_values() -> None:
    samples: list[dict[str, Any]] = [
        {"throttled": 1, "watts": None, "rss_bytes": 5, "memory_available_bytes": 9, "core_percent": [0.0, 100.0]},
        {"throttled": 2, "watts": 30.0, "rss_bytes": 3, "memory_available_bytes": 4, "core_percent": [50.0, 50.0]},
    ]
    assert mean_of(samples) == {
        "throttled": 3, "watts": 30.0, "rss_bytes": 5, "memory_available_bytes": 4, "core_percent": [25.0, 75.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"), [("cpu.stat", "throttled_usec 2500000"), ("cpu.stat", "throttled_time 2500000000")]
)
def test_throttled_time_is_read_in_both_cgroup_versions(tmp_path: Path, name: str, line: str) -> None:
    process = tmp_path / "self"
    process.write_text("0::/box\n")
    (tmp_path / "root/box").mkdir(parents=True)
    assert cgroup.throttled_seconds(tmp_path / "root", process) is None
    (tmp_path / "root/box" / name).write_text(f"nr_periods 4\n{line}\n")
    assert cgroup.throttled_seconds(tmp_path / "root", process) == 2.5


def test_energy_is_summed_over_readable_packages(tmp_path: Path) -> None:
    assert energy_joules(tmp_path) is None
    for package, count in enumerate((3_000_000, 4_000_000)):
        (tmp_path / f"intel-rapl:{package}").mkdir()
        (tmp_path / f"intel-rapl:{package}" / "energy_uj").write_text(str(count))
    (tmp_path / "intel-rapl:0:0").mkdir()  # part of package 0, which already counts it
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("1000000")
    assert energy_joules(tmp_path) == 7.0


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no CPU affinity")
def test_processors_shared_with_the_runs_other_processes_count_once() -> None:
    own = os.sched_getaffinity(0)
    elsewhere = replace(this_process(), cpus=[max(own) + 1])
    assert usable_cpus([this_process()]) == len(own)
    assert usable_cpus([this_process(), elsewhere]) == len(own) + 1
