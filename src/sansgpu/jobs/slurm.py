"""Writes the sbatch script of a run on a Slurm cluster."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.wording import truncate
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import make_folder, write_failures_as, write_text
from sansgpu.files.ownership import OutputFolder, require_file
from sansgpu.jobs.cluster_files import ESTIMATING, needs_of, template, threads_of_process
from sansgpu.machine.distributed.world import SHUTDOWN_TIMEOUT
from sansgpu.planning.cluster import require_examples
from sansgpu.tasks.configuration import load_config
from sansgpu.train.run_folders import require_plain_name

SCRIPT = "job.sbatch"
HEAD = "# Written by `sansgpu slurm`."
ASSUMED_CPUS = 16  # per node, to estimate the time of a step if --cpus is not given
MAX_SIGNAL_SECONDS = 65_535  # largest time that sbatch's --signal accepts
INTERRUPTED = 143  # exit code after SIGTERM and a saved snapshot
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_PARTITIONS = rf"{_NAME}(,{_NAME})*"
_MEMORY = r"[0-9]{1,12}[KMGT]?"
# Slurm's formats of a time limit: https://slurm.schedmd.com/sbatch.html#OPT_time
_TIME = r"(?P<days>\d{1,4})-(?P<hours>\d{1,3})(:(?P<minutes>\d{1,2})(:\d{1,2})?)?|(?P<clock>\d{1,6}(:\d{1,2}){0,2})"


@dataclass(frozen=True)
class SlurmRequest:
    """Arguments of the slurm command."""

    config_file: Path
    overrides: Sequence[str]
    nodes: int
    processes_per_node: int = 1
    cpus: int | None = None  # per node; None: whole nodes
    memory: str | None = None  # per node
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str | None = None
    output_dir: Path | None = None


def slurm(request: SlurmRequest, progress: ReportProgress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Writes the script into the run's folder and returns its path and the next commands. Raises ConfigError."""
    processes = request.nodes * request.processes_per_node
    config, notes = load_config(request.config_file, request.overrides, processes=processes)
    for note in notes:
        warn(note)
    name = request.name or request.config_file.stem
    for option, value, pattern in (
        ("--name", name, _NAME),
        ("--partition", request.partition, _PARTITIONS),
        ("--account", request.account, _NAME),
        ("--memory", request.memory, _MEMORY),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            raise ConfigError(f"{option} {truncate(value)!r} is not valid for Slurm; use letters, digits, _, . and -.")
    require_examples(request.nodes, config, request.processes_per_node)
    folder = request.output_dir or Path("runs") / name
    require_plain_name(folder)
    if re.search(r"\s", str(folder)):
        raise ConfigError(f"{folder} contains spaces, which Slurm's script options do not support; rename it.")
    progress(ESTIMATING, 0, 0)
    grace = _grace_seconds(request, config, warn)
    text = _script(request, name, folder, grace)
    script = _write(folder, text)
    commands = [shlex.join(["sbatch", str(script)]), f"squeue --name={name}", f"tail -F {folder}/slurm-*.log"]
    return {"file": str(script), "name": name, "run": str(folder), "grace_seconds": grace, "commands": commands}


def _script(request: SlurmRequest, name: str, folder: Path, grace: int) -> str:
    settings = [part for override in request.overrides for part in ("--set", override)]
    train = [sys.executable, "-m", "sansgpu", "train", str(request.config_file), *settings]
    return template("job.sbatch").render(
        request=request,
        name=name,
        folder=folder,
        cpus_per_task=request.cpus // request.processes_per_node if request.cpus else None,
        head=HEAD,
        grace=grace,
        grace_variable=SHUTDOWN_TIMEOUT,
        command=shlex.join([*train, "--output-dir", str(folder), "--resume", "latest", "--plain"]),
        interrupted=INTERRUPTED,
    )


def _grace_seconds(request: SlurmRequest, config: Config, warn: Callable[[str], None]) -> int:
    """Returns the seconds before the time limit at which to stop. Raises ConfigError if that is too late."""
    processes = request.processes_per_node
    threads = threads_of_process(request.cpus or max(ASSUMED_CPUS, processes), processes)
    grace = needs_of(config, threads, request.nodes * processes, warn).grace_seconds
    if grace > MAX_SIGNAL_SECONDS:
        raise ConfigError(
            f"a step and saving a snapshot may take {grace:,} s, but Slurm signals at most {MAX_SIGNAL_SECONDS:,} s "
            "before the time limit; use more --nodes, or lower the batch size or training.sync_every."
        )
    if request.time is not None and _seconds(request.time) <= grace:
        raise ConfigError(
            f"--time {request.time} is too short, because saving a snapshot may take {grace} s; raise it."
        )
    return grace


def _seconds(time: str) -> int:
    """Parses a time limit such as 90, 24:00:00 or 2-12 to seconds. Raises ConfigError."""
    match = re.fullmatch(_TIME, time)
    if match is None:
        raise ConfigError(f"--time {truncate(time)!r} is not a time limit; write minutes, HH:MM:SS or DAYS-HH:MM:SS.")
    if match["clock"] is None:
        return 86400 * int(match["days"]) + 3600 * int(match["hours"]) + 60 * int(match["minutes"] or 0)
    parts = [int(part) for part in match["clock"].split(":")]  # minutes, minutes:seconds or hours:minutes:seconds
    hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: (*parts,)}[len(parts)]
    return 3600 * hours + 60 * minutes + seconds


def _write(folder: Path, text: str) -> Path:
    """Writes the script into the run's folder, where Slurm's log will be, and marks a new folder as a run's."""
    script = folder / SCRIPT
    output = OutputFolder(folder, "run").require()
    require_file(script, HEAD.encode(), "--output-dir")
    with write_failures_as(ConfigError, folder, "--output-dir"):
        make_folder(folder)
        output.record()
        write_text(script, text)
    return script
