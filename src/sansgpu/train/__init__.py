"""How weights change."""

from sansgpu.train.loop import Trainer

__all__ = ["Trainer"]
