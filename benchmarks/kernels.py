"""Our kernels beside torch's, forward and backward, in turn: `python -m benchmarks.kernels`.

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
from sansgpu.kernels import native
from sansgpu.kernels.attention import attention, causal_ranges, visible_keys
from sansgpu.kernels.cross_entropy import linear_cross_entropy
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.probe import available_cores

Call = Callable[[], torch.Tensor]  # forward; its result is summed and sent backward
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
    """torch's, with mask (B, 1, T, T) bool."""
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def our_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Our summed loss. hidden (N, D), weight (V, D), targets (N,)."""
    return linear_cross_entropy(hidden, weight, targets)


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The two calls that most code makes."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def torch_loss(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunked: bool) -> torch.Tensor:
    """torch's own fusion, whole or in chunks."""
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return F.linear_cross_entropy(hidden, weight.to(hidden.dtype), targets, reduction="sum", options=options)


@dataclass(frozen=True)
class Case:
    """Contenders on one shape; ours first."""

    name: str
    contenders: dict[str, Call]
    leaves: tuple[torch.Tensor, ...]  # whose gradients are computed


@dataclass(frozen=True)
class AttentionShape:
    """One attention to measure."""

    batch: int
    heads: int
    time: int
    head_dim: int = 64
    kv_heads: int | None = None
    documents: int = 1  # packed in a row, equally long
    dropout: float = 0.0

    @property
    def name(self) -> str:
        """The shape, in short."""
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
QUICK_ATTENTION = (AttentionShape(1, 2, 64, 16), AttentionShape(1, 2, 64, 16, documents=4))
QUICK_LOSS = ((64, 32, 500),)


def attention_case(shape: AttentionShape, dtype: torch.dtype) -> Case:
    """Ours and torch's on one shape."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = shape.kv_heads or shape.heads
    q, k, v = (
        torch.randn(shape.batch, heads, shape.time, shape.head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in (shape.heads, kv_heads, kv_heads)
    )
    ids = torch.arange(shape.time).mul(shape.documents).div(shape.time, rounding_mode="floor")
    ranges = causal_ranges(ids.expand(shape.batch, -1))  # made once a batch, so neither this nor the mask is timed
    mask = visible_keys(ranges, shape.time) if shape.documents > 1 else None
    contenders: dict[str, Call] = {
        "ours": partial(attention, q, k, v, ranges, shape.dropout),
        "scaled_dot_product_attention": partial(torch_attention, q, k, v, mask, shape.dropout),
    }
    return Case(f"attention {_short(dtype)} {shape.name}", contenders, (q, k, v))


def loss_case(tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> Case:
    """Ours, the plain calls and torch's fusions on one shape; the weight is fp32, as a trained one is."""
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


def seconds(call: Call, leaves: tuple[torch.Tensor, ...]) -> float:
    """One forward and backward."""
    start = time.perf_counter()
    result = call()
    result.backward(torch.ones_like(result))
    spent = time.perf_counter() - start
    for leaf in leaves:
        leaf.grad = None
    return spent


def measure(case: Case, repeats: int) -> list[Row]:
    """The contenders in turn; one row a peer."""
    taken: dict[str, list[float]] = {name: [] for name in case.contenders}
    for repeat in range(repeats + 1):
        for name, call in case.contenders.items():
            spent = seconds(call, case.leaves)
            if repeat:  # the first only warms up
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
    """Measure every case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="turns of every contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="toy shapes: does it work at all")
    parser.add_argument("--json", type=Path, metavar="OUT")
    given = parser.parse_args()
    torch.set_num_threads(available_cores())
    keep_freed_memory()  # as in a run
    if reason := native.load(compiled_cache(say)):
        say(f"plain torch does the work of our kernels: {reason}")
    torch.manual_seed(0)
    rows: list[Row] = []
    attentions, losses = (QUICK_ATTENTION, QUICK_LOSS) if given.quick else (ATTENTION, LOSS)
    makers = [partial(attention_case, shape) for shape in attentions] + [partial(loss_case, *s) for s in losses]
    for make in makers:
        for dtype in (torch.bfloat16, torch.float32):
            case = make(dtype)
            say(case.name)
            rows += measure(case, given.repeats)
    print_table(f"forward and backward, medians of {given.repeats}", COLUMNS, rows)
    write_json(given.json, "kernels", vars(given), rows)


if __name__ == "__main__":
    main()
