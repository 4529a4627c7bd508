"""Rates of matmuls on this machine, and a roofline model of a step, all measured within seconds.

The bound is the time of the matrix products, timed at the model's own shapes, plus the memory traffic of everything
else: S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sansgpu.config.training import TrainingConfig
from sansgpu.kernels import library
from sansgpu.kernels.matmul import Matmul, MatmulPrecision, integer_of, multiply
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.measurements import best_measurement, cached_measurement
from sansgpu.machine.probe import has_native_bf16, is_emulated, one_thread, tensor_dtype

COPY_BYTES = 64 << 20  # size of the copy that measures bandwidth: larger than most caches, small enough for any machine
MIN_CALLS, ENOUGH_SECONDS = 3, 0.05  # minimum calls and time to measure one product
SMALL_SIZE, LONG_SECONDS = 256, 1.0  # a GEMM that would take longer than this is estimated from one of this size
GEMM_SIZE = 2048  # large enough for the peak rate, and takes only tenths of a second on a slow core
LAYER_TOKENS, LAYER_WIDTH = 1024, 768  # a typical layer, timed to choose the precision
LAYER_ROUNDS = 3  # times that each precision is timed

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


def _product(a: torch.Tensor, b: torch.Tensor, precision: str, ours: bool = False) -> Callable[[], object]:
    """Returns a function that multiplies a and b: with our kernel for integers or if `ours`, otherwise with torch's."""
    integer = integer_of(precision)
    if integer is None and not ours:
        return lambda: torch.mm(a, b)
    library.load()
    matmul, chosen = Matmul(a, b, a.new_empty(a.shape[0], b.shape[1])), MatmulPrecision.of(a.dtype, integer)
    return lambda: multiply(chosen, matmul)


def gemm_rate(size: int, precision: str, device: str = "cpu") -> float:
    """Returns the FLOP/s of a square product, or of a smaller one if `size` would take too long (emulated bf16)."""

    def rate(size: int) -> float:
        a = torch.ones(size, size, dtype=tensor_dtype(precision), device=device)
        return 2 * size**3 / best_seconds(_product(a, a, precision), device)

    small = rate(SMALL_SIZE)
    return rate(size) if 2 * size**3 / small < LONG_SECONDS else small


def peak_gemm_rate(
    folder: Path, precision: str, device: str, threads: int, processes: int = 1, again: bool = False
) -> float:
    """Returns the best rate of a square product in FLOP/s measured on this machine, now or earlier.

    Other programs make a measurement too low, never too high, so the cache `folder` keeps the best one. Each process
    measures once, and once more with `again`. `threads` and `processes`, the run's number of processes on this machine,
    only distinguish cached results. Emulated bf16 counts as fp32, because its products are computed in fp32.
    """
    if is_emulated(precision, device):
        precision = "fp32"
    key = {"gemm": GEMM_SIZE, "precision": precision, "device": device, "threads": threads, "processes": processes}
    rate = gemm_rate(GEMM_SIZE, precision, device) if again else first_gemm_rate(precision, device, threads)
    return best_measurement(folder, key, rate)


@cache
def first_gemm_rate(precision: str, device: str, threads: int) -> float:
    """Measures the rate in FLOP/s once per process; `threads` only distinguishes cached results."""
    return gemm_rate(GEMM_SIZE, precision, device)


def bandwidth() -> float:
    """Returns the memory bandwidth in bytes/s, reads plus writes, of a copy larger than the caches."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source))


def product_seconds(
    tokens: int, shape: Shape, precision: str, min_seconds: float = ENOUGH_SECONDS, ours: bool = False
) -> float:
    """Times the three products of a linear layer: forward, and the gradients of its input and its weight.

    With `ours`, fp32 and bf16 are timed with our kernels, too.
    """
    inputs, outputs = shape
    dtype = tensor_dtype(precision)
    x, grad = torch.ones(tokens, inputs, dtype=dtype), torch.ones(tokens, outputs, dtype=dtype)
    weight = torch.ones(outputs, inputs, dtype=dtype)
    operands = ((x, weight.T), (grad, weight), (grad.T, x))
    products = (_product(a, b, precision, ours) for a, b in operands)
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


def resolve_precision(
    training: TrainingConfig, device: torch.device, ours: bool = False, takes_int8: bool = False
) -> str:
    """Returns the precision of matmuls: `auto` becomes the fastest one that trains as well as fp32.

    It is bf16 on a processor that supports it, if timed products are faster than in fp32. With `ours`, for models that
    use our kernels, it is int16 on other processors, and, with `takes_int8`, int8 if that is faster still.
    """
    precision = training.precision
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    narrow = "bf16" if has_native_bf16() else "int16" if ours else None
    best = narrow if narrow and is_faster(narrow, "fp32", ours) else "fp32"
    return int8_if_faster(best) if ours and takes_int8 else best


def int8_if_faster(precision: str) -> str:
    """Returns int8 if this processor multiplies it faster than `precision`, otherwise `precision`."""
    return "int8" if library.multiplies_int8() and is_faster("int8", precision, ours=True) else precision


def is_faster(precision: str, other: str, ours: bool) -> bool:
    """Returns whether a typical linear layer is faster in one precision than in another, with our kernels if `ours`.

    Flags do not suffice: virtual machines may emulate bf16, and an emulation may be slow in only one layout. This is
    measured once on this machine, alternately and in one thread. Then it is cached, whatever other programs did
    meanwhile, because a run's results depend on it: all its processes and repetitions must choose alike.
    """
    shape = (LAYER_WIDTH, LAYER_WIDTH)
    kernels = library.name() if ours else f"torch {torch.backends.cpu.get_cpu_capability()}"
    key = {"faster": sorted((precision, other)), "gemm": [LAYER_TOKENS, *shape], "kernels": kernels}

    def measure() -> dict[str, float]:
        best = dict.fromkeys((precision, other), float("inf"))
        with one_thread():
            for _ in range(LAYER_ROUNDS):
                for name, seconds in best.items():
                    best[name] = min(seconds, product_seconds(LAYER_TOKENS, shape, name, 0.0, ours))
        return best

    seconds = cached_measurement(cache_dir(None), key, measure, keep_disturbed=True)
    return bool(seconds[precision] < seconds[other])
