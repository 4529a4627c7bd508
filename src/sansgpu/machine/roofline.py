"""A roofline model of a step, measured within seconds.

The bound is the time of the matrix products, timed at the model's own shapes, plus the memory traffic of everything
else: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

COPY_BYTES = 64 << 20  # size of the copy that measures bandwidth: larger than most caches, small enough for any machine
MIN_CALLS, ENOUGH_SECONDS = 3, 0.05  # minimum calls and time to measure one product
SMALL_SIZE, LONG_SECONDS = 256, 1.0  # a GEMM that would take longer than this is estimated from one of this size
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

Shape = tuple[int, int]  # (inputs, outputs) of a linear layer


def best_seconds(work: Callable[[], object], device: str = "cpu", min_seconds: float = ENOUGH_SECONDS) -> float:
    """Returns the minimum duration of `work` over at least MIN_CALLS calls and `min_seconds`, after a warm-up."""
    work()
    best, total, count = float("inf"), 0.0, 0
    while count < MIN_CALLS or total < min_seconds:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        best, total, count = min(best, seconds), total + seconds, count + 1
    return best


def gemm_rate(size: int, precision: str, device: str = "cpu") -> float:
    """Returns the FLOP/s of a square product, or of a smaller one if `size` would take too long (emulated bf16)."""

    def rate(size: int) -> float:
        a = torch.ones(size, size, dtype=DTYPES[precision], device=device)
        return 2 * size**3 / best_seconds(lambda: torch.mm(a, a), device)

    small = rate(SMALL_SIZE)
    return rate(size) if 2 * size**3 / small < LONG_SECONDS else small


def bandwidth() -> float:
    """Returns the memory bandwidth in bytes/s, reads plus writes, of a copy larger than the caches."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source))


def product_seconds(tokens: int, shape: Shape, precision: str, min_seconds: float = ENOUGH_SECONDS) -> float:
    """Times the three products of a linear layer: forward, and the gradients of its input and its weight."""
    inputs, outputs = shape
    dtype = DTYPES[precision]
    x, grad = torch.ones(tokens, inputs, dtype=dtype), torch.ones(tokens, outputs, dtype=dtype)
    weight = torch.ones(outputs, inputs, dtype=dtype)
    products = (lambda: torch.mm(x, weight.T), lambda: torch.mm(grad, weight), lambda: torch.mm(grad.T, x))
    return sum(best_seconds(product, min_seconds=min_seconds) for product in products)


@dataclass(frozen=True)
class Roofline:
    """The machine's rates at the shapes of one model."""

    block_flops_per_second: float
    head_flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, moved_bytes: float, head: bool = False) -> float:
        """Returns a lower bound on the time of `flops` in matrix products followed by `moved_bytes` of traffic."""
        rate = self.head_flops_per_second if head else self.block_flops_per_second
        return flops / rate + moved_bytes / self.bytes_per_second


def measure_roofline(tokens: int, block: Mapping[Shape, int], head: Shape, precision: str) -> Roofline:
    """Times a copy and the matrix products of a block and of the head; `block` maps shapes to counts."""
    flops = sum(6.0 * tokens * i * o * count for (i, o), count in block.items())
    seconds = sum(product_seconds(tokens, shape, precision) * count for shape, count in block.items())
    head_flops = 6.0 * tokens * head[0] * head[1]
    return Roofline(flops / seconds, head_flops / product_seconds(tokens, head, precision), bandwidth())
