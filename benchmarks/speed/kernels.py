"""Compares sansgpu's kernels with torch's, forward and backward: `python -m benchmarks.speed.kernels`.

B batch, T time, H query heads, K key-value heads, d head dim, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.contest import Row, print_table, say, write_json
from sansgpu.kernels import library
from sansgpu.kernels.attention import attention, causal_ranges, visible_keys
from sansgpu.kernels.cross_entropy import linear_cross_entropy
from sansgpu.kernels.linear import Linear
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.machine.probe import available_cores

Call = Callable[[], torch.Tensor]  # forward pass; backward starts from the sum of its result
COLUMNS = {
    "kernel": ("name", "s"),
    "peer": ("peer", "s"),
    "ours ms": ("ours_ms", ".2f"),
    "peer ms": ("peer_ms", ".2f"),
    "peer / ours": ("ratio", ".2f"),
}


def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Computes attention with torch; mask (B, 1, T, T) bool, or causal if None."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def our_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the summed loss with sansgpu. hidden (N, D), weight (V, D), targets (N,)."""
    return linear_cross_entropy(hidden, weight, targets)


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the summed loss with the two calls that most code makes."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunked: bool) -> torch.Tensor:
    """Returns the summed loss with torch's fused operation, optionally in chunks."""
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return F.linear_cross_entropy(hidden, weight.to(hidden.dtype), targets, reduction="sum", options=options)


@dataclass(frozen=True)
class Case:
    """The contenders on one shape, sansgpu first."""

    name: str
    contenders: dict[str, Call]
    leaves: tuple[torch.Tensor, ...]  # tensors that need gradients


@dataclass(frozen=True)
class AttentionShape:
    """The shape of an attention to measure."""

    batch: int
    heads: int
    time: int
    head_dim: int = 64
    kv_heads: int | None = None
    documents: int = 1  # per row, packed and of equal length
    dropout: float = 0.0

    @property
    def name(self) -> str:
        parts = [f"B{self.batch} H{self.heads} T{self.time} d{self.head_dim}"]
        parts += [f"K{self.kv_heads}"] if self.kv_heads else []
        parts += [f"{self.documents} documents"] if self.documents > 1 else []
        parts += [f"dropout {self.dropout}"] if self.dropout else []
        return " ".join(parts)


ATTENTION = (
    AttentionShape(4, 12, 512),
    AttentionShape(4, 12, 512, documents=8),
    AttentionShape(1, 12, 2048),
    AttentionShape(4, 12, 512, kv_heads=4),
    AttentionShape(4, 12, 512, dropout=0.1),
)
LOSS = ((1024, 256, 32000), (2048, 768, 8000), (512, 512, 50257))
LINEAR = ((256, 768), (256, 1024), (1024, 256), (768, 3072), (3072, 768), (896, 4864), (4864, 896), (896, 128))
LINEAR_TOKENS = (512, 2048, 8192)
QUICK_ATTENTION = (AttentionShape(1, 2, 64, 16), AttentionShape(1, 2, 64, 16, documents=4))
QUICK_LOSS = ((64, 32, 500),)
QUICK_LINEAR = ((64, 48),)


def attention_case(shape: AttentionShape, dtype: torch.dtype) -> Case:
    """Returns sansgpu's and torch's attention on one shape."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = shape.kv_heads or shape.heads
    q, k, v = (
        torch.randn(shape.batch, heads, shape.time, shape.head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in (shape.heads, kv_heads, kv_heads)
    )
    ids = torch.arange(shape.time).mul(shape.documents).div(shape.time, rounding_mode="floor")
    ranges = causal_ranges(ids.expand(shape.batch, -1))  # computed once per batch, like the mask, so not timed
    mask = visible_keys(ranges, shape.time) if shape.documents > 1 else None
    contenders: dict[str, Call] = {
        "ours": partial(attention, q, k, v, ranges, shape.dropout),
        "scaled_dot_product_attention": partial(torch_attention, q, k, v, mask, shape.dropout),
    }
    return Case(f"attention {_short(dtype)} {shape.name}", contenders, (q, k, v))


def loss_case(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Case:
    """Returns sansgpu's, the plain and torch's fused losses on one shape, with an fp32 weight as in training."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    contenders: dict[str, Call] = {
        "ours": partial(our_loss, hidden, weight, targets),
        "linear + cross_entropy": partial(plain_loss, hidden, weight, targets),
        "F.linear_cross_entropy": partial(torch_loss, hidden, weight, targets, chunked=False),
        "F.linear_cross_entropy, chunked": partial(torch_loss, hidden, weight, targets, chunked=True),
    }
    return Case(f"loss {_short(dtype)} N{tokens} D{width} V{vocabulary}", contenders, (hidden, weight))


def linear_case(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> Case:
    """Returns sansgpu's and torch's linear layer without a bias on one shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype).requires_grad_()
    layer = Linear(inputs, outputs, bias=False).to(dtype)
    contenders: dict[str, Call] = {"ours": partial(layer, x), "F.linear": partial(F.linear, x, layer.weight)}
    return Case(f"linear {_short(dtype)} N{tokens} {inputs} to {outputs}", contenders, (x, layer.weight))


def seconds(call: Call, leaves: tuple[torch.Tensor, ...]) -> float:
    """Times one forward and backward pass."""
    start = time.perf_counter()
    result = call()
    result.backward(torch.ones_like(result))
    spent = time.perf_counter() - start
    for leaf in leaves:
        leaf.grad = None
    return spent


def measure(case: Case, repeats: int) -> list[Row]:
    """Measures the contenders alternately and returns one row per peer."""
    taken: dict[str, list[float]] = {name: [] for name in case.contenders}
    for repeat in range(repeats + 1):
        for name, call in case.contenders.items():
            spent = seconds(call, case.leaves)
            if repeat:  # the first is a warm-up
                taken[name].append(spent)
    ours = taken.pop("ours")
    return [
        {
            "name": case.name,
            "peer": peer,
            "median_seconds": median(ours),
            "peer_median_seconds": median(theirs),
            "ratio": median(theirs) / median(ours),
            "seconds": ours,
            "peer_seconds": theirs,
            "ours_ms": median(ours) * 1e3,
            "peer_ms": median(theirs) * 1e3,
        }
        for peer, theirs in taken.items()
    ]


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.kernels", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="measurements per contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="use toy shapes, to test the benchmark itself")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    torch.set_num_threads(available_cores())
    keep_freed_memory()  # training runs keep it, so kernels are measured as they run there
    if reason := library.load():
        say(f"the C++ kernels are not available, so PyTorch operators are measured: {reason}")
    torch.manual_seed(0)
    rows: list[Row] = []
    attentions, losses = (QUICK_ATTENTION, QUICK_LOSS) if args.quick else (ATTENTION, LOSS)
    linears, tokens = (QUICK_LINEAR, (512,)) if args.quick else (LINEAR, LINEAR_TOKENS)
    makers = [partial(attention_case, shape) for shape in attentions] + [partial(loss_case, *s) for s in losses]
    makers += [partial(linear_case, n, *shape) for shape in linears for n in tokens]
    for make in makers:
        for dtype in (torch.bfloat16, torch.float32):
            case = make(dtype)
            say(case.name)
            rows += measure(case, args.repeats)
    print_table(f"forward and backward, medians of {args.repeats}", COLUMNS, rows)
    write_json(args.json, "kernels", vars(args), rows)


if __name__ == "__main__":
    main()
