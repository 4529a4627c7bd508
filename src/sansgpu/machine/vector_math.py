"""MKL's functions of vectors, which torch computes sines and the like with."""

from __future__ import annotations

import torch


def choose_vector_math() -> None:
    """Have each function call made once by one thread alone.

    At its first call a function of MKL chooses its code for this processor; of two threads that both make the first
    call, one may get other code, whose last digits differ: equal runs were not equal in one of two cases.
    """
    x = torch.full((8,), 0.5)
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.erf, torch.sqrt):
        for dtype in (torch.float32, torch.float64):
            function(x.to(dtype))
