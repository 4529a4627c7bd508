"""Output projection and cross-entropy fused, so that the full (N, V) logits are never in memory.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from sansgpu.kernels import native
from sansgpu.kernels.block_quantization import NOT_QUANTIZED, Matrix, as_values, row_length, stored
from sansgpu.kernels.embedding import add_rows
from sansgpu.kernels.linear import autocasted
from sansgpu.kernels.matmul import is_native, matmul_into

CHUNK_ROWS = 1024  # tokens per chunk; with fewer, accumulating the (V, D) gradient takes longer than the matmuls
SUMMED_ROWS = 4096  # rows of a quantized weight that are in memory as fp32 while they are summed

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define(
    "cross_entropy_losses(Tensor(a!)? exponentials, Tensor hidden, Tensor head, int format, Tensor targets, "
    "float smoothing, float z_loss, float softcap, bool count) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "cross_entropy_hidden(Tensor(a!) out, Tensor exponentials, Tensor head, int format, Tensor targets, "
    "Tensor shares, Tensor at_target) -> ()"
)


def _cross_entropy_losses(
    exponentials: torch.Tensor | None, hidden: torch.Tensor, head: torch.Tensor, format: int, targets: torch.Tensor,
    smoothing: float, z_loss: float, softcap: float, count: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns what native/cross_entropy.cpp calls losses, shares, at_target and above."""
    (rows, width), vocabulary = hidden.shape, len(head)
    if head.shape[1] != row_length(width, format) or len(targets) != rows:
        raise RuntimeError("the hidden states, the head and the targets do not match in shape.")
    above = torch.zeros(rows if count else 0, dtype=torch.int64)
    results = [hidden.new_empty(rows, dtype=torch.float32) for _ in range(3)]
    native.call(
        "cross_entropy_losses", hidden.dtype == torch.bfloat16, format, rows, width, vocabulary, hidden, head, targets,
        smoothing, z_loss, softcap, exponentials, above if count else None, *results,
    )  # fmt: skip
    return *results, above


def _cross_entropy_hidden(
    out: torch.Tensor, exponentials: torch.Tensor, head: torch.Tensor, format: int, targets: torch.Tensor,
    shares: torch.Tensor, at_target: torch.Tensor,
) -> None:  # fmt: skip
    sizes = (rows, width, vocabulary) = (*out.shape, len(head))
    if exponentials.shape != (rows, vocabulary) or head.shape != (vocabulary, row_length(width, format)):
        raise RuntimeError("the exponentials, the head and the gradient do not match in shape.")
    native.call(
        "cross_entropy_hidden", out.dtype == torch.bfloat16, format, *sizes, exponentials, head, targets, shares,
        at_target, out,
    )  # fmt: skip


_library.impl("cross_entropy_losses", _cross_entropy_losses, "CPU")
_library.impl("cross_entropy_hidden", _cross_entropy_hidden, "CPU")


@register_flop_formula(torch.ops.sansgpu.cross_entropy_losses)
def _flops_of_losses(
    exponentials: object, hidden: tuple[int, int], head: tuple[int, int], *args: Any, **kw: Any
) -> int:
    return 2 * hidden[0] * hidden[1] * head[0]


@register_flop_formula(torch.ops.sansgpu.cross_entropy_hidden)
def _flops_of_hidden(out: tuple[int, int], exponentials: tuple[int, int], *args: Any, **kwargs: Any) -> int:
    return 2 * out[0] * out[1] * exponentials[1]


@dataclass(frozen=True)
class LossOptions:
    """Options of the cross-entropy loss; the defaults give plain cross-entropy."""

    label_smoothing: float = 0.0  # probability mass spread evenly over the vocabulary (arXiv 1512.00567)
    z_loss: float = 0.0  # coefficient of log(sum(exp(logits)))^2, which keeps logits from drifting (arXiv 2204.02311)
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) (arXiv 2408.00118); 0 disables it


DEFAULT_LOSS_OPTIONS = LossOptions()


def reference_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes the summed loss from all logits at once. hidden (N, D), weight (V, D), targets (N,); returns ()."""
    has_target = targets != ignore_index
    logits = hidden[has_target] @ weight.T
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    log_probabilities = torch.log_softmax(logits, dim=1)
    of_target = log_probabilities.gather(1, targets[has_target, None]).sum()
    smooth = log_probabilities.mean(dim=1).sum()
    z_loss = torch.logsumexp(logits, dim=1).square().sum()
    return -(1 - options.label_smoothing) * of_target - options.label_smoothing * smooth + options.z_loss * z_loss


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: Matrix,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes `reference_cross_entropy` chunk by chunk, skipping positions without a target.

    A quantized weight stays quantized and gets no gradient.

    Matmuls run in the dtype of `hidden`, or in autocast's if enabled; sums run in fp32 (fp64 for fp64). Unless
    gradients are disabled, the forward pass computes them as well, as in Liger Kernel (arXiv 2410.10989).
    """
    return linear_cross_entropy_and_hits(hidden, weight, targets, options, ignore_index, count_hits=False)[0]


