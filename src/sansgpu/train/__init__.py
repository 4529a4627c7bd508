"""Training: loop, optimizer, schedule, snapshots and evaluation."""

from sansgpu.train.loop import Trainer
from sansgpu.train.run_setup import RunSetup

__all__ = ["RunSetup", "Trainer"]
