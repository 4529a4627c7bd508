"""Measures the bytes that a block saves for its backward pass."""

import gc
from collections.abc import Callable, Iterable

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.memory import Execution
from sansgpu.train.optim import Optimizer


def kept_bytes_of(
    model: nn.Module, how: Execution, prepare: Callable[[], tuple[Callable[[], torch.Tensor], Iterable[torch.Tensor]]]
) -> int:
    """Returns the bytes that are allocated after a forward pass and were not before, with those of its output.

    `prepare` returns the forward pass and its inputs; it is called after the weights are cast.
    """
    dtype = torch.bfloat16 if how.precision == "bf16" else torch.float32
    optimizer = Optimizer(model, TrainingConfig(optimizer="adamw"), dtype)
    run, _ = prepare()
    gc.collect()  # so that nothing older is freed while it is measured
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=how.precision == "bf16"),
        torch.profiler.profile(profile_memory=True) as profile,
    ):
        out = run()
    optimizer.release_state()
    events = profile.profiler.kineto_results.events()
    assert out is not None
    return sum(e.nbytes() for e in events if e.name() == "[memory]")
