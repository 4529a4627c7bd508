"""Trains encoders to answer questions, classify, tag or embed, compared with transformers and Sentence Transformers.

    python -m benchmarks.fine_tuning.understanding --task qa|classify|tokens|embed --model FOLDER --train FILE
        --dev FILE
        [--epochs 3] [--batch 16] [--max-length N] [--learning-rate 5e-5] [--seeds 1] [--threads N] [--set KEY=VALUE]
        [--precisions fp32 int16 int8] [--json FILE]

Both train in bf16 on the same rows in the same order with the same learning rates; the initialization of the head and
dropout differ. The peer is Hugging Face's Trainer, or SentenceTransformerTrainer for task embed; it pads each batch.
Both models are evaluated on the held-out rows with sansgpu's metrics. Padding does not count as tokens. Speed and
memory are measured during training. Speed excludes the first step and the preparation of batches, which overlaps with
sansgpu's steps. CPU seconds cover the whole process, including imports and reading the data. With several seeds,
medians are reported, except for memory: the highest peak. With --precisions, sansgpu trains and evaluates in each of
them instead of beside the peer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

from benchmarks.contest import (
    NoResultError,
    Outcome,
    Row,
    add_ratios,
    finished,
    print_table,
    read_job,
    run_worker,
    say,
    write_json,
)
from benchmarks.ours import assignments, command, setting
from sansgpu.config.training import Precision

OURS, HF, ST = "sansgpu", "Hugging Face Trainer", "Sentence Transformers"
# The first of these metrics that the evaluation reports is the measure of quality.
MEASURES = {
    "entity_f1": "entity F1",
    "f1": "F1",
    "accuracy": "accuracy",
    "spearman": "Spearman",
    "mrr": "MRR",
    "loss": "loss",
}
LOWER_IS_BETTER = {"loss"}
TASKS = ("qa", "classify", "tokens", "embed")
COLUMNS = {
    "": ("name", "s"),
    "quality": ("quality", ".4g"),
    "per seed": ("qualities", "s"),
    "training, s": ("seconds", ",.1f"),
    "real tokens/s": ("tokens_per_second", ",.0f"),
    "speed": ("ratio", ".2f"),
    "CPU, s": ("cpu_seconds", ",.0f"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "memory": ("memory_ratio", ".2f"),
}


@dataclass(frozen=True)
class Learned:
    """The quality and resource use of a run."""

    metrics: Row
    losses: list[float]
    tokens: list[int]  # the number of tokens in each step, without padding
    step_seconds: list[float]
    peak_rss_bytes: int
    wall_seconds: float
    cpu_seconds: float
    load_average: float  # measured before the run

    @property
    def measure(self) -> str:
        """The name of the metric that measures the quality."""
        return next(name for name in MEASURES if name in self.metrics)

    @property
    def tokens_per_second(self) -> float:
        """The mean speed, without the first step."""
        return sum(self.tokens[1:]) / sum(self.step_seconds[1:])


def settings(args: argparse.Namespace, seed: int) -> dict[str, object]:
    """Returns the settings of both contestants; all other keys have the task's defaults."""
    length = {} if args.max_length is None else {"data.max_length": args.max_length}
    return {
        "task": args.task,
        "device": "cpu",
        "model.name_or_path": args.model.absolute(),
        "data.dataset_name": args.train.absolute(),
        "data.validation_name": args.dev.absolute(),
        **length,
        "training.batch_size": args.batch,
        "training.gradient_accumulation_steps": 1,
        "training.precision": "bf16",
        "training.learning_rate": args.learning_rate,
        "training.num_epochs": args.epochs,
        "training.threads": args.threads,
        "training.seed": seed,
        **dict(args.set),
    }


def learn_theirs(given: dict[str, object], folder: Path) -> Learned:
    """Trains with the peer and evaluates its model. Raises NoResultError if it fails."""
    folder.mkdir()
    load, trained = os.getloadavg()[0], folder / "trained"
    facts = {"threads": given["training.threads"], "cache": folder.parent / "cache", "folder": trained}
    job = {"overrides": assignments(given), **facts}
    outcome = run_worker(job, folder, "benchmarks.fine_tuning.trainer_peer")
    result = outcome.named("result")[0][1]
    job = {"overrides": assignments({**given, "model.name_or_path": trained})}
    scored = run_worker(job, folder, "benchmarks.fine_tuning.understanding", "--worker", event="eval")
    steps = (result["losses"], result["tokens"], result["step_seconds"])
    return learned(outcome, scored, *steps, load)


