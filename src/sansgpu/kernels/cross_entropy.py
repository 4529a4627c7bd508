"""Fused output projection and cross-entropy, which never hold the full (N, V) logits in memory.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from sansgpu.kernels import library
from sansgpu.kernels.block_quantization import NOT_QUANTIZED, Matrix, as_values, row_length, stored
from sansgpu.kernels.embedding import add_rows
from sansgpu.kernels.linear import autocasted
from sansgpu.kernels.matmul import Integer, Matmul, MatmulPrecision, is_native, matmul_into, multiply

CHUNK_ROWS = 1024  # tokens per chunk; with fewer, accumulating the (V, D) gradient takes longer than the matmuls
PLAIN_ROWS = 256  # tokens per chunk in plain torch, which holds several tensors of the size of the logits
# A frozen head accumulates no gradient, so smaller chunks save memory: a token has 1 MB of logits in a vocabulary of
# 262,144. With fewer rows, dequantizing the head for each chunk takes more than a tenth of the time of its products.
FROZEN_HEAD_BYTES, FROZEN_HEAD_ROWS = 256 << 20, 256  # maximum bytes of a chunk's logits, but at least these rows
SUMMED_ROWS = 4096  # rows of a quantized weight that are dequantized at a time to sum them


def chunk_rows(outputs: int, itemsize: int, trained: bool) -> int:
    """Returns the tokens per chunk of logits with `itemsize` bytes, for a head with `outputs` rows."""
    return CHUNK_ROWS if trained else min(CHUNK_ROWS, max(FROZEN_HEAD_ROWS, FROZEN_HEAD_BYTES // (outputs * itemsize)))


@dataclass(frozen=True)
class LossOptions:
    """Options of the cross-entropy loss; the defaults give plain cross-entropy."""

    label_smoothing: float = 0.0  # probability mass spread evenly over the vocabulary (arXiv 1512.00567)
    z_loss: float = 0.0  # coefficient of log(sum(exp(logits)))^2, which keeps logits from drifting (arXiv 2204.02311)
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap) (arXiv 2408.00118); 0 disables it
    integer: Integer | None = None  # multiplies integers, as MatmulPrecision.of says


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
    return _loss_of_logits(reference_logits(hidden[has_target], weight, options.softcap), targets[has_target], options)


def reference_logits(hidden: torch.Tensor, weight: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns the logits (N, V), in fp32 or wider, of hidden (N, D) and weight (V, D)."""
    logits = hidden @ weight.T
    logits = logits.to(wide(logits))
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _loss_of_logits(logits: torch.Tensor, targets: torch.Tensor, options: LossOptions) -> torch.Tensor:
    log_probabilities = torch.log_softmax(logits, dim=1)
    of_target = log_probabilities.gather(1, targets[:, None]).sum()
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
    gradients are disabled, the forward pass also computes the gradients, as in Liger Kernel (arXiv 2410.10989).
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
    """Returns `linear_cross_entropy`, (), and the number of targets with the largest logit, () int64.

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
        # The kernel does not support both options, because the gradient of smoothing then differs between logits.
        if head.is_native and not (options.softcap and options.label_smoothing):
            total, hits = _native_sums(head, options, count)
        else:
            total, hits = plain_sums(head, partial(_plain_loss, head.targets, options, count))
        ctx.save_for_backward(head.hidden_grad, head.weight_grad)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        return *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors), None, None, None, None


def _plain_loss(
    targets: torch.Tensor, options: LossOptions, count: bool, hidden: torch.Tensor, weight: torch.Tensor, part: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, targets = reference_logits(hidden, weight, options.softcap), targets[part]
    hits = (logits.argmax(dim=1) == targets).sum() if count else targets.new_zeros(())
    return _loss_of_logits(logits, targets, options), hits


@dataclass(frozen=True)
class HeadOperands:
    """The operands of the output head, and memory for their gradients, which is None for frozen operands."""

    hidden: torch.Tensor
    weight: torch.Tensor  # in the dtype of `hidden`, or quantized
    format: int
    targets: torch.Tensor
    hidden_grad: torch.Tensor | None
    weight_grad: torch.Tensor | None  # in fp32 or wider

    @property
    def is_native(self) -> bool:
        """True if our kernels support these operands."""
        return is_native(self.hidden) and (self.format != NOT_QUANTIZED or is_native(self.weight))

    def column_sums(self) -> torch.Tensor:
        """Returns the sum of the rows of the weight, (D,) fp32."""
        parts = self.weight.split(len(self.weight) if self.format == NOT_QUANTIZED else SUMMED_ROWS)
        values = (as_values(part, self.format, self.hidden.dtype) for part in parts)
        return sum(_sum_of_rows(rows) for rows in values)  # type: ignore[return-value]

    def buffer(self) -> torch.Tensor | None:
        """Returns memory for a chunk's logits, or None without gradients.

        All chunks use the same memory, because allocating and freeing large blocks would fragment the heap.
        """
        if self.hidden_grad is None and self.weight_grad is None:
            return None
        rows = chunk_rows(len(self.weight), self.hidden.itemsize, self.weight_grad is not None)
        return self.hidden.new_empty(min(rows, len(self.hidden)), len(self.weight))


def head_operands(
    hidden: torch.Tensor, weight: torch.Tensor, format: int, targets: torch.Tensor, of_hidden: bool, of_weight: bool
) -> HeadOperands:
    """Returns contiguous operands of the head, with memory for the gradients of its hidden states and its weight."""
    if weight.shape[1] != row_length(hidden.shape[1], format) or len(targets) != len(hidden):
        raise RuntimeError("the shapes of the hidden states, the output head and the targets do not match.")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise IndexError(f"a target is out of bounds: targets must be from 0 to {len(weight) - 1}.")
    return HeadOperands(
        hidden.contiguous(),
        (weight.to(hidden.dtype) if format == NOT_QUANTIZED else weight).contiguous(),
        format,
        targets.to(torch.int64).contiguous(),
        hidden.new_empty(hidden.shape) if of_hidden else None,
        hidden.new_empty(weight.shape, dtype=wide(hidden)) if of_weight else None,
    )


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def chunks_of(head: HeadOperands, size: int) -> list[slice]:
    """Returns the rows of each chunk, or a single empty chunk if there are no rows."""
    return [slice(start, start + size) for start in range(0, max(1, len(head.hidden)), size)]


def plain_sums(
    head: HeadOperands, loss_of: Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums a loss over chunks and computes its gradients, with plain torch.

    `loss_of(hidden, weight, rows)` computes a chunk, where `rows` is its slice of the tokens. It returns the chunk's
    loss, (), and a second result that needs no gradient. Returns the sums of both over all chunks.
    """
    weight, results = as_values(head.weight, head.format, head.hidden.dtype), []
    for part in chunks_of(head, PLAIN_ROWS):
        hidden, values = head.hidden[part].detach(), weight.detach()
        inputs = [t for t, grad in ((hidden, head.hidden_grad), (values, head.weight_grad)) if grad is not None]
        for tensor in inputs:
            tensor.requires_grad_()
        with torch.set_grad_enabled(bool(inputs)):
            loss, other = loss_of(hidden, values, part)
        grads = list(torch.autograd.grad(loss, inputs)) if inputs else []
        if head.weight_grad is not None:  # sums in fp32
            grad = grads.pop()
            head.weight_grad.add_(grad) if part.start else head.weight_grad.copy_(grad)
        if head.hidden_grad is not None:
            head.hidden_grad[part] = grads.pop()
        results.append((loss.detach(), other.detach()))
    losses, others = zip(*results, strict=True)
    return torch.stack(losses).sum(), torch.stack(others).sum(dim=0)


