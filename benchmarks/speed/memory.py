"""Compares the peak memory of runs with the estimates of `plan`: `python -m benchmarks.speed.memory`."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks import ours
from benchmarks.contest import Row, print_table, row_of, say, spawn, write_json

Settings = dict[str, object]

STEPS = 4  # with two evaluations and snapshots; memory peaks at the second
# With evaluations and snapshots, as in a real run.
BASE: Settings = {
    "data.vocab_size": 8000,
    "training.max_steps": STEPS,
    "training.logging_steps": 1,
    "training.eval_steps": 2,
    "training.save_steps": 2,
    "training.eval_batches": 1,
    "training.report_to": "none",
    "device": "cpu",
}


def model(width: int, layers: int, feed_forward: int, vocabulary: int, window: int, activation: str) -> Settings:
    """Returns the settings of a model with head dimension 64."""
    return {
        "model.d_model": width,
        "model.n_layers": layers,
        "model.n_heads": width // 64,
        "model.d_ff": feed_forward,
        "model.vocab_size": vocabulary,
        "model.max_seq_len": window,
        "model.activation": activation,
    }


def how(micro_batch: int, accumulation: int, optimizer: str, precision: str) -> Settings:
    """Returns the settings of batch, optimizer and precision."""
    return {
        "training.batch_size": micro_batch,
        "training.gradient_accumulation_steps": accumulation,
        "training.optimizer": optimizer,
        "training.precision": precision,
    }


CHECKPOINTED: Settings = {"model.gradient_checkpointing": "true"}
M10, M11 = model(256, 8, 1024, 12288, 256, "relu2"), model(256, 4, 1024, 32000, 512, "gelu")
M92 = model(768, 12, 3072, 8000, 512, "gelu")
DEFAULT, TINY = "configs/default.yaml", "configs/tiny.yaml"
# name: (configuration, changes to it)
RUNS: dict[str, tuple[str, Settings]] = {
    "10M relu2, Muon, 16 x 1": (DEFAULT, {**M10, **how(16, 1, "muon", "bf16")}),
    "11M gelu, AdamW, 2 x 8, fp32": (DEFAULT, {**M11, **how(2, 8, "adamw", "fp32")}),
    "25M, Muon, 8 x 2": ("small", how(8, 2, "muon", "bf16")),
    "25M, AdamW, 16 x 1, checkpointing": ("small", {**how(16, 1, "adamw", "bf16"), **CHECKPOINTED}),
    "92M gelu, AdamW, 4 x 1": (DEFAULT, {**M92, **how(4, 1, "adamw", "bf16")}),
    "117M, AdamW, 4 x 2, fp32, checkpointing": ("medium", {**how(4, 2, "adamw", "fp32"), **CHECKPOINTED}),
    "117M, Muon, 2 x 2, fp32": ("medium", how(2, 2, "muon", "fp32")),
    "345M, Muon, 2 x 1": ("large", how(2, 1, "muon", "bf16")),
}
QUICK: dict[str, tuple[str, Settings]] = {"toy": (TINY, {**how(4, 2, "adamw", "fp32"), "data.vocab_size": 512})}
COLUMNS = {
    "run": ("name", "s"),
    "parameters": ("parameters", ",d"),
    "planned GB": ("planned_gb", ".2f"),
    "measured GB": ("measured_gb", ".2f"),
    "planned over measured": ("error", "+.1%"),
}


def measure(name: str, config: str, settings: Settings) -> Row:
    """Measures a run. Raises NoResultError if it fails."""
    with tempfile.TemporaryDirectory(prefix="sansgpu-memory-") as folder:
        outcome = spawn(ours.command(Path(folder) / "run", {**BASE, **settings}, config))
    if outcome.code:
        raise outcome.no_result()
    start = outcome.named("start")[0][1]
    planned, measured = start["memory_bytes"]["total"], outcome.peak_rss_bytes
    return {
        "name": name,
        "parameters": start["parameters"],
        "memory_bytes": start["memory_bytes"],
        "peak_rss_bytes": measured,
        "planned_gb": planned / 1e9,
        "measured_gb": measured / 1e9,
        "error": planned / measured - 1,
        "config": config,
        "settings": settings,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use a toy size, to test the benchmark itself")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rows: list[Row] = []
    for name, (config, settings) in (QUICK if args.quick else RUNS).items():
        say(name)
        rows.append(row_of(name, partial(measure, name, config, settings)))
    errors = [abs(row["error"]) for row in rows if "error" in row]
    print_table("Peak memory of the process", COLUMNS, rows)
    if errors:
        say(f"mean error {mean(errors):.1%}, maximum {max(errors):.1%}")
    write_json(args.json, "memory", vars(args), rows)


if __name__ == "__main__":
    main()
