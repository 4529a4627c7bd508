"""Causal convolution of each channel over a few tokens, as recurrent layers apply it to their inputs.

B rows, T tokens, N = B T, D channels, W weights per channel, S sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from sansgpu.kernels import library
from sansgpu.kernels.c_functions import structs
from sansgpu.kernels.recurrent.sequences import addresses, by_token, sequence_starts


def reference_short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    """Computes `short_convolution` with torch, in any dtype."""
    batch, time, channels = x.shape
    bounds = sequence_starts(starts, batch, time)
    sequences = x.reshape(-1, channels).split(bounds.diff().tolist())
    taps = weight.shape[1]
    padded = (F.pad(sequence.T, (taps - 1, 0)) for sequence in sequences if len(sequence))
    outs = [F.conv1d(one, weight[:, None], bias, groups=channels).T for one in padded]
    out = torch.cat(outs).view(x.shape) if outs else x
    return F.silu(out) if silu else out


def short_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """Returns sum_w weight[c, w] * x[t - W + 1 + w, c] + bias[c] over the tokens of a sequence, then SiLU if wanted.

    x (B, T, D) in fp32 or bf16, weight (D, W), bias (D,), `starts` (S + 1,) int64: the first token of each sequence,
    then N; None: each row is a sequence. Returns (B, T, D) in the dtype of x. Needs the kernels (`library.takes`).
    """
    starts = sequence_starts(starts, *x.shape[:2])
    return cast(torch.Tensor, _Convolution.apply(x, weight, bias, starts, silu))


class _ConvolutionInputs(NamedTuple):
    """The inputs of the kernels, which must stay alive while these run."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    starts: torch.Tensor

    def struct(self, silu: bool) -> Any:
        """Returns the struct Convolution of native.h."""
        batch, time, channels = self.x.shape
        return structs()["Convolution"](
            N=batch * time, S=len(self.starts) - 1, D=channels, W=self.weight.shape[1],
            narrow=self.x.dtype == torch.bfloat16, silu=silu, x_time=self.x.stride(1), **addresses(self._asdict()),
        )  # fmt: skip


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, starts: torch.Tensor, silu: bool
    ) -> torch.Tensor:
        wide = None if bias is None else bias.float().contiguous()
        inputs = _ConvolutionInputs(by_token(x), weight.float().contiguous(), wide, starts)
        out = x.new_empty(x.shape)
        library.call("short_convolution", inputs.struct(silu), out)
        ctx.silu, ctx.dtypes = silu, (weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = _ConvolutionInputs(*ctx.saved_tensors)
        x, weight = inputs.x.new_empty(inputs.x.shape), torch.empty_like(inputs.weight)
        bias = None if inputs.bias is None else torch.empty_like(inputs.bias)
        grad = grad_outputs[0].to(x.dtype).contiguous()
        library.call("short_convolution_gradient", inputs.struct(ctx.silu), grad, x, weight, bias)
        dtype, bias_dtype = ctx.dtypes
        return x, weight.to(dtype), None if bias is None else bias.to(bias_dtype), None, None
