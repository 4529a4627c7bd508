"""Output projection and cross-entropy fused, so that the full (N, V) logits are never in memory.

N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.flop_counter import register_flop_formula

from sansgpu.kernels import native
from sansgpu.kernels.embedding import add_rows
from sansgpu.kernels.linear import autocasted
from sansgpu.kernels.matmul import is_native, matmul_into
from sansgpu.kernels.soft_targets import MixedLoss, SoftTargets

CHUNK_ROWS = 1024  # tokens per chunk; with fewer, accumulating the (V, D) gradient takes longer than the matmuls

_library = torch.library.Library("sansgpu", "FRAGMENT")
_library.define(
    "cross_entropy_losses(Tensor(a!)? exponentials, Tensor hidden, Tensor head, Tensor targets, float smoothing, "
    "float z_loss, float softcap, bool count) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "cross_entropy_hidden(Tensor(a!) out, Tensor exponentials, Tensor head, Tensor targets, Tensor shares, "
    "Tensor at_target) -> ()"
)


def _cross_entropy_losses(
    exponentials: torch.Tensor | None, hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor,
    smoothing: float, z_loss: float, softcap: float, count: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Returns what native/cross_entropy.cpp calls losses, shares, at_target and above."""
    (rows, width), vocabulary = hidden.shape, len(head)
    if head.shape[1] != width or len(targets) != rows:
        raise RuntimeError("the hidden states, the head and the targets do not match in shape.")
    above = torch.zeros(rows if count else 0, dtype=torch.int64)
    results = [hidden.new_empty(rows, dtype=torch.float32) for _ in range(3)]
    native.call(
        "cross_entropy_losses", hidden.dtype == torch.bfloat16, rows, width, vocabulary, hidden, head, targets,
        float(smoothing), float(z_loss), float(softcap), exponentials, above if count else None, *results,
    )  # fmt: skip
    return *results, above


def _logits_at(hidden: torch.Tensor, head: torch.Tensor, places: torch.Tensor, softcap: float) -> torch.Tensor:
    """Returns the logits (N, K) of the tokens of the vocabulary at `places` (N, K)."""
    logits = hidden.new_empty(places.shape, dtype=torch.float32)
    sizes = (*hidden.shape, places.shape[1])
    narrow = hidden.dtype == torch.bfloat16
    native.call("head_logits_at", narrow, *sizes, hidden, head, places, float(softcap), logits)
    return logits


def _cross_entropy_hidden(
    out: torch.Tensor, exponentials: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor,
    at_target: torch.Tensor,
) -> None:  # fmt: skip
    sizes = (rows, width, vocabulary) = (*out.shape, len(head))
    if exponentials.shape != (rows, vocabulary) or head.shape != (vocabulary, width):
        raise RuntimeError("the exponentials, the head and the gradient do not match in shape.")
    native.call(
        "cross_entropy_hidden", out.dtype == torch.bfloat16, *sizes, exponentials, head, targets, shares, at_target, out
    )


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
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Computes `reference_cross_entropy` chunk by chunk, skipping positions without a target.

    Matmuls run in the dtype of `hidden`, or in autocast's if enabled; sums run in fp32 (fp64 for fp64). Unless
    gradients are disabled, the forward pass computes them as well, as in Liger Kernel (arXiv 2410.10989).
    """
    return linear_cross_entropy_and_hits(hidden, weight, targets, options, ignore_index, count_hits=False)[0]


def linear_cross_entropy_and_hits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
    count_hits: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `linear_cross_entropy` and the number of targets that have the largest logit: () and () int64.

    The number is 0 without `count_hits`.
    """
    loss, counts = _apply(hidden, weight, targets, options, ignore_index, count_hits, None)
    return loss, counts[0].to(torch.int64)