def linear_cross_entropy_and_hits(
    hidden: torch.Tensor,
    weight: Matrix,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
    count_hits: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `linear_cross_entropy` and the number of targets that have the largest logit: () and () int64.

    The number is 0 without `count_hits`.
    """
    device = hidden.device.type
    hidden = autocasted(hidden)
    with torch.autocast(device, enabled=False):
        has_target = targets != ignore_index
        if not bool(has_target.all()):
            hidden, targets = hidden[has_target], targets[has_target]
        data, format = stored(weight)
        if not torch.is_grad_enabled():  # needs_input_grad is true even under no_grad
            hidden, data = hidden.detach(), data.detach()
        sums = _LinearCrossEntropy.apply(hidden, data, format, targets, options, count_hits)
        return cast(tuple[torch.Tensor, torch.Tensor], sums)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        format: int,
        targets: torch.Tensor,
        options: LossOptions,
        count: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = head_operands(hidden, weight, format, targets, *ctx.needs_input_grad[:2])
        # With both options, the gradient of smoothing differs from logit to logit.
        fused = head.is_native and not (options.softcap and options.label_smoothing)
        total, hits = (_native_sums if fused else _torch_sums)(head, options, count)
        ctx.save_for_backward(head.hidden_grad, head.weight_grad)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        return *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors), None, None, None, None


def target_log_probabilities(
    hidden: torch.Tensor, weight: Matrix, targets: torch.Tensor, softcap: float = 0.0
) -> torch.Tensor:
    """Returns the log-probability of each target, (N,), of hidden (N, D), weight (V, D) and targets (N,).

    Runs chunk by chunk as `linear_cross_entropy`. The gradients depend on what the loss does with the results, so the
    backward pass computes the logits again.
    """
    device = hidden.device.type
    hidden = autocasted(hidden)
    with torch.autocast(device, enabled=False):
        options = LossOptions(softcap=softcap)
        return cast(torch.Tensor, _TargetLogProbabilities.apply(hidden, *stored(weight), targets, options))


class _TargetLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, format: int, targets: torch.Tensor, options: LossOptions
    ) -> torch.Tensor:
        head = head_operands(hidden, weight, format, targets, of_hidden=False, of_weight=False)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.format, ctx.options = format, options
        losses = [part for part, _ in _chunks(head)(head, options)]
        return -torch.cat([hidden.new_empty(0, dtype=wide(hidden)), *losses])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets = ctx.saved_tensors
        head = head_operands(hidden, weight, ctx.format, targets, *ctx.needs_input_grad[:2])
        for _ in _chunks(head)(head, ctx.options, scale=-grad_outputs[0]):
            pass
        return head.hidden_grad, head.weight_grad, None, None, None


@dataclass(frozen=True)
class HeadOperands:
    """The operands of the head, and its gradients, which are None for what is frozen."""

    hidden: torch.Tensor
    weight: torch.Tensor  # in the dtype of `hidden`, or quantized
    format: int
    targets: torch.Tensor
    hidden_grad: torch.Tensor | None
    weight_grad: torch.Tensor | None  # in fp32 or wider

    @property
    def is_native(self) -> bool:
        """True if our kernels take these operands."""
        return is_native(self.hidden) and (self.format != NOT_QUANTIZED or is_native(self.weight))

    def column_sums(self) -> torch.Tensor:
        """Returns the sum of the rows of the weight, (D,) fp32."""
        parts = self.weight.split(len(self.weight) if self.format == NOT_QUANTIZED else SUMMED_ROWS)
        values = (as_values(part, self.format, self.hidden.dtype) for part in parts)
        return sum(rows.sum(0, dtype=torch.float32) for rows in values)  # type: ignore[return-value]

    def buffer(self) -> torch.Tensor | None:
        """Returns memory for a chunk's logits, or None without gradients.

        Chunks share it: allocating and freeing large blocks would fragment the heap.
        """
        if self.hidden_grad is None and self.weight_grad is None:
            return None
        return self.hidden.new_empty(min(CHUNK_ROWS, len(self.hidden)), len(self.weight))


def head_operands(
    hidden: torch.Tensor, weight: torch.Tensor, format: int, targets: torch.Tensor, of_hidden: bool, of_weight: bool
) -> HeadOperands:
    """Returns contiguous operands of the head, with memory for the gradients of its hidden states and its weight."""
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise IndexError(f"a target is out of bounds: targets must lie in 0 to {len(weight) - 1}.")
    weight_grad = hidden.new_empty(weight.shape, dtype=wide(hidden)) if of_weight else None
    if weight_grad is not None and not len(hidden):
        weight_grad.zero_()
    return HeadOperands(
        hidden.contiguous(),
        (weight.to(hidden.dtype) if format == NOT_QUANTIZED else weight).contiguous(),
        format,
        targets.to(torch.int64).contiguous(),
        hidden.new_empty(hidden.shape) if of_hidden else None,
        weight_grad,
    )


# Takes the rows of a chunk and its losses, shares and exponentials, which it may change; returns the shares and the
# gradients of the targets' logits.
Revise = Callable[[slice, torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(head: HeadOperands) -> Callable[..., Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    return native_chunks if head.is_native else _torch_chunks


def _native_sums(head: HeadOperands, options: LossOptions, count: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums of losses and hits and computes the gradients, with the kernels."""
    uniform = options.label_smoothing / len(head.weight)
    total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for losses, above in native_chunks(head, options, count):
        total += losses.sum()
        hits += (above == 0).sum()  # `above` is empty without `count`
    if uniform:  # the same for all tokens: the gradient of every logit is smaller by `uniform`
        hidden_sum, weight_sum = head.hidden.sum(0, dtype=torch.float32), head.column_sums()
        total -= uniform * (hidden_sum * weight_sum).sum()
        for grad, summed in ((head.hidden_grad, weight_sum), (head.weight_grad, hidden_sum)):
            if grad is not None:
                grad.sub_(uniform * summed)
    return total, hits


def native_chunks(
    head: HeadOperands,
    options: LossOptions,
    count: bool = False,
    scale: torch.Tensor | None = None,
    revise: Revise | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each chunk's losses and ranks of the targets, and computes the gradients of the losses times `scale` (N,).

    `revise` replaces what the gradients of a chunk are computed from.

    Stores exponentials instead of logits, whose rounding to bf16 would be the largest error of the losses.
    """
    settings = (options.label_smoothing, options.z_loss, options.softcap, count)
    buffer, scaled = head.buffer(), torch.empty_like(head.hidden[:CHUNK_ROWS])
    for start in range(0, len(head.hidden), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk, targets = head.hidden[part], head.targets[part]
        exponentials = None if buffer is None else buffer[: len(chunk)]
        losses, shares, at_target, above = torch.ops.sansgpu.cross_entropy_losses(
            exponentials, chunk, head.weight, head.format, targets, *settings
        )
        if scale is not None:
            shares.mul_(scale[part])
            at_target.mul_(scale[part])
        if revise is not None:
            shares, at_target = revise(part, losses, shares, exponentials)
        if head.hidden_grad is not None:
            out = head.hidden_grad[part]
            operands = exponentials, head.weight, head.format, targets
            torch.ops.sansgpu.cross_entropy_hidden(out, *operands, shares, at_target)
        if head.weight_grad is not None and exponentials is not None:
            rows = torch.mul(chunk, shares[:, None], out=scaled[: len(chunk)])
            matmul_into(head.weight_grad, exponentials.T, rows, add=start > 0)
            add_rows(head.weight_grad, targets, chunk, at_target)
        yield losses, above


def _torch_sums(head: HeadOperands, options: LossOptions, count: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Does what `_native_sums` does, with plain torch."""
    total = torch.zeros((), dtype=wide(head.hidden), device=head.hidden.device)
    hits = torch.zeros((), dtype=torch.int64, device=head.hidden.device)
    for losses, is_hit in _torch_chunks(head, options, count):
        total += losses.sum()
        hits += is_hit.sum()
    return total, hits


def _torch_chunks(
    head: HeadOperands, options: LossOptions, count: bool = False, scale: torch.Tensor | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields each chunk's losses and hits, and computes gradients as `native_chunks` does."""
    buffer, weight = head.buffer(), as_values(head.weight, head.format, head.hidden.dtype)
    for start in range(0, len(head.hidden), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk, targets = head.hidden[part], head.targets[part]
        logits = chunk @ weight.T if buffer is None else buffer[: len(chunk)]
        if buffer is not None:
            matmul_into(logits, chunk, weight.T)
        # Counted before the logits become their gradients.
        is_hit = logits.argmax(dim=1) == targets if count else targets.new_empty(0)
        losses, logits_grad = _losses(logits, targets, options, buffer is not None)
        if scale is not None:
            logits_grad.mul_(scale[part, None])
        if head.hidden_grad is not None:
            matmul_into(head.hidden_grad[part], logits_grad, weight)
        if head.weight_grad is not None:
            matmul_into(head.weight_grad, logits_grad.T, chunk, add=start > 0)
        yield losses[:, 0], is_hit


def _losses(
    logits: torch.Tensor, targets: torch.Tensor, options: LossOptions, with_gradients: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each row and the gradient of the logits, which are overwritten."""
    smoothing, z_loss, softcap = options.label_smoothing, options.z_loss, options.softcap
    dtype, targets = logits.dtype, targets[:, None]
    # Operates in place: another copy of the logits costs more than the arithmetic.
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square() if with_gradients else None
        logits.mul_(softcap)
    row_max = logits.amax(dim=1, keepdim=True)
    of_target, mean = logits.gather(1, targets), logits.mean(dim=1, keepdim=True) if smoothing else 0.0
    normalizer = logits.sub_(row_max).exp_().sum(dim=1, keepdim=True)
    lse = normalizer.log() + row_max
    losses = lse - (1 - smoothing) * of_target - smoothing * mean + z_loss * lse.square()
    if with_gradients:
        logits.mul_((1 + 2 * z_loss * lse) / normalizer).sub_(smoothing / logits.shape[1])
        logits.scatter_add_(1, targets, torch.full_like(of_target, smoothing - 1))
        if slope is not None:
            logits.mul_(slope)
    return losses, logits.to(dtype)
