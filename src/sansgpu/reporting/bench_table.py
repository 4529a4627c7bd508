"""Tables of `sansgpu bench`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from sansgpu.reporting.tables import count, gigabytes, grid, pace, rate
from sansgpu.reporting.terminal import clock, duration

Result = dict[str, Any]


def print_bench(console: Console, result: Result) -> None:
    """Prints a summary of `bench`; its report has the details."""
    table = grid()
    step, build = result["step_seconds"], result["build_seconds"]
    table.add_row(
        "step",
        f"{step['median']:.3g} s ({step['min']:.3g} to {step['max']:.3g}) of {result['tokens_per_step']:,} tokens: "
        f"{result['micro_batch']} x {result['gradient_accumulation_steps']} "
        f"{'windows of' if result['task'] == 'pretrain' else 'examples of up to'} {result['window']}",
    )
    table.add_row(
        "speed",
        f"{pace(result['tokens_per_second'])}, {rate(result['flops_per_second'])}, MFU {result['mfu']:.0%} of "
        f"{rate(result['gemm_flops_per_second'])}",
    )
    table.add_row("peak memory", gigabytes(result["peak_rss_bytes"]))
    table.add_row("setup", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.items()))
    shares = result["breakdown"].items()
    table.add_row("step time", ", ".join(f"{part} {share:.0%}" for part, share in shares))
    for row in result["what_if"][1:]:
        if "speedup" in row:
            table.add_row("what if", f"{row['name']}: {row['speedup']:.2f}x, trade-off: {row['gives_up']}")
    for projection in result["projections"]:
        finish = clock(datetime.fromisoformat(projection["done"]))
        table.add_row(f"{projection['steps']:,} steps", f"{duration(projection['seconds'])}, done {finish}")
    for text in result["disturbances"]:
        table.add_row("disturbance", text, style="yellow")
    table.add_row("written", ", ".join(result["files"]))
    console.print(table)


def print_forward(console: Console, result: Result) -> None:
    table = Table(title=f"{count(result['parameters'])} parameters, forward only", title_justify="left")
    for name in ("batch", "seconds", "tokens/s", "GFLOP/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    for row in result["forward"]:
        table.add_row(
            f"{row['batch_size']} x {row['window']}",
            f"{row['seconds']:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['flops_per_second'] / 1e9:,.0f}",
            f"{row['mfu']:.0%}",
            gigabytes(row["peak_rss_bytes"]),
        )
    console.print(table)
