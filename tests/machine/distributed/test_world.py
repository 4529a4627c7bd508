"""Rank, world size, cores and network interface are found from the launcher's variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sansgpu.config import ConfigError
from sansgpu.machine import cores
from sansgpu.machine.cores import Cpu
from sansgpu.machine.distributed.rendezvous import interface_for, interfaces, is_loopback, route_to
from sansgpu.machine.distributed.world import find_world, threads_from_environment

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "3", "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "1",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("environment", "launcher", "rank", "address"),
    [
        (TORCHRUN, "torchrun", 3, "head"),
        (OPEN_MPI, "Open MPI", 1, "127.0.0.1"),
        (MPICH, "MPICH or Intel MPI", 2, "127.0.0.1"),
        (SRUN, "srun", 0, "10.0.0.1"),
        ({**OPEN_MPI, **SRUN}, "Open MPI", 1, "127.0.0.1"),  # mpirun inside a Slurm allocation
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "1"}, "torchrun", 0, "head"),
    ],
)
def test_every_launcher_is_understood(environment: dict[str, str], launcher: str, rank: int, address: str) -> None:
    world = find_world(environment)
    assert (world.launcher, world.rank, world.size, world.address) == (launcher, rank, 4, address)
    assert world.port > 0


def test_restarts_and_the_store_of_torchrun_are_recognized() -> None:
    world = find_world(TORCHRUN)
    assert world.hosted
    assert world.restarts == 1
    assert world.port == 1234
    assert not find_world({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).hosted


def test_one_process_alone_is_no_group() -> None:
    assert find_world({}).size == 1
    assert find_world({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}).launcher == ""
    assert find_world({}).note is None


def test_a_single_process_of_several_requested_ones_is_reported() -> None:
    note = find_world({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}).note
    assert note is not None
    assert "start it with srun" in note


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"PMI_SIZE": "2", "PMI_RANK": "5"}, "PMI_RANK is 5"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
        ({**SRUN, "SLURM_LAUNCH_NODE_IPADDR": ""}, "MASTER_ADDR"),
    ],
)
def test_what_is_not_whole_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_world(environment)


def test_jobs_side_by_side_have_ports_of_their_own() -> None:
    ports = {find_world({**OPEN_MPI, "PMIX_NAMESPACE": str(job)}).port for job in range(980090881, 980090889)}
    assert len(ports) > 5


def test_a_binding_that_nobody_asked_for_may_be_undone() -> None:
    assert find_world(OPEN_MPI).unbound
    assert not find_world({**OPEN_MPI, "OMPI_MCA_hwloc_base_binding_policy": "core"}).unbound
    assert not find_world({**OPEN_MPI, "OMPI_MCA_rmaps_base_mapping_policy": "socket"}).unbound
    assert not find_world(MPICH).unbound


def test_the_thread_count_that_torchrun_sets_is_ignored() -> None:
    assert threads_from_environment({}) is None
    assert threads_from_environment({"OMP_NUM_THREADS": "3,2"}) == 3
    assert threads_from_environment({**TORCHRUN, "OMP_NUM_THREADS": "1"}) is None
    assert threads_from_environment({**TORCHRUN, "OMP_NUM_THREADS": "8"}) == 8
    assert threads_from_environment({**TORCHRUN, "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "1"}) == 1


def machine(folder: Path, nodes: int, cores_each: int, threads: int) -> Path:
    """Writes a /sys/devices/system in which, as usual, second hardware threads are numbered after all cores."""
    whole = nodes * cores_each
    for node in range(nodes):
        numbers = [t * whole + node * cores_each + c for t in range(threads) for c in range(cores_each)]
        place = folder / f"node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(",".join(map(str, numbers)) + "\n")
        for number in numbers:
            topology = folder / f"cpu/cpu{number}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{node}\n")
            (topology / "core_id").write_text(f"{number % cores_each}\n")
    return folder


def test_cores_are_read_with_their_numa_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    found = cores.cpus(machine(tmp_path, nodes=2, cores_each=4, threads=2))
    assert [cpu.node for cpu in found] == [0] * 8 + [1] * 8
    assert len(cores.physical_cores(found)) == 8
    halves = [cores.partition(found, index, 2) for index in range(2)]
    assert [{cpu.node for cpu in half} for half in halves] == [{0}, {1}]
    assert {cpu.number for cpu in halves[0]} == {0, 1, 2, 3, 8, 9, 10, 11}


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2), st.integers(1, 12))
def test_shares_are_whole_cores_and_all_of_them(nodes: int, each: int, threads: int, parts: int) -> None:
    found = [Cpu(n, n, c, t * nodes * each + n * each + c)
             for n in range(nodes) for c in range(each) for t in range(threads)]  # fmt: skip
    shares = [cores.partition(found, index, parts) for index in range(parts)]
    assert all(len(share) % threads == 0 and share for share in shares)
    if parts <= nodes * each:
        assert sorted(cpu for share in shares for cpu in share) == sorted(found)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= threads
    if nodes % parts == 0:
        assert all(len({cpu.node for cpu in share}) == nodes // parts for share in shares)


@given(st.lists(st.integers(0, 99), unique=True))
def test_a_cpu_list_of_the_kernel_is_parsed(numbers: list[int]) -> None:
    assert cores.parse_cpu_list(",".join(map(str, numbers))) == numbers
    assert cores.parse_cpu_list("0-3,8\n") == [0, 1, 2, 3, 8]
    assert cores.parse_cpu_list("\n") == []


def test_a_process_keeps_to_its_cores() -> None:
    script = (
        "import json, os; from sansgpu.machine import cores; from sansgpu.machine.distributed.world import unbind\n"
        "mine = cores.partition(cores.cpus(), 0, max(1, len(cores.physical_cores(cores.cpus()))))\n"
        "cores.bind(mine); bound = sorted(os.sched_getaffinity(0)); unbind()\n"
        "print(json.dumps([[c.number for c in mine], bound, len(os.sched_getaffinity(0))]))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    mine, bound, after = json.loads(out)
    assert bound == sorted(mine)
    assert after >= len(os.sched_getaffinity(0))


def test_the_way_to_rank_0_names_the_interface() -> None:
    assert route_to("127.0.0.1") == ("127.0.0.1", "127.0.0.1")
    name, address = interface_for("127.0.0.1", None)
    assert address in interfaces()[name]
    assert is_loopback(address)
    assert interface_for("127.0.0.1", name) == (name, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"training.network_interface is eth77, but .* has "):
        interface_for("127.0.0.1", "eth77")
    with pytest.raises(ConfigError, match="has no route to no-such-host"):
        route_to("no-such-host.invalid")
