"""Starts runs of several processes with torchrun, with mpirun or as forks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.processes import ended, environment, fork_server

SECONDS = 200


def torchrun(processes: int, *more: str) -> list[str]:
    """Returns a torchrun command for this machine."""
    agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *agent, *more, "-m"]


def mpirun(processes: int) -> list[str]:
    """Returns an Open MPI command."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(processes), sys.executable, "-m"]


NEEDS_MPI = shutil.which("mpirun") is None


def start(
    launcher: Sequence[str], arguments: Sequence[str], cache: Path, module: str = "sansgpu", **variables: str
) -> subprocess.Popen[str]:
    """Starts a run of several processes in a new process group, to which tests can send signals."""
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [*launcher, module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**environment(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        start_new_session=True,
    )


def finish(
    launcher: Sequence[str], arguments: Sequence[str], cache: Path, module: str = "sansgpu", **variables: str
) -> tuple[int, str]:
    """Runs a command with several processes; returns its exit code and all output."""
    process = start(launcher, arguments, cache, module, **variables)
    try:
        out, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    return process.returncode, out


def signal_after_snapshot(run: Path, arguments: Sequence[str], cache: Path, number: int) -> None:
    """Starts a run of two processes with torchrun, and sends a signal to its process group once it has a snapshot."""
    process = start(torchrun(2), arguments, cache)
    while process.poll() is None and not list((run / "snapshots").glob("step-*")):
        time.sleep(0.05)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)


def finish_forks(ranks: int, arguments: list[str], cache: Path, module: str = "sansgpu") -> tuple[int, str]:
    """Runs `ranks` forks with torchrun's environment variables; returns the largest exit code and all output.

    Forks start much faster than a launcher and its processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables = {**environment(cache), **address, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        fork_server().start(
            arguments, {**variables, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}, module
        )
        for rank in range(ranks)
    ]
    found = [ended(process) for process in processes]
    return max(abs(code) for code, _, _ in found), "".join(out + err for _, out, err in found)


def spoken(out: str) -> list[str]:
    """Returns the error lines of `sansgpu`, without the launcher's."""
    return [line.partition("sansgpu: ")[2] for line in out.splitlines() if line.startswith("sansgpu: ")]
