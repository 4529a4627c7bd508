"""Training: loop, optimizer, schedule, snapshots and evaluation."""

from sansgpu.train.loop import Trainer

__all__ = ["Trainer"]
