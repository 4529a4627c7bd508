"""Computes a tensor again in the backward pass instead of keeping it in memory until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# What a layer saves: a tensor, or the shape of one and the function that computes it again.
_Saved = torch.Tensor | tuple[torch.Size, Callable[[], torch.Tensor]]


@contextmanager
def recomputed(value: torch.Tensor, compute: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Makes layers called in this context save `compute`, which must return the same bits, instead of `value`.

    It is worth it for what an element-wise operation computes, beside a matmul that reads it. Other tensors are saved
    as usual. Under torch.compile, which decides itself what to save, nothing changes.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        yield
        return
    place, count, dtype = value.data_ptr(), value.numel(), value.dtype

    def save(tensor: torch.Tensor) -> _Saved:
        if tensor.data_ptr() == place and tensor.numel() == count and tensor.dtype == dtype:
            return tensor.shape, compute
        return tensor.detach()

    def load(saved: _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        shape, again = saved
        with torch.no_grad():
            return again().to(dtype).view(shape)

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        yield
