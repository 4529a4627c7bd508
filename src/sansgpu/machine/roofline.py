"""What this machine can do at best, measured in seconds, and what that allows a step.

A step is bounded by its products, which are timed at the model's own shapes, and by the bytes that everything else has
to move: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

COPY_BYTES = 64 << 20  # of one array of a copy: more than caches hold, a share of the memory of a small machine
LEAST_CALLS, ENOUGH_SECONDS = 3, 0.05  # of timing one product
SMALL_SIZE, LONG_SECONDS = 256, 1.0  # of a product that tells whether a larger one would take long
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Shape = tuple[int, int]  # inputs, outputs


def best_seconds(work: Callable[[], object], device: str = "cpu", enough: float = ENOUGH_SECONDS) -> float:
    """The least time `work` takes in three calls and `enough` seconds of them, behind one that warms up."""
    work()
    best, total, count = float("inf"), 0.0, 0
    while count < LEAST_CALLS or total < enough:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        best, total, count = min(best, seconds), total + seconds, count + 1
    return best


def gemm_rate(size: int, precision: str, device: str = "cpu") -> float:
    """FLOP/s of a square product; of a smaller one where products are emulated and would take long."""

    def rate(size: int) -> float:
        a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
        return 2 * size**3 / best_seconds(lambda: torch.mm(a, a), device)

    small = rate(SMALL_SIZE)
    return rate(size) if 2 * size**3 / small < LONG_SECONDS else small


def bandwidth() -> float:
    """Bytes/s that this machine reads and writes in a copy larger than its caches."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source))


def product_seconds(tokens: int, shape: Shape, precision: str) -> float:
    """Of a linear layer's three products: forward, to its input and to its weight."""
    inputs, outputs = shape
    dtype = DTYPES[precision]
    x, grad = torch.ones(tokens, inputs, dtype=dtype), torch.ones(tokens, outputs, dtype=dtype)
    weight = torch.ones(outputs, inputs, dtype=dtype)
    products = (lambda: torch.mm(x, weight.T), lambda: torch.mm(grad, weight), lambda: torch.mm(grad.T, x))
    return sum(best_seconds(product) for product in products)


@dataclass(frozen=True)
class Roofline:
    """The machine's rates at the shapes of one model: FLOP/s of products, and bytes/s."""

    block_flops_per_second: float
    head_flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float, head: bool = False) -> float:
        """What so much work takes at least, its products and its traffic one after the other."""
        rate = self.head_flops_per_second if head else self.block_flops_per_second
        return flops / rate + moved_bytes / self.bytes_per_second


def measure_roofline(tokens: int, block: Mapping[Shape, int], head: Shape, precision: str) -> Roofline:
    """Time the products of a block (shapes and how many of each) and of the head, and a copy."""
    flops = sum(6.0 * tokens * i * o * count for (i, o), count in block.items())
    seconds = sum(product_seconds(tokens, shape, precision) * count for shape, count in block.items())
    head_flops = 6.0 * tokens * head[0] * head[1]
    return Roofline(flops / seconds, head_flops / product_seconds(tokens, head, precision), bandwidth())
