"""Measures the bytes that a block saves for its backward pass."""

from collections.abc import Callable, Iterable
from typing import cast

import pytest
import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.machine.execution import Execution
from sansgpu.train.optim import Optimizer


def kept_bytes_of(
    model: nn.Module,
    execution: Execution,
    prepare: Callable[[], tuple[Callable[[], torch.Tensor], Iterable[torch.Tensor]]],
) -> int:
    """Returns the bytes of all tensors that the forward pass saves, and of its output.

    `prepare` returns a forward pass and its inputs, which are not counted; it is called after the weights are cast.
    """
    dtype = torch.bfloat16 if execution.precision == "bf16" else torch.float32
    optimizer = Optimizer(model, TrainingConfig(optimizer="adamw"), dtype)
    run, inputs = prepare()
    others = {t.untyped_storage().data_ptr() for t in (*inputs, *model.parameters())}
    kept: dict[int, torch.Tensor] = {}

    class Recording(torch.autograd.graph.saved_tensors_hooks):
        """Records saved tensors, including those of saved-tensor hooks that the block itself installs."""

        def __init__(self, save: Callable[[torch.Tensor], object], load: Callable[[object], torch.Tensor]) -> None:
            def recorded(tensor: torch.Tensor) -> object:
                saved = save(tensor)
                if isinstance(saved, torch.Tensor):
                    kept[saved.untyped_storage().data_ptr()] = saved
                return saved

            super().__init__(recorded, load)

    with (
        pytest.MonkeyPatch.context() as patch,
        torch.autocast("cpu", torch.bfloat16, enabled=execution.precision == "bf16"),
        Recording(lambda tensor: tensor, lambda saved: cast(torch.Tensor, saved)),
    ):
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", Recording)
        out = run()
    optimizer.release_state()
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in others) + out.nbytes
