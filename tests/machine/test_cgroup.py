"""Memory and CPU limits of containers are read from cgroup files."""

from pathlib import Path

import pytest

from sansgpu.machine import cgroup


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def process(tmp_path: Path) -> Path:
    return tmp_path / "self"


def test_version_2_counts_the_tightest_group_above_and_leaves_files_out(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/pod/box\n")
    write(
        tmp_path,
        {
            "pod/memory.max": "8000", "pod/memory.current": "3000", "pod/memory.stat": "anon 1\ninactive_file 500",
            "pod/box/memory.max": "max", "pod/box/memory.current": "2000", "pod/box/memory.stat": "inactive_file 0",
            "pod/cpu.max": "max 100000", "pod/box/cpu.max": "150000 100000",
        },
    )  # fmt: skip
    assert cgroup.available_memory(tmp_path, process) == 8000 - (3000 - 500)
    assert cgroup.memory_limit(tmp_path, process) == 8000
    assert cgroup.cpu_quota(tmp_path, process) == 1.5


def test_cgroup_version_1_beside_version_2(tmp_path: Path, process: Path) -> None:
    process.write_text("5:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
    write(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/docker/x/memory.limit_in_bytes": "5000",
            "memory/docker/x/memory.usage_in_bytes": "4000",
            "memory/docker/x/memory.stat": "inactive_file 1\ntotal_inactive_file 600",
            "cpu,cpuacct/docker/x/cpu.cfs_quota_us": "50000",
            "cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000",
        },
    )
    assert cgroup.available_memory(tmp_path, process) == 5000 - (4000 - 600)
    assert cgroup.cpu_quota(tmp_path, process) == 0.5


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/kubepods/pod7/box\n")
    write(tmp_path, {"memory.max": "700", "memory.current": "900", "memory.stat": ""})
    assert cgroup.available_memory(tmp_path, process) == 0


def test_cached_files_count_as_available_memory_except_a_share_of_active_ones(tmp_path: Path, process: Path) -> None:
    process.write_text("0::/\n")
    gigabyte = 1 << 30
    files = f"inactive_file {gigabyte}\nactive_file {3 * gigabyte}"
    write(tmp_path, {"memory.max": str(8 * gigabyte), "memory.current": str(7 * gigabyte), "memory.stat": files})
    assert cgroup.available_memory(tmp_path, process) == int(4.5 * gigabyte)


def test_no_limit_is_none(tmp_path: Path, process: Path) -> None:
    assert cgroup.available_memory(tmp_path, process) is None
    process.write_text("0::/\n")
    write(tmp_path, {"memory.max": "max", "cpu.max": "max 100000"})
    assert cgroup.available_memory(tmp_path, process) is None
    assert cgroup.memory_limit(tmp_path, process) is None
    assert cgroup.cpu_quota(tmp_path, process) is None
