"""What the kernels of recurrent layers share: sequences of tokens, and how their inputs lie in memory.

B rows, T tokens, N = B T, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch


class States(NamedTuple):
    """The output (B, T, ...) of a recurrent layer, and the states (S, ...) after each sequence, if they were wanted."""

    out: torch.Tensor
    last: torch.Tensor | None


class LayerStates(NamedTuple):
    """The state of a recurrent layer after a pass, from which the next pass continues each sequence."""

    inputs: torch.Tensor  # (S, D, W): the last inputs of its convolution of D channels
    memory: torch.Tensor  # (S, ...): the states of its recurrence


def sequence_starts(given: torch.Tensor | None, batch: int, time: int) -> torch.Tensor:
    """Returns the first token of each sequence, then N, as int64 (S + 1,); by default each row is a sequence."""
    return torch.arange(batch + 1) * time if given is None else given.to("cpu", torch.int64).contiguous()


def last_inputs(x: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the last `count` inputs (B, D, W) of each sequence of x (1, D, T); zeros precede shorter sequences.

    `starts` (B + 1,) are the first token of each sequence, then T.
    """
    places = starts[1:, None] - count + torch.arange(count)
    inputs = x[0][:, places.clamp(min=0)] * (places >= starts[:-1, None])
    return inputs.transpose(0, 1)


def by_token(x: torch.Tensor) -> torch.Tensor:
    """Returns x (B, T, ...), copied unless each token's values are contiguous and all tokens equally far apart."""
    batch, time, *sizes = x.shape
    within = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    dense = x.stride()[2:] == within and (batch == 1 or x.stride(0) == time * x.stride(1))
    return x if dense else x.contiguous()


def addresses(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, int | None]:
    """Returns the address of each tensor's memory, for a struct of native.h."""
    return {name: None if tensor is None else tensor.data_ptr() for name, tensor in tensors.items()}
