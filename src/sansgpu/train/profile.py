"""Where the time of a step goes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sansgpu.machine.launch import quiet_profiler
from sansgpu.train.optim import Optimizer

PARTS = ("attention", "matmul", "loss", "optimizer", "other")
_UPDATE = "sansgpu update"
# The first that matches an event's name has its time, children included.
_EVENTS = (
    ("optimizer", re.compile(re.escape(_UPDATE))),
    ("loss", re.compile(r"LinearCrossEntropy|cross_entropy")),
    ("attention", re.compile(r"[aA]ttention")),
    ("matmul", re.compile(r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|linear_gradients|mkldnn.*linear|_Linear")),
)


def breakdown(step: Callable[[], object], optimizer: Optimizer, repeats: int) -> dict[str, float]:
    """Shares of a step by PARTS, over a few steps under torch's profiler; `other` is all that is none of these."""
    quiet_profiler()
    with _marked(optimizer), profile(activities=[ProfilerActivity.CPU]) as profiled:
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        wall = time.perf_counter() - start
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profiled.events():
        if event.cpu_parent is None:
            _add(event, seconds)
    shares = {part: spent / wall for part, spent in seconds.items()}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return shares


def _add(event: Any, seconds: dict[str, float]) -> None:
    part = next((part for part, names in _EVENTS if names.search(event.name)), None)
    if part is not None:
        seconds[part] += event.cpu_time_total / 1e6
        return
    for child in event.cpu_children:
        _add(child, seconds)


@contextmanager
def _marked(optimizer: Optimizer) -> Iterator[None]:
    """While it lasts, the profiler sees the update under a name of its own."""
    norm, step = optimizer.norm, optimizer.step

    def marked_norm() -> float:
        with record_function(_UPDATE):
            return norm()

    def marked_step(lr: float, number: int, scale: float) -> None:
        with record_function(_UPDATE):
            step(lr, number, scale)

    vars(optimizer).update(norm=marked_norm, step=marked_step)
    try:
        yield
    finally:
        del optimizer.norm, optimizer.step


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()
