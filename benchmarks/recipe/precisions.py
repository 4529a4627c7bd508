"""Measures what a precision of matmuls costs in quality: trains equal models in each one and compares their losses.

    python -m benchmarks.recipe.precisions --data TEXT [TEXT ...] [--precisions int16 int8] [--seeds 3] [--json OUT]

For each dataset, model size and seed, all precisions read the same tokens in the same order, from the same initial
weights. Prints the validation loss and its difference to fp32, and beside it how far apart the losses of fp32 are with
different seeds. The optimizer is Muon: with AdamW, the losses of early steps depend so much on rounding that those of
two fp32 kernels differ by 2%.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import ours
from benchmarks.contest import NoResultError, Row, print_table, say, spawn, write_json
from benchmarks.corpus import PYTHON_STDLIB

STEPS, EVAL = "training.max_steps", "training.eval_batches"
SIZES: dict[str, dict[str, object]] = {
    "1M": {"model.d_model": 128, "model.n_layers": 4, "model.n_heads": 2, "model.d_ff": 384, STEPS: 200},
    "3M": {"model.d_model": 256, "model.n_layers": 4, "model.n_heads": 4, "model.d_ff": 704, STEPS: 100},
    "10M": {"model.d_model": 384, "model.n_layers": 5, "model.n_heads": 6, "model.d_ff": 1024, STEPS: 60, EVAL: 16},
    "30M": {"model.d_model": 640, "model.n_layers": 6, "model.n_heads": 10, "model.d_ff": 1728, STEPS: 40, EVAL: 16},
}
COMMON: dict[str, object] = {
    "data.vocab_size": 2000,
    "data.validation_split": 0.05,
    "model.max_seq_len": 256,
    "training.batch_size": 8,
    "training.gradient_accumulation_steps": 1,
    "training.warmup_steps": 20,
    "training.optimizer": "muon",
    "training.learning_rate": 0.004,
    "training.save_steps": 0,
    "training.eval_steps": 0,
    EVAL: 64,
    "training.logging_steps": 10,
    "training.sample_tokens": 0,
    "training.report_to": "none",
    "device": "cpu",
}
COLUMNS = {
    "dataset": ("dataset", "s"),
    "size": ("size", "s"),
    "precision": ("precision", "s"),
    "loss": ("loss", ".4f"),
    "against fp32 %": ("difference", "+.2f"),
    "fp32, between seeds %": ("spread", ".2f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
}


def measure(settings: dict[str, object], cache: Path, output: Path) -> tuple[float, float]:
    """Trains a model; returns its validation loss and its median tokens/s. Raises NoResultError if the run fails."""
    outcome = spawn(ours.command(output, settings), environment={"SANSGPU_CACHE": str(cache)})
    evaluations, steps = outcome.named("eval"), outcome.named("step")
    if outcome.code or not evaluations:
        raise NoResultError(f"exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    return evaluations[-1][1]["loss"], statistics.median(step["tokens_per_second"] for _, step in steps)


def compare(
    data: str, size: str, precisions: list[str], seeds: int, changes: dict[str, object], folder: Path
) -> list[Row]:
    """Returns a row for each precision, with means over the seeds."""
    losses: dict[str, list[float]] = {precision: [] for precision in precisions}
    rates: dict[str, list[float]] = {precision: [] for precision in precisions}
    for seed in range(seeds):
        for precision in precisions:
            say(f"{data}, {size}, seed {seed}: {precision}")
            chosen = {"data.dataset_name": data, "training.seed": seed, "training.precision": precision}
            run = folder / f"{Path(data).name}-{size}-{seed}-{precision}"
            loss, rate = measure({**COMMON, **SIZES[size], **changes, **chosen}, folder / "cache", run)
            losses[precision].append(loss)
            rates[precision].append(rate)
    exact = losses["fp32"]
    return [
        {
            "dataset": "/".join(Path(data).parts[-2:]),
            "size": size,
            "precision": precision,
            "loss": statistics.mean(losses[precision]),
            "losses": losses[precision],
            "difference": 100 * (statistics.mean(losses[precision]) / statistics.mean(exact) - 1),
            "spread": 100 * (max(exact) / min(exact) - 1),
            "tokens_per_second": statistics.median(rates[precision]),
        }
        for precision in precisions
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=[PYTHON_STDLIB], help="values of data.dataset_name (%(default)s)")
    parser.add_argument("--precisions", nargs="+", default=["int16", "int8"], choices=("bf16", "int16", "int8"))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps of every run; default: of each size")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    rows: list[Row] = []
    changes: dict[str, object] = {STEPS: args.steps} if args.steps else {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-precisions-") as folder:
        for data in args.data:
            known = str(Path(data).resolve()) if Path(data).exists() else data
            for size in args.sizes:
                rows += compare(known, size, ["fp32", *args.precisions], args.seeds, changes, Path(folder))
    print_table("means over the seeds", COLUMNS, rows)
    write_json(args.json, "precisions", vars(args), rows)


if __name__ == "__main__":
    main()
