"""Templates of cluster files, and estimates of the memory of a process and of the time to save its snapshot."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jinja2 import Environment, PackageLoader, Template

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted
from sansgpu.events.progress import Warn
from sansgpu.machine.execution import Execution
from sansgpu.machine.measurements import ASSUMED_FLOPS_PER_SECOND
from sansgpu.machine.memory import MARGIN, effective_batch, micro_batch_choices
from sansgpu.machine.probe import threads_of_share
from sansgpu.planning.memory_fit import estimate_memory
from sansgpu.tasks.registry import task_of
from sansgpu.train.optim import choose_optimizer
from sansgpu.train.run_length import DISK_BYTES_PER_SECOND

ESTIMATING = "estimating memory and the time to save a snapshot"  # progress message while `needs_of` runs
STEPS = 2.0  # steps to allow for the current one; doubled because a CPU of a pod may be a hyper-thread, half a core
SNAPSHOTS = 2.0  # the final snapshot waits for one that is still being written
START_SECONDS = 30.0  # time that torchrun needs to signal its processes, and a reserve
ROUND_SECONDS = 10
ASSUMED_PARAMETERS = 1e9  # assumed if the model cannot be read from this machine
BYTES_PER_PARAMETER = 12  # size of a snapshot: weight and two moments in fp32


@dataclass(frozen=True)
class PodNeeds:
    """Estimated needs of one process of a run."""

    memory: int  # bytes with the smallest micro-batch; 0 if the model is unknown
    snapshot: float  # bytes
    round_seconds: float  # a step, or the steps until the next synchronization

    def fit(self, available: int) -> bool:
        return self.memory * MARGIN <= available

    @property
    def grace_seconds(self) -> int:
        """Seconds from SIGTERM until the snapshot is saved, on slow cores and a slow disk."""
        saving = SNAPSHOTS * self.snapshot / DISK_BYTES_PER_SECOND
        seconds = START_SECONDS + STEPS * self.round_seconds + saving
        return ROUND_SECONDS * math.ceil(seconds / ROUND_SECONDS)


def template(name: str) -> Template:
    return Environment(loader=PackageLoader("sansgpu.jobs"), keep_trailing_newline=True).get_template(name)


def threads_of_process(cpus: int, processes: int) -> int:
    """Returns the threads of each process of a node. Raises ConfigError if there are more processes than CPUs."""
    if processes > cpus:
        raise ConfigError(
            f"{processes} processes share {counted(cpus, 'CPU')}; raise --cpus or lower --processes-per-node."
        )
    return threads_of_share(cpus, processes)


def needs_of(config: Config, threads: int, world_size: int, warn: Warn) -> PodNeeds:
    tokens = effective_batch(config.training) * config.window / world_size
    rate, steps = threads * ASSUMED_FLOPS_PER_SECOND["fp32"], config.training.sync_every
    try:
        task = task_of(config)
        config = task.with_vocabulary(config)
        work = task.costs(config).work(tokens)
        training = config.training
        execution = Execution(
            micro_batch=micro_batch_choices(training, config.window, world_size)[0],
            accumulation=1,
            precision="bf16" if training.precision in ("auto", "bf16") else "fp32",
            compile="off",
            kernels="torch" if training.kernels == "torch" else "native",
            optimizer=choose_optimizer(training.optimizer, work.needed, work.muon),
            world_size=world_size,
        )
        memory = estimate_memory(config, execution).least
        snapshot = estimate_memory(
            config, replace(execution, world_size=1)
        ).snapshot  # rank 0 writes all of it even if sharded
    except SansGPUError as error:  # the model is on the claim, or on a Hub that cannot be reached from here
        warn(
            f"{str(error).rstrip('.')}; the time to save a snapshot is estimated for a model of "
            f"{ASSUMED_PARAMETERS / 1e9:.0f}B parameters."
        )
        flops = steps * 6 * ASSUMED_PARAMETERS * tokens
        return PodNeeds(0, ASSUMED_PARAMETERS * BYTES_PER_PARAMETER, flops / rate)
    return PodNeeds(memory, snapshot, steps * work.needed / rate)
