"""Measures the bytes that a block saves for its backward pass."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.memory import Execution
from sansgpu.train.optim import Optimizer


def kept_bytes_of(
    model: nn.Module, how: Execution, prepare: Callable[[], tuple[Callable[[], torch.Tensor], Iterable[torch.Tensor]]]
) -> int:
    """Returns the bytes of all saved storages and the output.

    `prepare` returns a forward pass and its inputs, which do not count; it is called after the weights are cast.
    """
    dtype = torch.bfloat16 if how.precision == "bf16" else torch.float32
    optimizer = Optimizer(model, TrainingConfig(optimizer="adamw"), dtype)
    run, inputs = prepare()
    others = {t.untyped_storage().data_ptr() for t in (*inputs, *model.parameters())}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16, enabled=how.precision == "bf16"),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        out = run()
    optimizer.release_state()
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in others) + out.nbytes
