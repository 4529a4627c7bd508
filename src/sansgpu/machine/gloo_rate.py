"""How fast gloo adds numbers up on this machine: measured between two processes over its loopback."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from sansgpu.config import SansGPUError
from sansgpu.machine.network import interfaces
from sansgpu.machine.world import LOOPBACK

RANKS = 2
REPEATS, HOP_REPEATS, WARM_UP = 8, 200, 2  # timed, behind some that warm up
LONGEST = timedelta(seconds=60)  # that either process waits for the other
MOST_CHARACTERS = 200  # of an error that is not ours


@dataclass(frozen=True)
class Link:
    """What a process sends to the next one of a ring with."""

    bytes_per_second: float
    hop_seconds: float  # until the smallest message is there


def measure_gloo(size: int, dtype: str) -> Link:
    """Of all-reduces of `size` bytes, and of a few. Raises SansGPUError."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sansgpu-gloo-") as folder, ProcessPoolExecutor(RANKS, spawn) as pool:
        both = [pool.submit(_rank, rank, f"file://{folder}/store", size, dtype) for rank in range(RANKS)]
        try:
            first, _ = (rank.result() for rank in both)
            return first
        except BrokenProcessPool:
            raise SansGPUError("gloo's rate was not measured: a measuring process was killed.") from None
        except RuntimeError as error:  # which is what gloo raises
            reason = " ".join(str(error).split())[:MOST_CHARACTERS]
            raise SansGPUError(f"gloo's rate could not be measured over {LOOPBACK}: {reason}.") from None


def _rank(rank: int, meeting: str, size: int, dtype: str) -> Link:
    """One of the two processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name, have in interfaces().items() if LOOPBACK in have)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=LONGEST)
    many = torch.zeros(size, dtype=torch.uint8).view(getattr(torch, dtype))
    few = torch.zeros(2)
    seconds = _seconds(lambda: dist.all_reduce(many), REPEATS)
    # Of two ranks each sends a half twice, first to be added and then as a sum: two hops, and `size` bytes.
    link = Link(size / seconds, _seconds(lambda: dist.all_reduce(few), HOP_REPEATS) / 2)
    dist.destroy_process_group()
    return link


def _seconds(job: Callable[[], object], repeats: int) -> float:
    """The middle one of so many times."""
    taken = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        job()
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP:])
