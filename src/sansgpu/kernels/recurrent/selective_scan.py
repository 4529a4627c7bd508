"""The selective scan of Mamba (arXiv 2312.00752).

Each channel has M states. Token t lets them decay and adds its input, s = exp(step_t rate) s + step_t in_t x_t, and
reads y_t = out_t s + skip x_t. B rows, T tokens, N = B T, D channels, S sequences.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import structs
from sansgpu.kernels.recurrent.sequences import States, by_token, sequence_starts


class ScanInputs(NamedTuple):
    """The inputs of a scan."""

    x: torch.Tensor  # (B, T, D)
    steps: torch.Tensor  # (B, T, D): at least 0
    rates: torch.Tensor  # (D, M): at most 0
    into: torch.Tensor  # (B, T, M): Mamba's B
    out: torch.Tensor  # (B, T, M): Mamba's C
    skip: torch.Tensor  # (D,): Mamba's D


def reference_selective_scan(
    inputs: ScanInputs, starts: torch.Tensor | None = None, initial: torch.Tensor | None = None
) -> States:
    """Computes `selective_scan` token by token, in any dtype."""
    batch, time, channels = inputs.x.shape
    x, steps, into, out = (value.flatten(0, 1) for value in (inputs.x, inputs.steps, inputs.into, inputs.out))
    bounds = sequence_starts(starts, batch, time).tolist()
    found, last = [], []
    for number, (first, end) in enumerate(pairwise(bounds)):
        state = x.new_zeros(inputs.rates.shape) if initial is None else initial[number]
        for t in range(first, end):
            state = state * (steps[t][:, None] * inputs.rates).exp() + (steps[t] * x[t])[:, None] * into[t]
            found.append(state @ out[t] + inputs.skip * x[t])
        last.append(state)
    result = torch.stack(found) if found else x.new_zeros(0, channels)
    return States(result.view(batch, time, channels), torch.stack(last))


def selective_scan(
    inputs: ScanInputs, starts: torch.Tensor | None = None, initial: torch.Tensor | None = None, states: bool = False
) -> States:
    """Computes the scan with the kernels (`library.takes`), x in fp32 or bf16 and all else in fp32.

    `starts` (S + 1,) int64 are the first token of each sequence, then N; None: each row is a sequence. `initial` (S, D,
    M) fp32 are the states before the sequences, default zeros; gradients then cannot be computed. With `states`, those
    after the sequences are returned, too.
    """
    if initial is not None and torch.is_grad_enabled() and any(value.requires_grad for value in inputs):
        raise RuntimeError("the selective scan has gradients only for sequences that begin with states of zeros.")
    starts = sequence_starts(starts, *inputs.x.shape[:2])
    results = _SelectiveScan.apply(*inputs, starts, initial, states)
    return States(*cast(tuple[torch.Tensor, torch.Tensor | None], results))


def _struct(inputs: ScanInputs, starts: torch.Tensor) -> Any:
    """Returns the struct Scan of native.h."""
    batch, time, channels = inputs.x.shape
    x, steps, rates, into, out, skip = (value.data_ptr() for value in inputs)
    return structs()["Scan"](
        N=batch * time, S=len(starts) - 1, D=channels, M=inputs.rates.shape[1],
        narrow=inputs.x.dtype == torch.bfloat16, starts=starts.data_ptr(), x=x, x_time=inputs.x.stride(1),
        steps=steps, rates=rates, out=out, skip=skip, **{"in": into},
    )  # fmt: skip


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *values, starts, initial, returns_states = arguments
        given = ScanInputs(*values)
        x = by_token(given.x)
        inputs = ScanInputs(x, *(value.float().contiguous() for value in given[1:]))
        y, last = x.new_empty(x.shape), None
        if returns_states:
            last = torch.empty(len(starts) - 1, *inputs.rates.shape)
        before = None if initial is None else initial.float().contiguous()
        library.call("selective_scan", _struct(inputs, starts), before, y, last)
        ctx.dtypes = [value.dtype for value in given]
        ctx.save_for_backward(*inputs, starts)
        return y, last

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        *values, starts = ctx.saved_tensors
        inputs, grad = ScanInputs(*values), grad_outputs[0]
        assert grad is not None
        struct = _struct(inputs, starts)
        blocks = library.call("selective_scan_blocks", struct)
        x, steps, rates, skip = (v.new_empty(v.shape) for v in (inputs.x, inputs.steps, inputs.rates, inputs.skip))
        into, out = (torch.empty(blocks, *value.shape) for value in (inputs.into, inputs.out))
        given = grad.to(x.dtype).contiguous()
        library.call("selective_scan_gradient", struct, given, x, steps, rates, into, out, skip)
        grads = (x, steps, rates, into.sum(0), out.sum(0), skip)
        return (*(value.to(dtype) for value, dtype in zip(grads, ctx.dtypes, strict=True)), None, None, None)
