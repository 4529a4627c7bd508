"""The description of a run that the training loop executes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sansgpu.config import Config, RunPaths
from sansgpu.machine.probe import Environment
from sansgpu.train.step import StepPlan


@dataclass(frozen=True)
class RunSetup:
    """A run and how this process executes it. `plan` and `environment` hold the values before the first step."""

    config: Config
    paths: RunPaths
    plan: StepPlan
    environment: Environment
    total_steps: int  # or schedule.UNKNOWN_STEPS
    gemm_flops_per_second: float  # best total rate of all processes; the denominator of `mfu`
    eval_token_ratio: float = 0.0  # tokens per evaluation / tokens per step
    started: float = field(default_factory=time.monotonic)  # start of the run's time budget

    @property
    def sharding(self) -> str:
        """`training.sharding`, or none for a single process."""
        return self.config.training.sharding if self.plan.group.size > 1 else "none"
