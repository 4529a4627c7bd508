"""Measures gloo's all-reduce on this machine, between two processes over the loopback interface."""

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
from sansgpu.machine.distributed.rendezvous import interfaces
from sansgpu.machine.distributed.world import LOOPBACK

RANKS = 2
REPEATS, HOP_REPEATS, WARM_UP = 8, 200, 2  # timed large all-reduces, timed small ones, and untimed ones before each
TIMEOUT = timedelta(seconds=60)
MAX_ERROR_CHARS = 200  # quoted from an error of gloo


@dataclass(frozen=True)
class Link:
    """The connection of a process to its neighbor in a ring all-reduce."""

    bytes_per_second: float
    hop_seconds: float  # latency of the smallest message


def measure_gloo(size: int, dtype: str) -> Link:
    """Times all-reduces of `size` bytes for the bandwidth and of a few bytes for the latency.

    Raises SansGPUError if the measurement fails.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sansgpu-gloo-") as folder, ProcessPoolExecutor(RANKS, spawn) as pool:
        both = [pool.submit(_rank, rank, f"file://{folder}/store", size, dtype) for rank in range(RANKS)]
        try:
            first, _ = (rank.result() for rank in both)
            return first
        except BrokenProcessPool:
            raise SansGPUError(
                "the bandwidth of gloo could not be measured, because a measuring process was killed; free some "
                "memory, and run the command again."
            ) from None
        except RuntimeError as error:  # raised by gloo
            reason = " ".join(str(error).split())[:MAX_ERROR_CHARS]
            raise SansGPUError(
                f"the bandwidth of gloo could not be measured over {LOOPBACK} ({reason}); check that the firewall "
                "allows connections of this machine to itself."
            ) from None


def _rank(rank: int, init_method: str, size: int, dtype: str) -> Link:
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name, have in interfaces().items() if LOOPBACK in have)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=RANKS, timeout=TIMEOUT)
    many = torch.zeros(size, dtype=torch.uint8).view(getattr(torch, dtype))
    few = torch.zeros(2)
    seconds = _seconds(lambda: dist.all_reduce(many), REPEATS)
    # Each of two ranks sends one half in the reduce-scatter and one in the all-gather: two hops and `size` bytes.
    link = Link(size / seconds, _seconds(lambda: dist.all_reduce(few), HOP_REPEATS) / 2)
    dist.destroy_process_group()
    return link


def _seconds(job: Callable[[], object], repeats: int) -> float:
    """Returns the median duration of `job`."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        start = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UP:])
