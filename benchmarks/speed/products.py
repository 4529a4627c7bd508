"""Compares the matmuls of sansgpu's kernels with torch.mm for each instruction set.

    python -m benchmarks.speed.products

Each instruction set is measured in a process with one thread, in which torch is also limited to that set, except that
MKL ignores limits below AVX2. All operands fit in cache. torch.mm packs its operands in each call, sansgpu's kernels
only once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.contest import Row, print_table, say, spawn, write_json
from sansgpu.config import ConfigError
from sansgpu.kernels import library
from sansgpu.machine import instruction_sets

# Environment variables that limit oneDNN, torch and MKL to an instruction set.
LIMITS = {
    "portable": ("SSE41", "default", "SSE4_2"),
    "avx2": ("AVX2", "avx2", "AVX2"),
    "avx_vnni": ("AVX2_VNNI", "avx2", "AVX2"),
    "avx512": ("AVX512_CORE", "avx512", "AVX512"),
    "avx512_vnni": ("AVX512_CORE_VNNI", "avx512", "AVX512_E1"),
    "avx512_bf16": ("AVX512_CORE_BF16", "avx512", "AVX512_E3"),
    "amx": ("AVX512_CORE_AMX", "avx512", "AVX512_E4"),
}
VARIABLES = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
# Rows, columns and inner dimension of matmuls: scores and outputs of attention, then linear layers.
SHAPES = (
    (64, 64, 64), (64, 512, 64), (16, 256, 64), (64, 64, 512), (64, 128, 128), (64, 80, 80),
    (128, 64, 256), (128, 64, 896), (128, 64, 4864), (32, 64, 896), (1, 64, 896), (61, 83, 78),
)  # fmt: skip
QUICK_SHAPES = ((16, 32, 16),)
FLOP = 2e7  # a measurement repeats a matmul until it has computed this many
COLUMNS = {
    "instructions": ("instructions", "s"),
    "M x N x K": ("shape", "s"),
    "dtype": ("dtype", "s"),
    "ours GFLOP/s": ("ours", ".1f"),
    "torch.mm GFLOP/s": ("torch", ".1f"),
    "ours / torch": ("ratio", ".2f"),
}


def packed(b: torch.Tensor) -> torch.Tensor:
    """Returns the right operand in the layout of sansgpu's kernels: bf16 in pairs of rows."""
    return b if b.dtype == torch.float32 else b.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


def seconds(call: Callable[[], object]) -> float:
    """Returns the CPU time of a call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(shape: tuple[int, int, int], dtype: torch.dtype, repeats: int) -> Row:
    """Returns the GFLOP/s of both, from medians of alternating measurements."""
    rows, columns, length = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, length, generator=generator).to(dtype)
    b = torch.randn(length, columns, generator=generator).to(dtype)
    theirs, ours, ours_b = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns), packed(b)
    flop = 2 * rows * columns * length
    calls = max(1, int(FLOP / flop))
    sizes = (dtype == torch.bfloat16, calls, rows, columns, length)
    multiply = partial(library.call, "product", *sizes, a, length, ours_b, columns, ours, columns, False)

    def multiply_with_torch() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=theirs)

    spent = [(seconds(multiply), seconds(multiply_with_torch)) for _ in range(repeats + 1)][1:]
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=1e-1)
    our_rate, their_rate = (flop * calls / median(times) / 1e9 for times in zip(*spent, strict=True))
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return {
        "event": "row",
        "instructions": os.environ[instruction_sets.VARIABLE],
        "shape": f"{rows} x {columns} x {length}",
        "dtype": name,
        "ours": our_rate,
        "torch": their_rate,
        "ratio": our_rate / their_rate,
    }


def measure_all(shapes: tuple[tuple[int, int, int], ...], repeats: int) -> None:
    """Prints the results of this process's instruction set as JSON lines."""
    torch.set_num_threads(1)
    if reason := library.load():
        raise ConfigError(f"the kernels are not available: {reason}")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            print(json.dumps(measure(shape, dtype, repeats)), flush=True)


def measured(name: str, arguments: list[str]) -> list[Row]:
    """Returns the results of a process that uses one instruction set."""
    limits = dict(zip(VARIABLES, LIMITS.get(name, ()), strict=False))
    say(name)
    command = [sys.executable, "-m", "benchmarks.speed.products", "--only", *arguments]
    outcome = spawn(command, environment={**os.environ, **limits, instruction_sets.VARIABLE: name})
    if outcome.code != 0:
        raise outcome.no_result()
    return [row for _, row in outcome.named("row")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.products", description=__doc__)
    parser.add_argument("--repeats", type=int, default=31, help="measurements per matmul (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="use a toy shape, to test the benchmark itself")
    parser.add_argument(
        "--only", action="store_true", help=f"measure only the instruction set in ${instruction_sets.VARIABLE}"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    if args.only:
        return measure_all(QUICK_SHAPES if args.quick else SHAPES, args.repeats)
    arguments = ["--repeats", str(args.repeats), *(["--quick"] if args.quick else [])]
    rows = [row for found in instruction_sets.supported() for row in measured(found.name, arguments)]
    print_table(f"one thread, medians of {args.repeats}", COLUMNS, rows)
    write_json(args.json, "products", vars(args), rows)


if __name__ == "__main__":
    main()