def linear_mixed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    soft: SoftTargets,
    options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the loss of `SoftTargets` with one pass over the logits, as `linear_cross_entropy` does.

    Returns its sum, (), and the sums of its parts without their factors, (2,): the cross-entropy and the KL divergence.
    Label smoothing is not supported.
    """
    loss, counts = _apply(hidden, weight, targets, options, ignore_index, False, soft)
    return loss, counts[1:]


def _apply(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: LossOptions, ignore_index: int,
    count: bool, soft: SoftTargets | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the loss and what `_Totals.counts` has, of the positions with a target."""
    device = hidden.device.type
    hidden = autocasted(hidden)
    with torch.autocast(device, enabled=False):
        has_target = targets != ignore_index
        if not bool(has_target.all()):
            hidden, targets = hidden[has_target], targets[has_target]
            soft = soft and soft.rows(has_target)
        if not torch.is_grad_enabled():  # needs_input_grad is true even under no_grad
            hidden, weight = hidden.detach(), weight.detach()
        results = _LinearCrossEntropy.apply(hidden, weight, targets, options, count, soft)
        return cast(tuple[torch.Tensor, torch.Tensor], results)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: LossOptions, count: bool,
        soft: SoftTargets | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
            raise IndexError(f"a target is out of bounds: targets must lie in 0 to {len(weight) - 1}.")
        if soft is not None and len(targets) and not 0 <= int(soft.ids.min()) <= int(soft.ids.max()) < len(weight):
            raise IndexError(f"a teacher's token is out of bounds: tokens must lie in 0 to {len(weight) - 1}.")
        head = _HeadOperands(
            hidden.contiguous(),
            weight.to(hidden.dtype).contiguous(),
            targets.to(torch.int64).contiguous(),
            hidden.new_empty(hidden.shape) if of_hidden else None,
            hidden.new_empty(weight.shape, dtype=_wide(hidden)) if of_weight else None,
            soft,
        )
        if head.weight_grad is not None and not len(hidden):
            head.weight_grad.zero_()
        # With both options, the gradient of smoothing differs from logit to logit.
        fused = is_native(head.hidden, head.weight) and not (options.softcap and options.label_smoothing)
        totals = (_native_sums if fused else _torch_sums)(head, options, count)
        ctx.save_for_backward(head.hidden_grad, head.weight_grad)
        ctx.mark_non_differentiable(totals.counts)
        return totals.loss, totals.counts

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_outputs[0]
        return *(None if grad is None else grad.mul_(scale) for grad in ctx.saved_tensors), None, None, None, None


@dataclass(frozen=True)
class _HeadOperands:
    """The operands of the head, and its gradients, which are None for what is frozen."""

    hidden: torch.Tensor
    weight: torch.Tensor  # in the dtype of `hidden`
    targets: torch.Tensor
    hidden_grad: torch.Tensor | None
    weight_grad: torch.Tensor | None  # in fp32 or wider
    soft: SoftTargets | None

    def buffer(self) -> torch.Tensor | None:
        """Returns memory for a chunk's logits, or None without gradients.

        Chunks share it: allocating and freeing large blocks would fragment the heap.
        """
        if self.hidden_grad is None and self.weight_grad is None:
            return None
        return self.hidden.new_empty(min(CHUNK_ROWS, len(self.hidden)), len(self.weight))


