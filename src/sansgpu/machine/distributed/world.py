"""What the launcher decided: rank, world size and rendezvous address from its environment variables, and processors."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate

LOOPBACK = "127.0.0.1"
# Variables of each launcher: rank, world size, and processes on this machine.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
}
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# Variables that identify a job, so that jobs on the same machine use different ports.
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_STEP_ID")
_PORTS = range(29500, 30500)
_WHOLE = re.compile(r"[0-9]{1,18}")
_TRAINJOB = "KUBEFLOW_TRAINER_SERVER"


@dataclass(frozen=True)
class World:
    """The rank of this process and the size of its run. `address` and `port` are those of the rendezvous store."""

    rank: int = 0
    size: int = 1
    launcher: str = ""  # empty: started without a launcher
    address: str = LOOPBACK
    port: int = 0
    hosted: bool = False  # the launcher hosts the store, not rank 0
    restarts: int = 0  # how often the launcher restarted this run after losing a process
    unbound: bool = False  # ignore the launcher's core binding, which the user did not request
    note: str | None = None  # a message for the user


def require_one_process(command: str) -> None:
    """Raises ConfigError if a launcher has started several processes, which would write the same files."""
    if (size := find_world().size) > 1:
        raise ConfigError(
            f"sansgpu {command} runs in one process, which uses all cores, but {size} were started; start it without "
            "torchrun, mpirun or srun."
        )


def find_world(environment: Mapping[str, str] = os.environ) -> World:
    """Reads the launcher's variables. Raises ConfigError if they are incomplete."""
    for launcher, (rank_key, size_key, local_key) in _LAUNCHERS.items():
        size = _number(environment, size_key)
        if size is None or (size == 1 and launcher != "torchrun"):
            continue
        rank = _number(environment, rank_key)
        if rank is None or not 0 <= rank < size:
            raise ConfigError(
                f"{size_key} is {size}, but {rank_key} is {environment.get(rank_key) or 'not set'}: start all "
                "processes of the run with torchrun, mpirun or srun, which set both."
            )
        elastic = launcher == "torchrun" and "TORCHELASTIC_RUN_ID" in environment
        one_machine = size == 1 or environment.get(local_key) == str(size)
        return World(
            rank,
            size,
            launcher,
            _address(environment, one_machine),
            _port(environment) or _job_port(environment, one_machine),
            hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=(_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0) if elastic else 0,
            unbound=launcher == "Open MPI" and not any("_policy" in k and "base_" in k for k in environment),
        )
    tasks = _number(environment, "SLURM_NTASKS") or 1
    alone = f"this Slurm job has {tasks} tasks, but only one process was started; start it with srun to use all of them"
    return World(note=f"{alone}." if tasks > 1 and "SLURM_STEP_NUM_TASKS" not in environment else None)


def allowed_cpus() -> list[int]:
    """Returns the numbers of the logical processors this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def unbind() -> None:
    """Lets this process run on every processor that its container allows."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class StatusServer(NamedTuple):
    """The server of Kubeflow Trainer, with the files of the token and of the certificate of its authority."""

    url: str
    token: Path
    ca_cert: str | None


def find_status_server() -> StatusServer | None:
    """Returns the server that Kubeflow Trainer names if its feature TrainJobStatus is enabled, else None."""
    url, token = os.environ.get(f"{_TRAINJOB}_URL"), os.environ.get(f"{_TRAINJOB}_TOKEN")
    return StatusServer(url, Path(token), os.environ.get(f"{_TRAINJOB}_CA_CERT")) if url and token else None


def grace_seconds(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns the seconds from a signal to SIGKILL, or None if they are unknown.

    torchrun kills its processes after this variable's time; the files of `sansgpu k8s` and `sansgpu slurm` set it.
    """
    return _number(environment, SHUTDOWN_TIMEOUT)


def threads_from_environment(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns OMP_NUM_THREADS if the user has set it, or None.

    torchrun sets it to 1 for several processes, so that value is ignored there. Like OpenMP, this ignores values that
    are not positive numbers.
    """
    text = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = (int(text) or None) if _WHOLE.fullmatch(text) else None
    several = "TORCHELASTIC_RUN_ID" in environment and environment.get("LOCAL_WORLD_SIZE") != "1"
    return None if threads == 1 and several else threads


def _number(environment: Mapping[str, str], key: str) -> int | None:
    """Returns an integer variable of a launcher, or None if it is not set. Raises ConfigError for other values."""
    text = environment.get(key, "").strip()
    if not text:
        return None
    if not _WHOLE.fullmatch(text):
        raise ConfigError(
            f"{key} is {truncate(text)}, but must be an integer, which launchers set; unset or correct it."
        )
    return int(text)


def _port(environment: Mapping[str, str]) -> int | None:
    port = _number(environment, "MASTER_PORT")
    if port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {port}; set it to a port from 1 to 65535.")
    return port


def _address(environment: Mapping[str, str], one_machine: bool) -> str:
    if chosen := environment.get("MASTER_ADDR"):
        return chosen
    if one_machine or environment.get("SLURM_STEP_NUM_NODES") == "1":
        return LOOPBACK
    if first := environment.get("SLURM_SRUN_COMM_HOST") or environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return first
    raise ConfigError(
        "the processes are on several hosts, but MASTER_ADDR is not set; set it to the host of rank 0: "
        "mpirun -x MASTER_ADDR=HOST ..., or MASTER_ADDR=HOST srun ...."
    )


def _job_port(environment: Mapping[str, str], one_machine: bool) -> int:
    """Returns a port that is equal in all processes of a job and likely different for other jobs.

    Without a job id, processes on one machine use the id of their common parent.
    """
    job = ".".join(environment[key] for key in _JOBS if environment.get(key))
    if not job and one_machine:
        job = str(os.getppid())
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if job else _PORTS[0]


def is_forwarded(stream: IO[str]) -> bool:
    """Returns whether a stream is a pseudo-terminal whose output a launcher forwards, possibly to a file.

    Open MPI gives each of its processes one. `isatty` accepts it, but it is not the controlling terminal of the
    process, as the user's terminal is.
    """
    if not stream.isatty() or not hasattr(os, "tcgetpgrp"):  # Windows has none
        return False
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return True
    try:
        os.tcgetpgrp(stream.fileno())
    except OSError:
        return True
    return False
