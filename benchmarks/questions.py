"""Trains question answering, compared with Hugging Face's Trainer in quality and speed.

    python -m benchmarks.questions --model FOLDER --train TRAIN.json --dev DEV.json [--epochs 3] [--batch 8]
        [--max-length 384] [--learning-rate 1e-4] [--seeds 1] [--threads N] [--json FILE]

Both train on the same windows and labels in the same order, in bf16, and answer the same questions after every epoch by
the same rules; the head's initialization and dropout differ. Seconds of training include the first step but no
evaluations. Those of the whole run are from the start of the process to its end, including reading, compiling,
evaluating and saving. Several seeds are reported as medians.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.contest import (
    Event,
    NoResultError,
    Outcome,
    Row,
    print_table,
    say,
    spawn,
    write_json,
)
from benchmarks.ours import command, overrides

OURS, HF = "sansgpu", "Hugging Face Trainer"
COLUMNS = {
    "after each epoch:": ("name", "s"),
    "loss": ("loss", "s"),
    "exact match": ("exact_match", "s"),
    "F1": ("f1", "s"),
    "last F1 of the seeds": ("last_f1", "s"),
    "training, s": ("seconds", ",.1f"),
    "to the lower best F1, s": ("seconds_to_f1", ",.1f"),
    "real tokens/s": ("tokens_per_second", ",.0f"),
    "speed": ("ratio", ".2f"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "whole run, s": ("wall_seconds", ",.1f"),
}


@dataclass(frozen=True)
class Score:
    """The scores after an epoch: seconds of training so far, validation loss, exact match and F1 in per cent."""

    seconds: float
    loss: float
    exact_match: float
    f1: float


@dataclass(frozen=True)
class Learned:
    """The scores and resource use of a run."""

    epochs: list[Score]
    tokens: int  # trained on, without padding
    first_step_seconds: float | None
    peak_rss_bytes: int
    wall_seconds: float
    load_average: float  # measured before the benchmark starts

    @property
    def best_f1(self) -> float:
        """The F1 of the best epoch."""
        return max(score.f1 for score in self.epochs)

    def seconds_to(self, f1: float) -> float:
        """Returns the seconds of training until the first epoch that reached this F1."""
        return next(score.seconds for score in self.epochs if score.f1 >= f1)


def settings(args: argparse.Namespace, seed: int) -> dict[str, object]:
    """Returns the settings of both contestants; all other keys have the defaults of `task: qa`."""
    return {
        "task": "qa",
        "device": "cpu",
        "model.name_or_path": args.model.absolute(),
        "data.dataset_name": args.train.absolute(),
        "data.validation_name": args.dev.absolute(),
        "data.max_length": args.max_length,
        "training.batch_size": args.batch,
        "training.gradient_accumulation_steps": 1,
        "training.precision": "bf16",
        "training.learning_rate": args.learning_rate,
        "training.num_epochs": args.epochs,
        "training.threads": args.threads,
        "training.seed": seed,
    }


def learn_theirs(given: dict[str, object], folder: Path) -> tuple[Learned, int]:
    """Runs the Trainer and returns its result and the steps per epoch. Raises NoResultError if it fails."""
    job, load = folder / "hf.json", os.getloadavg()[0]
    changes = [part for part in overrides(given) if part != "--set"]
    threads = given["training.threads"]
    job.write_text(json.dumps({"overrides": changes, "threads": threads, "cache": str(folder / "cache")}))
    outcome = finished([sys.executable, "-m", "benchmarks.fine_tuning_peer", str(job)])
    start = outcome.named("start")[0][1]
    scores = [score(event, event["seconds"]) for _, event in outcome.named("eval")]
    tokens = start["epoch_tokens"] * len(scores)
    learned = Learned(scores, tokens, None, outcome.peak_rss_bytes, outcome.wall_seconds, load)
    return learned, start["steps_per_epoch"]


def learn_ours(given: dict[str, object], steps_per_epoch: int, output: Path) -> Learned:
    """Runs sansgpu and returns its result. Raises NoResultError if it fails."""
    watched: dict[str, object] = {
        "training.eval_steps": steps_per_epoch,
        "training.logging_steps": 1,
        "training.save_steps": 0,
        "training.keep_last": 1,
        "training.report_to": "none",
    }
    load = os.getloadavg()[0]
    outcome = finished(command(output, {**given, **watched}))
    steps = [event for _, event in outcome.named("step")]
    seconds = [step["step_seconds"] for step in steps]
    scores = [score(event, sum(seconds[: event["step"]])) for _, event in outcome.named("eval")]
    return Learned(scores, steps[-1]["tokens"], seconds[0], outcome.peak_rss_bytes, outcome.wall_seconds, load)


def score(event: Event, seconds: float) -> Score:
    return Score(seconds, event["loss"], event["exact_match"], event["f1"])


def finished(line: list[str]) -> Outcome:
    """Runs a command to its end. Raises NoResultError if it fails."""
    outcome = spawn(line)
    if outcome.code or not outcome.named("eval"):
        raise outcome.no_result()
    return outcome


def row(name: str, runs: list[Learned], f1_of_seeds: list[float]) -> Row:
    """Returns medians over seeds; `f1_of_seeds` are the F1 scores per seed that both contestants reached."""
    by_epoch = list(zip(*(run.epochs for run in runs), strict=True))
    reached = [run.seconds_to(f1) for run, f1 in zip(runs, f1_of_seeds, strict=True)]
    return {
        "name": name,
        "status": "measured",
        "loss": " ".join(f"{median(score.loss for score in epoch):.2f}" for epoch in by_epoch),
        "exact_match": " ".join(f"{median(score.exact_match for score in epoch):.1f}" for epoch in by_epoch),
        "f1": " ".join(f"{median(score.f1 for score in epoch):.1f}" for epoch in by_epoch),
        "last_f1": " ".join(f"{run.epochs[-1].f1:.1f}" for run in runs),
        "seconds": median(run.epochs[-1].seconds for run in runs),
        "seconds_to_f1": median(reached),
        "tokens_per_second": median(run.tokens / run.epochs[-1].seconds for run in runs),
        "peak_gb": max(run.peak_rss_bytes for run in runs) / 1e9,
        "wall_seconds": median(run.wall_seconds for run in runs),
        "runs": [asdict(run) for run in runs],
    }


def rows_of(ours: list[Learned], theirs: list[Learned]) -> list[Row]:
    """Returns the rows of both, with the median over seeds of the ratio of their speeds."""
    reached = [min(one.best_f1, other.best_f1) for one, other in zip(ours, theirs, strict=True)]
    found = [row(OURS, ours, reached), row(HF, theirs, reached)]
    speeds = [their.epochs[-1].seconds / our.epochs[-1].seconds for our, their in zip(ours, theirs, strict=True)]
    found[0]["ratio"], found[1]["ratio"] = median(speeds), 1.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="questions in a format of task qa")
    parser.add_argument("--dev", type=Path, required=True, help="held-out questions")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--max-length", type=int, default=384, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, starting at 1")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ours: list[Learned] = []
    theirs: list[Learned] = []
    with tempfile.TemporaryDirectory(prefix="sansgpu-questions-") as name:
        for seed in range(1, args.seeds + 1):
            given, folder = settings(args, seed), Path(name)
            try:
                say(f"seed {seed} of {args.seeds}: {HF}")
                learned, steps_per_epoch = learn_theirs(given, folder)
                theirs.append(learned)
                say(f"seed {seed} of {args.seeds}: {OURS}")
                ours.append(learn_ours(given, steps_per_epoch, folder / f"seed-{seed}"))
            except NoResultError as failure:
                sys.exit(str(failure))
    rows = rows_of(ours, theirs)
    title = f"{args.epochs} epochs, {args.batch} windows per step, bf16, {args.threads} threads"
    print_table(title, COLUMNS, rows)
    write_json(args.json, "questions", vars(args), rows)


if __name__ == "__main__":
    main()