def learn_ours(given: dict[str, object], output: Path) -> Learned:
    """Trains with sansgpu, which evaluates its model at the end. Raises NoResultError if it fails."""
    watched: dict[str, object] = {
        "training.eval_steps": 0,
        "training.logging_steps": 1,
        "training.save_steps": 0,
        "training.keep_last": 1,
        "training.report_to": "none",
    }
    load = os.getloadavg()[0]
    outcome = finished(command(output, {**given, **watched}), "eval")
    steps = [event for _, event in outcome.named("step")]
    totals = [step["tokens"] for step in steps]
    tokens = [after - before for before, after in zip([0, *totals], totals, strict=False)]
    losses, seconds = ([step[key] for step in steps] for key in ("loss", "step_seconds"))
    return learned(outcome, outcome, losses, tokens, seconds, load)


def learn_in(precision: str, given: dict[str, object], output: Path) -> Learned:
    """Trains with sansgpu in another precision. Raises NoResultError if it fails."""
    return learn_ours({**given, "training.precision": precision}, output)


def learned(
    trained: Outcome, scored: Outcome, losses: list[float], tokens: list[int], seconds: list[float], load: float
) -> Learned:
    metrics = scored.named("eval")[-1][1]
    use = (trained.peak_rss_bytes, trained.wall_seconds, trained.cpu_seconds)
    return Learned(metrics, losses, tokens, seconds, *use, load)


def score(job: Row) -> None:
    """Evaluates a trained model on the held-out rows, in the precision of its training, and prints the eval event."""
    import torch

    from sansgpu.machine.execution import Execution
    from sansgpu.machine.memory import effective_batch
    from sansgpu.tasks.configuration import load_config
    from sansgpu.tasks.registry import task_of
    from sansgpu.train.evaluate import evaluate

    config, _ = load_config(None, job["overrides"])
    task_class: Any = task_of(config)
    torch.set_num_threads(int(config.training.threads))
    with tempfile.TemporaryDirectory() as cache:
        config, corpus = task_class.prepare(config, Path(cache), lambda *_: None)
        task = task_class(config, corpus, effective_batch(config.training))
        execution = Execution(task_class.evaluation_batch(config), precision=str(config.training.precision))
        metrics = evaluate(task.evaluator, execution)
    print(json.dumps({"event": "eval", **(metrics or {})}), flush=True)


def row(name: str, runs: list[Learned]) -> Row:
    """Returns medians over seeds, and the highest peak memory."""
    found = [run.metrics[run.measure] for run in runs]
    return {
        "name": name,
        "status": "measured",
        "measure": runs[0].measure,
        "quality": median(found),
        "qualities": " ".join(f"{value:.4g}" for value in found),
        "seconds": median(sum(run.step_seconds) for run in runs),
        "tokens_per_second": median(run.tokens_per_second for run in runs),
        "cpu_seconds": median(run.cpu_seconds for run in runs),
        "peak_gb": max(run.peak_rss_bytes for run in runs) / 1e9,
        "runs": [asdict(run) for run in runs],
    }


def rows_parser(description: str | None, tasks: tuple[str, ...] = TASKS) -> argparse.ArgumentParser:
    """Returns a parser of the arguments from which `settings` are made, and of the seeds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tasks, required=True)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face or Sentence Transformers folder")
    parser.add_argument("--train", type=Path, required=True, help="rows in a format of the task")
    parser.add_argument("--dev", type=Path, required=True, help="held-out rows")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="rows or windows per step")
    parser.add_argument("--max-length", type=int, help="maximum tokens of a row or window; default: the task's default")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, starting at 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="setting of both contestants"
    )
    return parser


def main() -> None:
    parser = rows_parser(__doc__)
    parser.add_argument(
        "--precisions", nargs="+", choices=get_args(Precision), help="values of training.precision to compare"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    peer = ST if args.task == "embed" else HF
    learn: dict[str, Callable[[dict[str, object], Path], Learned]] = {OURS: learn_ours, peer: learn_theirs}
    if args.precisions:
        learn = {f"{OURS}, {precision}": partial(learn_in, precision) for precision in args.precisions}
    runs: dict[str, list[Learned]] = {name: [] for name in learn}
    with tempfile.TemporaryDirectory(prefix="sansgpu-understanding-") as folder:
        for seed in range(1, args.seeds + 1):
            for name, by in learn.items():
                say(f"seed {seed} of {args.seeds}: {name}")
                try:
                    runs[name].append(by(settings(args, seed), Path(folder) / f"{name}-{seed}".replace(" ", "-")))
                except NoResultError as failure:
                    sys.exit(str(failure))
    rows = [row(name, found) for name, found in runs.items()]
    compared = next(iter(runs)) if args.precisions else peer
    add_ratios(rows, "tokens_per_second", compared)
    add_ratios(rows, "peak_gb", compared, "memory_ratio")
    title = f"task {args.task}, {args.epochs} epochs of {args.batch} rows a step, {args.threads} threads; "
    print_table(f"{title}quality: {MEASURES[rows[0]['measure']]}", COLUMNS, rows)
    write_json(args.json, "understanding", vars(args), rows)


if __name__ == "__main__":
    score(read_job()) if sys.argv[1:2] == ["--worker"] else main()
