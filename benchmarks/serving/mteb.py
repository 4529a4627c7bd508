"""Times tasks of MTEB with the engine of `sansgpu eval --mteb`, compared with mteb's own SentenceTransformer backend.

    python -m benchmarks.serving.mteb --model FOLDER --tasks FOLDER[,NAME...] [--rounds 2] [--json FILE]

Tasks are those of `sansgpu eval --mteb`. The contestants are the engine in the precision that it chooses and in fp32,
and SentenceTransformer in fp32 (its default) and in bf16. All run in this process in alternating order, after a warm-up
round; seconds are the median evaluation time of all tasks, which mteb measures, without loading models and data. CPU
seconds of the same work hardly depend on other programs if OMP_NUM_THREADS is 1. `speed` is their ratio.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from mteb import evaluate
from sentence_transformers import SentenceTransformer

from benchmarks.contest import Row, print_table, say, write_json
from sansgpu.jobs.embed import open_encoder
from sansgpu.jobs.mteb import BATCH, open_tasks, quiet
from sansgpu.jobs.mteb.encoder import BenchmarkedModel
from sansgpu.train.loading import ModelRequest

COLUMNS = {
    "": ("name", "s"),
    "seconds": ("seconds", ",.1f"),
    "CPU s": ("cpu_seconds", ",.1f"),
    "speed": ("speed", ".2f"),
    "score": ("score", ".4f"),
}


def contestants(model: str) -> dict[str, tuple[Any, int]]:
    """Returns encoders of mteb and the batch size that each is given."""

    def ours(precision: Any) -> BenchmarkedModel:
        loaded = open_encoder(ModelRequest(model, precision=precision), say, lambda *_: None)
        return BenchmarkedModel(loaded, lambda *_: None)

    def theirs(dtype: torch.dtype) -> SentenceTransformer:
        return SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})

    chosen = ours("auto")
    return {
        "mteb, SentenceTransformer fp32": (theirs(torch.float32), 32),
        "mteb, SentenceTransformer bf16": (theirs(torch.bfloat16), 32),
        f"sansgpu, {chosen.loaded.precision}": (chosen, BATCH),
        "sansgpu, fp32": (ours("fp32"), BATCH),
    }


def measure(model: str, names: str, rounds: int) -> list[Row]:
    found, times = contestants(model), dict[str, list[float]]()
    cpu, scores = dict[str, list[float]](), dict[str, float]()
    with quiet():
        loaded = open_tasks(names)
        for task in loaded:
            task.load_data()
        for _ in range(1 + rounds):
            for name, (encoder, batch) in found.items():
                options: Any = {"batch_size": batch, "show_progress_bar": False}
                start = time.process_time()
                result = evaluate(
                    encoder, loaded, cache=None, encode_kwargs=options, show_progress_bar=False, co2_tracker=False
                )
                cpu.setdefault(name, []).append(time.process_time() - start)
                times.setdefault(name, []).append(sum(task.evaluation_time for task in result.task_results))
                scores[name] = sum(task.get_score() for task in result.task_results) / len(result.task_results)
                say(f"{name}: {times[name][-1]:.1f} s")
    rows: list[Row] = [
        {"name": n, "seconds": median(s[1:] or s), "cpu_seconds": median(cpu[n][1:] or cpu[n]), "score": scores[n]}
        for n, s in times.items()
    ]
    for row in rows:
        row["speed"] = rows[0]["cpu_seconds"] / row["cpu_seconds"]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    rows = measure(args.model, args.tasks, args.rounds)
    print_table("MTEB", COLUMNS, rows)
    write_json(args.json, "mteb_speed", vars(args), rows)


if __name__ == "__main__":
    main()