class _Totals:
    """The sums over all chunks: the loss, (), and the hits, the cross-entropy and the KL divergence, (3,) fp64."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.loss = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=hidden.device)

    def add_mixed(self, cross_entropy: torch.Tensor, mixed: MixedLoss) -> None:
        self.loss += mixed.losses.sum()
        self.counts[1] += cross_entropy.sum()
        self.counts[2] += mixed.kl.sum()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _native_sums(head: _HeadOperands, options: LossOptions, count: bool) -> _Totals:
    """Returns the sums and computes the gradients, with the kernels.

    Stores exponentials instead of logits, whose rounding to bf16 would be the largest error of the losses.
    """
    hidden, weight, uniform = head.hidden, head.weight, options.label_smoothing / len(head.weight)
    totals, z_loss = _Totals(hidden), options.z_loss if head.soft is None else 0.0  # the mixed loss has its own
    settings = (options.label_smoothing, z_loss, options.softcap, count)
    buffer, scaled = head.buffer(), torch.empty_like(hidden[:CHUNK_ROWS])
    for start in range(0, len(hidden), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk, targets = hidden[part], head.targets[part]
        exponentials = None if buffer is None else buffer[: len(chunk)]
        losses, shares, at_target, above = torch.ops.sansgpu.cross_entropy_losses(
            exponentials, chunk, weight, targets, *settings
        )
        if head.soft is None:
            totals.loss += losses.sum()
            totals.counts[0] += (above == 0).sum()  # `above` is empty without `count`
        else:
            results = exponentials, losses, shares
            shares, at_target = _mix_native(head, options, head.soft.rows(part), part, results, totals)
        if head.hidden_grad is not None:
            out = head.hidden_grad[part]
            torch.ops.sansgpu.cross_entropy_hidden(out, exponentials, weight, targets, shares, at_target)
        if head.weight_grad is not None and exponentials is not None:
            rows = torch.mul(chunk, shares[:, None], out=scaled[: len(chunk)])
            matmul_into(head.weight_grad, exponentials.T, rows, add=start > 0)
            add_rows(head.weight_grad, targets, chunk, at_target)
    if uniform:  # the same for all tokens: the gradient of every logit is smaller by `uniform`
        hidden_sum, weight_sum = hidden.sum(0, dtype=torch.float32), weight.sum(0, dtype=torch.float32)
        totals.loss -= uniform * (hidden_sum * weight_sum).sum()
        for grad, summed in ((head.hidden_grad, weight_sum), (head.weight_grad, hidden_sum)):
            if grad is not None:
                grad.sub_(uniform * summed)
    return totals


def _mix_native(
    head: _HeadOperands,
    options: LossOptions,
    soft: SoftTargets,
    part: slice,
    results: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    totals: _Totals,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the losses of the chunk `part`, and returns the shares and the target's gradients of the mixed loss.

    `results` are those of the kernel: exponentials, losses and shares. The exponentials of the teacher's tokens become
    their gradients divided by the share of the row. They are not added to the gradients of all tokens, because small
    differences would be lost in the rounding of large exponentials.
    """
    exponentials, losses, shares = results
    targets = head.targets[part, None]
    logits = _logits_at(head.hidden[part], head.weight, torch.cat((soft.ids, targets), dim=1), options.softcap)
    mixed = soft.mix(logits[:, :-1], logits[:, -1], losses, targets[:, 0], options.z_loss)
    totals.add_mixed(losses, mixed)
    slope = 1 - (logits / options.softcap).square() if options.softcap else torch.ones_like(logits)
    shares = shares * mixed.share
    if exponentials is not None:
        at_ids = mixed.at_ids * slope[:, :-1] / shares[:, None]
        exponentials.scatter_(1, soft.ids, at_ids.to(exponentials.dtype)).scatter_(1, targets, 0.0)
    return shares, mixed.at_target * slope[:, -1]


def _torch_sums(head: _HeadOperands, options: LossOptions, count: bool) -> _Totals:
    """Does what `_native_sums` does, with plain torch."""
    totals, buffer = _Totals(head.hidden), head.buffer()
    for start in range(0, len(head.hidden), CHUNK_ROWS):
        part = slice(start, start + CHUNK_ROWS)
        chunk, targets = head.hidden[part], head.targets[part]
        logits = chunk @ head.weight.T if buffer is None else buffer[: len(chunk)]
        if buffer is not None:
            matmul_into(logits, chunk, head.weight.T)
        if count:  # before the logits become their gradients
            totals.counts[0] += (logits.argmax(dim=1) == targets).sum()
        if head.soft is None:
            losses, logits_grad = _losses(logits, targets, options, buffer is not None)
            totals.loss += losses.sum()
        else:
            logits_grad = _mix_torch(logits, targets, options, head.soft.rows(part), buffer is not None, totals)
        if head.hidden_grad is not None:
            matmul_into(head.hidden_grad[part], logits_grad, head.weight)
        if head.weight_grad is not None:
            matmul_into(head.weight_grad, logits_grad.T, chunk, add=start > 0)
    return totals


def _mix_torch(
    logits: torch.Tensor, targets: torch.Tensor, options: LossOptions, soft: SoftTargets, with_gradients: bool,
    totals: _Totals,
) -> torch.Tensor:  # fmt: skip
    """Adds the mixed losses of a chunk, and returns the gradient of the logits, which are overwritten."""
    places = torch.cat((soft.ids, targets[:, None]), dim=1)
    known, softcap = logits.gather(1, places).to(_wide(logits)), options.softcap
    if softcap:
        known = softcap * torch.tanh(known / softcap)
    losses, grad = _losses(logits, targets, LossOptions(softcap=softcap), with_gradients)
    mixed = soft.mix(known[:, :-1], known[:, -1], losses[:, 0], targets, options.z_loss)
    totals.add_mixed(losses, mixed)
    if with_gradients:
        slope = 1 - (known / softcap).square() if softcap else torch.ones_like(known)
        at_places = torch.cat((mixed.at_ids, mixed.at_target[:, None]), dim=1) * slope
        grad.mul_(mixed.share[:, None].to(grad.dtype))
        for column in (slice(-1), slice(-1, None)):  # the target last, which may also be a token of the teacher
            grad.scatter_(1, places[:, column], at_places[:, column].to(grad.dtype))
    return grad


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
