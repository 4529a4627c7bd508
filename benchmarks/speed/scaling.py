"""Measures tokens/s, MFU and peak memory of sansgpu along one axis.

python -m benchmarks.speed.scaling --over length
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import ours
from benchmarks.contest import WARM_UP, Row, print_table, row_of, say, spawn, write_json
from benchmarks.corpus import PYTHON_STDLIB

Settings = dict[str, object]
BASE: Settings = {  # the default configuration's model; data.vocab_size is fixed, so that all runs use the same tokens
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_layers": 6,
    "model.d_ff": 768,
    "model.max_seq_len": 256,
    "model.vocab_size": 8192,
    "data.vocab_size": 8192,
    "training.gradient_accumulation_steps": 16,
}
TOKENS_A_STEP = 4096  # except on the micro-batch axis
SHAPES = {  # parameters with a vocabulary of 8,192: (width, layers, heads); SwiGLU with 8/3 of the width
    "10M": (256, 10, 4),
    "30M": (512, 8, 8),
    "90M": (768, 12, 12),
    "200M": (1024, 15, 16),
    "350M": (1024, 27, 16),
}
COLUMNS = {
    "value": ("name", "s"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "x first": ("ratio", ".2f"),
    "MFU": ("mfu", ".1%"),
    "step s": ("median_step_seconds", ".3f"),
    "peak GB": ("peak_rss_gb", ".2f"),
    "parameters": ("parameters", ",d"),
    "micro-batch": ("micro_batch", "d"),
    "precision": ("precision", "s"),
}


def lengths() -> dict[str, Settings]:
    """Returns sequence lengths at equal tokens per step."""
    return {
        f"{length:,} tokens": {
            "model.max_seq_len": length,
            "training.gradient_accumulation_steps": TOKENS_A_STEP // length,
        }
        for length in (128, 256, 512, 1024, 2048, 4096)
    }


def vocabularies() -> dict[str, Settings]:
    """Returns sizes of embedding and head; the data only uses the first 8,192 tokens."""
    return {f"{size}k tokens": {"model.vocab_size": size * 1024} for size in (8, 16, 32, 64, 128)}


def parameters() -> dict[str, Settings]:
    """Returns model sizes with windows of 512 tokens."""
    return {
        name: {
            "model.d_model": width,
            "model.n_layers": layers,
            "model.n_heads": heads,
            "model.d_ff": -(-8 * width // 3 // 64) * 64,
            "model.max_seq_len": 512,
            "training.gradient_accumulation_steps": TOKENS_A_STEP // 512,
        }
        for name, (width, layers, heads) in SHAPES.items()
    }


def micro_batches() -> dict[str, Settings]:
    """Returns micro-batch sizes at 32 windows per step."""
    return {
        f"{size} x {32 // size}": {
            "training.batch_size": size,
            "training.gradient_accumulation_steps": 32 // size,
        }
        for size in (1, 2, 4, 8, 16, 32)
    }


AXES = {
    "length": lengths,
    "vocabulary": vocabularies,
    "parameters": parameters,
    "micro_batch": micro_batches,
}


def measure(name: str, settings: Settings, steps: int, output: Path) -> Row:
    """Measures a run of a few steps. Raises NoResultError if it fails."""
    contestant = ours.contestant(name, output, settings, steps)
    outcome = spawn(contestant.command, contestant.until)
    if outcome.code:
        raise outcome.no_result()
    sample = contestant.read(outcome)
    start = outcome.named("start")[0][1]
    counted = [event for _, event in outcome.named("step")][WARM_UP:]
    return {
        "name": name,
        "tokens_per_second": median(event["tokens_per_second"] for event in counted),
        "mfu": median([event["mfu"] for event in counted if event["mfu"] is not None] or [math.nan]),
        "median_step_seconds": median(sample.step_seconds),
        "first_step_seconds": sample.first_step_seconds,
        "peak_rss_bytes": sample.peak_rss_bytes,
        "peak_rss_gb": sample.peak_rss_bytes / 1e9,
        "step_seconds": sample.step_seconds,
        "settings": settings,
        **{key: start[key] for key in ("parameters", "micro_batch", "precision", "compile", "memory_bytes")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.scaling", description=__doc__)
    parser.add_argument("--over", choices=AXES, required=True)
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps after a warm-up of {WARM_UP}")
    parser.add_argument("--data", default=PYTHON_STDLIB, help="value of data.dataset_name (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="run setting; repeatable")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    data = str(Path(args.data).resolve()) if os.path.exists(args.data) else args.data
    common = {**BASE, "data.dataset_name": data}
    chosen = dict(setting.split("=", 1) for setting in args.set)
    rows: list[Row] = []
    for name, settings in AXES[args.over]().items():
        say(f"{args.over} {name}")
        with tempfile.TemporaryDirectory(prefix="sansgpu-scaling-") as folder:
            chosen_here = {**common, **settings, **chosen}
            rows.append(row_of(name, partial(measure, name, chosen_here, args.steps, Path(folder) / "run")))
        first = next((row["tokens_per_second"] for row in rows if "tokens_per_second" in row), None)
        if first and "tokens_per_second" in rows[-1]:
            rows[-1]["ratio"] = rows[-1]["tokens_per_second"] / first
    print_table(f"sansgpu over {args.over}, medians of {args.steps} steps", COLUMNS, rows)
    write_json(args.json, "scaling", vars(args), rows)


if __name__ == "__main__":
    main()
