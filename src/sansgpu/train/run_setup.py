"""The description of a run that the training loop executes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sansgpu.config import Config, RunPaths
from sansgpu.machine.gemm_peak import peak_gemm_rate
from sansgpu.machine.probe import Environment, cache_dir
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

    def measure_gemm_again(self) -> float:
        """Returns the best total GEMM rate of all processes, assuming that they are as fast as this one."""
        group, how = self.plan.group, self.environment
        folder = cache_dir(self.config.data.cache_dir)
        rate = peak_gemm_rate(folder, how.precision, how.device, how.threads, len(group.local_ranks), again=True)
        return group.size * rate

    @property
    def sharding(self) -> str:
        """`training.sharding`, or none for a single process."""
        return self.config.training.sharding if self.plan.group.size > 1 else "none"
