"""Makes MKL's vector math functions, which torch uses for sine, exp and others, deterministic."""

from __future__ import annotations

import torch


def choose_vector_math() -> None:
    """Calls each function once in a single thread.

    At its first call, an MKL function selects its code path for this processor. If two threads make the first call
    together, one may get another code path whose last bits differ; this made every second pair of runs differ.
    """
    x = torch.full((8,), 0.5)
    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh, torch.erf, torch.sqrt):
        for dtype in (torch.float32, torch.float64):
            function(x.to(dtype))
