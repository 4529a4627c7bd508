"""Trains a chat model to add numbers with task grpo, and compares losses with TRL's GRPOTrainer.

    python -m benchmarks.fine_tuning.grpo --model FOLDER_OR_GGUF [--hours 0.5] [--threads N] [--set KEY=VALUE]
        [--json FILE] [--peer-python VENV/bin/python --peer-steps 8]

Trains on the built-in dataset arithmetic within the given time, and prints the mean reward of the validation prompts
before and after: the share of sums whose most likely answer is right. Also prints the time of a step and the share of
it that generates completions.

With --peer-python, nothing is trained for long: both contestants train for a few steps in fp32, on completions that
the model has generated before, from the same weights, and the losses and gradient norms of every step are compared.
TRL runs in a separate virtual environment with trl and sansgpu's dependencies. It also computes the advantages and the
KL divergence from the reference model. The differences should be below 1e-4.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.contest import NoResultError, Row, finished, print_table, run_worker, say, write_json
from benchmarks.ours import assignments, command, setting

COLUMNS = {
    "": ("name", "s"),
    "reward before": ("before", ".3f"),
    "after": ("after", ".3f"),
    "first steps": ("first", ".3f"),
    "last steps": ("last", ".3f"),
    "steps": ("steps", ",d"),
    "s/step": ("step_seconds", ",.1f"),
    "generation": ("generation", ".0%"),
    "peak memory, GB": ("peak_gb", ".2f"),
}
PEER_COLUMNS = {
    "": ("name", "s"),
    "first loss": ("first_loss", ".6f"),
    "last loss": ("last_loss", ".6f"),
    "first gradient norm": ("first_norm", ".6f"),
    "last gradient norm": ("last_norm", ".6f"),
}
SHOWN = 10  # steps in the mean rewards of the first and of the last steps


def settings(args: argparse.Namespace) -> dict[str, object]:
    return {
        "task": "grpo",
        "device": "cpu",
        "model.name_or_path": args.model.absolute(),
        "model.adapter": "lora",
        "data.dataset_name": "arithmetic",
        "data.max_length": 128,
        "training.grpo.max_completion_length": 32,
        "training.grpo.temperature": 0.7,
        "training.gradient_accumulation_steps": 64,
        "training.learning_rate": 2e-4,
        "training.warmup_steps": 2,
        "training.threads": args.threads,
        "training.report_to": "none",
        "training.logging_steps": 1,
    }


def learned(args: argparse.Namespace, output: Path) -> Row:
    """Trains within the time limit. Raises NoResultError if that fails."""
    given = {
        **settings(args),
        "training.num_epochs": 100,
        "training.max_hours": args.hours,
        "training.eval_on_start": "true",
        "training.eval_steps": 0,
        "training.save_steps": 0,
        **dict(args.set),
    }
    outcome = finished(command(output, given), "end")
    steps, evaluations = ([event for _, event in outcome.named(kind)] for kind in ("step", "eval"))
    rewards = [step["reward"] for step in steps]
    seconds = sum(step["step_seconds"] for step in steps)
    return {
        "name": Path(args.model).name,
        "status": "measured",
        "before": evaluations[0]["reward"],
        "after": evaluations[-1]["reward"],
        "first": sum(rewards[:SHOWN]) / len(rewards[:SHOWN]),
        "last": sum(rewards[-SHOWN:]) / len(rewards[-SHOWN:]),
        "steps": len(steps),
        "step_seconds": seconds / len(steps),
        "generation": sum(step["phase_seconds"]["generate"] for step in steps) / seconds,
        "peak_gb": outcome.peak_rss_bytes / 1e9,
        "rewards": rewards,
        "completion_lengths": [step["completion_length"] for step in steps],
    }


def compared(args: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, float]]:
    """Trains both contestants on the same completions. Raises NoResultError if one fails."""
    given = {
        **settings(args),
        "training.batch_size": 16,
        "training.gradient_accumulation_steps": 1,
        "training.grpo.beta": 0.1,
        "training.learning_rate": 1e-3,
        "training.lr_scheduler": "constant",
        "training.warmup_steps": 0,
        "training.precision": "fp32",
        **dict(args.set),
    }
    facts = {"threads": args.threads, "steps": args.peer_steps, "folder": folder}
    job, found = {"overrides": assignments(given), **facts}, {}
    for name, python in (("sansgpu", sys.executable), ("TRL GRPOTrainer", str(args.peer_python))):
        say(name)
        contestant = ("benchmarks.fine_tuning.grpo_contestants", name)
        found[name] = run_worker(job, folder, *contestant, python=python).named("result")[0][1]
    ours, theirs = found.values()
    differences = {
        key: max(abs(a - b) for a, b in zip(ours[key], theirs[key], strict=True))
        for key in ("losses", "grad_norms", "rewards")
    }
    rows: list[Row] = [
        {
            "name": name,
            "status": "measured",
            "first_loss": result["losses"][0],
            "last_loss": result["losses"][-1],
            "first_norm": result["grad_norms"][0],
            "last_norm": result["grad_norms"][-1],
            "run": result,
        }
        for name, result in found.items()
    ]
    return rows, differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder or GGUF file of a chat model")
    parser.add_argument("--hours", type=float, default=0.5, help="time to train")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with trl: compare losses instead")
    parser.add_argument("--peer-steps", type=int, default=8, help="steps to compare")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="setting")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    more: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="sansgpu-grpo-") as name:
        try:
            if args.peer_python is None:
                rows = [learned(args, Path(name) / "run")]
                print_table(f"sums of two numbers, {args.hours:g} hours, {args.threads} threads", COLUMNS, rows)
            else:
                rows, more = compared(args, Path(name))
                largest = ", ".join(f"{key.replace('_', ' ')} {value:.2g}" for key, value in more.items())
                print_table(f"{args.peer_steps} steps, fp32; largest differences: {largest}", PEER_COLUMNS, rows)
        except NoResultError as failure:
            sys.exit(str(failure))
    write_json(args.json, "grpo", vars(args), rows, more)


if __name__ == "__main__":
    main()