class Chunk(NamedTuple):
    """Results of the kernel for some of the rows, named as in native/cross_entropy.cpp.

    The gradient of a logit is its stored exponential times the row's share. For the target, it is `at_target` instead.
    """

    rows: slice
    losses: torch.Tensor  # (N,)
    shares: torch.Tensor  # (N,)
    at_target: torch.Tensor  # (N,)
    above: torch.Tensor | None  # (N,) int64: how many logits are larger than the target's; None if not counted
    exponentials: torch.Tensor | None  # (N, V), 0 for the targets; None without gradients


def _native_sums(head: HeadOperands, options: LossOptions, count: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums of losses and hits and computes the gradients, with the kernels."""
    uniform = options.label_smoothing / len(head.weight)
    total, hits = torch.zeros(()), torch.zeros((), dtype=torch.int64)
    for chunk in native_chunks(head, options, count):
        total += chunk.losses.sum()
        if chunk.above is not None:
            hits += (chunk.above == 0).sum()
    if uniform:  # label smoothing reduces the gradient of every logit by this constant
        hidden_sum, weight_sum = _sum_of_rows(head.hidden), head.column_sums()
        total -= uniform * (hidden_sum * weight_sum).sum()
        for grad, summed in ((head.hidden_grad, weight_sum), (head.weight_grad, hidden_sum)):
            if grad is not None:
                grad.sub_(uniform * summed)
    return total, hits


def _sum_of_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Returns the sum (D,) fp32 of the rows of a matrix; torch's depends on the number of threads."""
    total = matrix.new_empty(1, matrix.shape[1], dtype=torch.float32)
    matmul_into(total, matrix.new_ones(1, len(matrix)), matrix)
    return total[0]


def native_chunks(
    head: HeadOperands, options: LossOptions, count: bool = False, revise: Callable[[Chunk], Chunk] | None = None
) -> Iterator[Chunk]:
    """Computes the losses chunk by chunk, stores the gradients of their sum in `head`, and yields the chunks.

    `revise` may change a chunk, also in place, before the gradients are computed from it. Chunks store exponentials
    instead of logits, because rounding logits to bf16 would be the largest error of the losses.
    """
    # Packed exponentials need two places in a row.
    precision = MatmulPrecision.of(head.hidden.dtype, options.integer if len(head.weight) > 1 else None)
    buffer = head.buffer()
    rows = max(1, CHUNK_ROWS if buffer is None else len(buffer))
    scaled = torch.empty_like(head.hidden[:rows])
    for part in chunks_of(head, rows):
        chunk = _losses(head, part, buffer, options, count, precision)
        if revise is not None:
            chunk = revise(chunk)
        if chunk.exponentials is not None:
            _add_gradients(head, chunk, chunk.exponentials, precision, scaled[: len(head.hidden[part])])
        yield chunk


def _add_gradients(
    head: HeadOperands, chunk: Chunk, exponentials: torch.Tensor, precision: MatmulPrecision, scaled: torch.Tensor
) -> None:
    """Stores a chunk's gradients of the hidden states, and adds those of the weight. Overwrites the exponentials.

    `scaled` (N, D) is memory for scaled hidden states.
    """
    part, hidden, shares = chunk.rows, head.hidden[chunk.rows], chunk.shares
    if precision is MatmulPrecision.INT16:
        scales = torch.empty_like(shares)
        library.call("pack_exponentials", *exponentials.shape, exponentials, scales)
    if head.hidden_grad is not None:
        library.call(
            "cross_entropy_hidden", int(precision), head.format, *hidden.shape, len(head.weight), exponentials,
            head.weight, head.targets[part], shares, chunk.at_target, head.hidden_grad[part],
        )  # fmt: skip
    if head.weight_grad is None:
        return
    add = part.start > 0
    if precision is MatmulPrecision.INT16:
        rows = torch.mul(hidden, (shares * scales)[:, None], out=scaled)
        library.call("cross_entropy_weight", *hidden.shape, len(head.weight), exponentials, rows, add, head.weight_grad)
    else:
        if precision in (MatmulPrecision.INT8, MatmulPrecision.INT8_OF_BF16):
            # The tokens of a block share a scale, so their exponentials must have the same unit.
            shares, exponents = torch.frexp(shares)
            exponentials.mul_(torch.ldexp(torch.ones_like(shares), exponents)[:, None].to(exponentials.dtype))
        rows = torch.mul(hidden, shares[:, None], out=scaled)
        multiply(precision, Matmul(exponentials.T, rows, head.weight_grad, add=add))
    add_rows(head.weight_grad, head.targets[part], hidden, chunk.at_target)


def _losses(
    head: HeadOperands,
    part: slice,
    buffer: torch.Tensor | None,
    options: LossOptions,
    count: bool,
    precision: MatmulPrecision,
) -> Chunk:
    """Calls the kernel for a part of the rows; `buffer` receives the exponentials."""
    hidden = head.hidden[part]
    losses, shares, at_target = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
    above = torch.zeros(len(hidden), dtype=torch.int64) if count else None
    exponentials = None if buffer is None else buffer[: len(hidden)]
    library.call(
        "cross_entropy_losses", int(precision), head.format, *hidden.shape, len(head.weight), hidden, head.weight,
        head.targets[part], options.label_smoothing, options.z_loss, options.softcap, exponentials, above, losses,
        shares, at_target,
    )  # fmt: skip
    return Chunk(part, losses, shares, at_target, above, exponentials)
