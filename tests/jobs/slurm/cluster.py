"""Runs a Slurm cluster of two nodes on this machine, with its own daemons, ports, key and folders."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
# Both are names of this machine, because processes resolve the first node's name.
NODES = (socket.gethostname(), "localhost")
# cred_expire is short because Slurm restarts a requeued job only once its credentials expire (default: 2 minutes).
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Returns the reason why no cluster can run on this machine, or None."""
    if absent := [name for name in DAEMONS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not found; install slurm-wlm and munge"
    if os.geteuid() != 0:
        return "slurmd needs root to start jobs"
    if len(set(NODES)) < len(NODES):
        return "this machine's name is localhost, and two nodes need two names"
    return None


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Runs the daemons and sets SLURM_CONF within the context."""
    ports = []
    with ExitStack() as taken:
        for _ in range(3):
            free = taken.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf.write_text(_CONFIGURATION.format(host=NODES[0], user="root", folder=folder, ports=ports, nodes=NODES))
    files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = [f"--{name}={folder}/munge.{suffix}" for name, suffix in files.items()]
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(conf)
    with ExitStack() as daemons:
        daemons.callback(_restore, before)
        for command in (
            ["munged", "--foreground", "--force", *munged],
            ["slurmctld", "-D", "-c", "-f", str(conf)],
            *(["slurmd", "-D", "-N", node, "-f", str(conf)] for node in NODES),
        ):
            log = daemons.enter_context((folder / f"{command[0]}.out").open("a"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            daemons.callback(_end, daemon)
            time.sleep(1)
        wait_until(lambda: said("sinfo", "-h", "-o", "%t").split() == ["idle"], 60)
        yield


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def state(job: str) -> str:
    """Returns a job's state, e.g. RUNNING."""
    fields = dict(part.split("=", 1) for part in said("scontrol", "show", "job", job).split() if "=" in part)
    return fields.get("JobState", "")


def wait_until(ready: object, seconds: float) -> None:
    assert callable(ready)
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, (said("squeue"), said("sinfo"))
        time.sleep(0.1)


def submit(script: Path) -> str:
    """Submits a script from the current folder and returns the job ID."""
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def srun(arguments: Sequence[str]) -> None:
    """Runs a command as two tasks, one on each node."""
    done = subprocess.run(["srun", "--nodes=2", "--ntasks=2", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _restore(before: str | None) -> None:
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before
