"""Measures LoRA on a frozen base in int4, int8 and bf16: peak memory and tokens/s, with random weights.

    python -m benchmarks.fine_tuning.quantized_base [--size 7b|3b|1.5b|0.5b|135m] [--bases int4 int8 bf16]
        [--tokens 512] [--steps 5] [--checkpointing] [--threads N] [--json FILE]

The weights are written to a temporary folder (6 GB for 3b), which is deleted. Peak memory covers the whole process,
including loading, quantization, training and the snapshot. The first steps are not timed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.contest import WARM_UP, Row, add_ratios, print_table, row_of, say, spawn, write_json
from benchmarks.ours import command

BASES = ("int4", "int8", "bf16")
COLUMNS = {
    "base": ("name", "s"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "planned, GB": ("planned_gb", ".2f"),
    "tokens/s": ("tokens_per_second", ",.1f"),
    "speed": ("ratio", ".2f"),
    "start, s": ("start_seconds", ".0f"),
    "loss": ("loss", ".4f"),
}


def measure(model: Path, base: str, arguments: argparse.Namespace) -> Row:
    """Trains LoRA on a base in the precision `base`. Raises NoResultError if it fails."""
    steps = arguments.steps + WARM_UP
    settings = {
        "task": "sft", "device": "cpu", "model.name_or_path": model, "model.adapter": "lora", "model.lora_rank": 16,
        "model.base_precision": base, "model.merge_adapter": "false",
        "model.gradient_checkpointing": arguments.checkpointing, "data.dataset_name": model / "rows.jsonl",
        "data.max_length": arguments.tokens, "data.validation_split": 0.05, "training.batch_size": 1,
        "training.gradient_accumulation_steps": 1, "training.max_steps": steps, "training.logging_steps": 1,
        "training.eval_steps": 0, "training.threads": arguments.threads, "training.precision": "bf16",
        "training.compile": "off", "training.report_to": "none", "data.cache_dir": model.parent / "cache",
    }  # fmt: skip
    say(f"training on a base in {base}")
    outcome = spawn([*command(model.parent / f"run-{base}", settings), "--force"])
    events = outcome.named("step")
    if outcome.code or len(events) <= WARM_UP:
        raise outcome.no_result()
    seconds = median(event["step_seconds"] for _, event in events[WARM_UP:])
    counts = [event["tokens"] for _, event in events]
    tokens = median(after - before for before, after in pairwise(counts))
    planned = outcome.named("start")[0][1]["memory_bytes"]["total"]
    return {
        "name": base,
        "status": "measured",
        "peak_rss_bytes": outcome.peak_rss_bytes,
        "peak_gb": outcome.peak_rss_bytes / 1e9,
        "planned_gb": planned / 1e9,
        "tokens_per_second": tokens / seconds,
        "start_seconds": events[0][0],
        "loss": events[-1][1]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("7b", "3b", "1.5b", "0.5b", "135m", "tiny"), default="3b")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES), help="default: all")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per row; each step trains on one row")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sansgpu-quantized-") as name:
        model = Path(name) / "model"
        say(f"writing a model of size {arguments.size}")
        written = spawn([sys.executable, "-m", "tools.written_model", str(model), "--size", arguments.size])
        if written.code:
            raise SystemExit(str(written.no_result()))
        rows = [row_of(base, partial(measure, model, base, arguments)) for base in arguments.bases]
    add_ratios(rows, "tokens_per_second", "bf16")
    print_table(f"LoRA r16 on {arguments.size}, rows of {arguments.tokens} tokens", COLUMNS, rows)
    write_json(arguments.json, "quantized_base", vars(arguments), rows)


if __name__ == "__main__":
    main()
