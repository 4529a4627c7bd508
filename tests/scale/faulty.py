"""Runs `sansgpu` so that one process kills itself with SIGKILL at a chosen place.

FAULT is the place: backward, all-reduce, reduce-scatter or snapshot. FAULT_RANK is the process that kills itself when
it gets there for the FAULT_COUNT-th time. The file FAULT_MARK records this, so that it happens only once.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import sansgpu.train.snapshots as checkpoint
from sansgpu.cli import main
from sansgpu.train.update_rules import TrainedWeight


def _counted(then: Callable[..., Any], left: list[int], after: bool = False) -> Callable[..., Any]:
    def passed(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        result = then(*args, **more) if after else None
        if left[0] == 0:
            Path(os.environ["FAULT_MARK"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result if after else then(*args, **more)

    return passed


def install() -> None:
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if os.environ.get("FAULT_RANK") != rank or Path(os.environ["FAULT_MARK"]).exists():
        return
    left = [int(os.environ["FAULT_COUNT"])]
    match os.environ["FAULT"]:
        case "backward":
            TrainedWeight.gather = _counted(TrainedWeight.gather, left)  # type: ignore[method-assign]
        case "all-reduce":
            dist.all_reduce = _counted(dist.all_reduce, left, after=True)
        case "reduce-scatter":
            dist.reduce_scatter_single = _counted(dist.reduce_scatter_single, left)  # called by fully_shard
        case "snapshot":
            checkpoint.sync_to_disk = _counted(checkpoint.sync_to_disk, left)


if __name__ == "__main__":
    install()
    main()
