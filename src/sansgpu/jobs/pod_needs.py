"""What a run needs of a pod that is elsewhere: memory, and time to save when it is told to go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from sansgpu.config import Config, SansGPUError
from sansgpu.jobs.fitting import MARGIN, memory_of
from sansgpu.machine.compilation import EAGER_FLOPS_PER_SECOND
from sansgpu.machine.memory import Execution, effective_batch, micro_batch_choices
from sansgpu.tasks import task_of
from sansgpu.train.budget import DISK_BYTES_PER_SECOND
from sansgpu.train.optim import choose_optimizer

STEPS = 2.0  # the one under way, on cores that are half as fast as assumed: a hyper-thread is half a core
SNAPSHOTS = 2.0  # the last one waits for one that is still being written
START_SECONDS = 30.0  # until torchrun has told its processes, and for what was not foreseen
ROUND_SECONDS = 10
ASSUMED_PARAMETERS = 1e9  # of a model that cannot be looked at from here
BYTES_A_PARAMETER = 12  # of a snapshot: the weight and two moments in fp32


@dataclass(frozen=True)
class Needs:
    """Of one process of a run, reckoned from the model's shape."""

    memory: int  # bytes with the smallest micro-batch; 0 where the model is not known
    snapshot: float  # bytes
    step_seconds: float

    def fit(self, available: int) -> bool:
        """Whether they fit into so many bytes."""
        return self.memory * MARGIN <= available

    @property
    def grace_seconds(self) -> int:
        """From the signal to go until all is saved, on slow cores and a slow disk."""
        saving = SNAPSHOTS * self.snapshot / DISK_BYTES_PER_SECOND
        seconds = START_SECONDS + STEPS * self.step_seconds + saving
        return ROUND_SECONDS * math.ceil(seconds / ROUND_SECONDS)


def needs_of(config: Config, threads: int, world_size: int, warn: Callable[[str], None]) -> Needs:
    """The needs of a process, of `world_size` that share a step."""
    tokens = effective_batch(config.training) * config.window / world_size
    rate = threads * EAGER_FLOPS_PER_SECOND["fp32"]
    try:
        task = task_of(config)
        config = task.with_vocabulary(config)
        work = task.work(config, tokens)
        training = config.training
        how = Execution(
            micro_batch=micro_batch_choices(training, config.window, world_size)[0],
            accumulation=1,
            precision="fp32" if training.wanted_precision == "fp32" else "bf16",
            compile="off",
            kernels="torch" if training.kernels == "torch" else "native",
            optimizer=choose_optimizer(training.optimizer, work.needed, work.muon),
            world_size=world_size,
        )
        memory = memory_of(task, config, how).least
        snapshot = memory_of(task, config, replace(how, world_size=1)).snapshot  # written whole, however it is spread
    except SansGPUError as error:  # it is on the claim, or on a hub that cannot be reached from here
        warn(
            f"{str(error).rstrip('.')}: the time that pods have to save in is reckoned for a model of "
            f"{ASSUMED_PARAMETERS / 1e9:.0f}B parameters."
        )
        return Needs(0, ASSUMED_PARAMETERS * BYTES_A_PARAMETER, 6 * ASSUMED_PARAMETERS * tokens / rate)
    return Needs(memory, snapshot, work.needed / rate)
