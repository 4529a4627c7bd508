"""Profiles a step: the share of its time per part."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sansgpu.machine.launch import quiet_profiler
from sansgpu.train.optim import PROFILED_AS

PARTS = ("attention", "matmul", "loss", "optimizer", "other")
# The time of an event, including its children, counts for the first pattern that matches its name.
_MATMULS = r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|mkldnn.*linear|_Linear|_FrozenLinear|_Lora|_FeedForward"
_EVENTS = (
    ("optimizer", re.compile(re.escape(PROFILED_AS))),
    ("loss", re.compile(r"LinearCrossEntropy|LinearMixedLoss|TargetLogProbabilities")),
    ("attention", re.compile(r"[aA]ttention")),
    (
        "matmul",
        re.compile(_MATMULS),
    ),
)


def profile_step(step: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns the share of time per part of PARTS over `repeats` steps, measured with torch's profiler."""
    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
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


def synchronize(device: torch.device) -> None:
    """Waits for the queued work of a GPU; returns immediately on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
