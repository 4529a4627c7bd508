"""Trains on pairs of chosen and rejected answers, compared with TRL's DPOTrainer.

    python -m benchmarks.fine_tuning.preference --peer-python VENV/bin/python --model FOLDER --train FILE
        [--steps 20] [--batch 4] [--precision bf16|fp32] [--max-length 1024] [--threads N] [--set KEY=VALUE]
        [--json FILE]

Both train on the same pairs in the same order, without dropout, with AdamW and the same learning rates. TRL runs in a
separate virtual environment with trl and sansgpu's dependencies. By default, TRL's reference is a second copy of the
model. sansgpu computes the reference log-probabilities once before the first step, which its seconds include. Speed
is measured over all steps except the first, memory over the whole process. In fp32, the largest difference of the
losses should be below 1e-4.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from benchmarks.ours import MEASURED, assignments, command, setting

if TYPE_CHECKING:  # it imports torch, which this process does not need
    from sansgpu.tasks.preference.batch import AnswerPairs

OURS, TRL = "sansgpu", "TRL DPOTrainer"
COLUMNS = {
    "": ("name", "s"),
    "pairs/s": ("pairs_per_second", ",.2f"),
    "speed": ("ratio", ".2f"),
    "whole run, s": ("wall_seconds", ",.1f"),
    "CPU, s": ("cpu_seconds", ",.0f"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "memory": ("memory_ratio", ".2f"),
    "first loss": ("first_loss", ".6f"),
    "last loss": ("last_loss", ".6f"),
}


@dataclass(frozen=True)
class Trained:
    """The losses and the resource use of a run."""

    losses: list[float]
    step_seconds: list[float]
    pairs: list[int]  # number of pairs in each step
    peak_rss_bytes: int
    wall_seconds: float
    cpu_seconds: float
    held_out_loss: float | None = None

    @classmethod
    def of(cls, outcome: Outcome, losses: list[float], seconds: list[float], pairs: list[int]) -> Trained:
        return cls(losses, seconds, pairs, outcome.peak_rss_bytes, outcome.wall_seconds, outcome.cpu_seconds)

    def row(self, name: str) -> Row:
        return {
            "name": name,
            "status": "measured",
            "pairs_per_second": sum(self.pairs[1:]) / sum(self.step_seconds[1:]),
            "wall_seconds": self.wall_seconds,
            "cpu_seconds": self.cpu_seconds,
            "peak_gb": self.peak_rss_bytes / 1e9,
            "first_loss": self.losses[0],
            "last_loss": self.losses[-1],
            "run": asdict(self),
        }


def settings(args: argparse.Namespace) -> dict[str, object]:
    """Returns the settings of both contestants; all other keys have the task's defaults."""
    return {
        **MEASURED,
        "task": "preference",
        "model.name_or_path": args.model.absolute(),
        "data.dataset_name": args.train.absolute(),
        "data.max_length": args.max_length,
        "training.batch_size": args.batch,
        "training.gradient_accumulation_steps": 1,
        "training.precision": args.precision,
        "training.max_steps": args.steps,
        "training.lr_scheduler": "linear",
        "training.warmup_steps": 0,  # transformers starts a warm-up at 0, sansgpu above it
        "training.threads": args.threads,
        **dict(args.set),
    }


def train_theirs(python: Path, given: dict[str, object], folder: Path) -> Trained:
    """Trains with TRL, which evaluates its model at the end where `given` names held-out rows."""
    cache, steps = folder / "cache", given.get("training.max_steps")
    job = {"overrides": assignments(given), "threads": given["training.threads"], "steps": steps, "cache": cache}
    if "data.validation_name" in given:
        job["held_out"] = assignments({**given, "data.dataset_name": given["data.validation_name"]})
    outcome = run_worker(job, folder, "benchmarks.fine_tuning.preference", "--worker", python=python)
    result = outcome.named("result")[0][1]
    trained = Trained.of(outcome, result["losses"], result["step_seconds"], result["pairs"])
    return replace(trained, held_out_loss=result["held_out_loss"])


def train_ours(given: dict[str, object], output: Path) -> Trained:
    cache = {"data.cache_dir": output.parent / "own-cache"}
    outcome = finished(command(output, {**given, **cache}), "end")
    steps = [event for _, event in outcome.named("step")]
    losses, seconds = ([step[key] for step in steps] for key in ("loss", "step_seconds"))
    return Trained.of(outcome, losses, seconds, [int(str(given["training.batch_size"]))] * len(steps))


def run_trl(job: Row) -> None:
    """Trains with TRL's DPOTrainer on pairs that sansgpu has tokenized, so that only the training is compared."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import DPOConfig, DPOTrainer

    from benchmarks.fine_tuning.trainer_peer import Watch, batches, load_model, report, trainer_arguments
    from sansgpu.tasks.preference.settings import PreferenceTrainingConfig

    class InOrder(DPOTrainer):  # type: ignore[misc]
        """A DPOTrainer without shuffling, whose dataset is already tokenized."""

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    torch.set_num_threads(job["threads"])
    config, tokenizer, given = batches(job["overrides"], job.get("steps"), Path(job["cache"]))
    training, watch = config.training, Watch()
    preference = PreferenceTrainingConfig.of(config).preference
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            folder,
            **trainer_arguments(config, len(given)),
            per_device_train_batch_size=training.batch_size,
            per_device_eval_batch_size=training.batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            beta=preference.scale,
            loss_type=[{"dpo": "sigmoid", "dpo_norm": "sigmoid_norm", "ipo": "ipo"}[preference.loss]],
            max_length=None,
            gradient_checkpointing=False,
        )
        trainer = InOrder(
            load_model(config),
            args=arguments,
            train_dataset=Dataset.from_dict(columns(given)),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.train()
        loss = None
        if "held_out" in job:
            _, _, held_out = batches([*job["held_out"], "training.num_epochs=1"], None, Path(job["cache"]) / "held-out")
            loss = trainer.evaluate(Dataset.from_dict(columns(held_out)))["eval_loss"]
    pairs = [len(batch) for batch in given]
    report({"step_seconds": watch.seconds, "losses": watch.losses, "pairs": pairs, "held_out_loss": loss})


def columns(given: list[AnswerPairs]) -> dict[str, list[list[int]]]:
    """Returns the tokens of the pairs of all batches, in their order."""
    found: dict[str, list[list[int]]] = {"prompt_ids": [], "chosen_ids": [], "rejected_ids": []}
    for pair in (batch.rows(number, number + 1) for batch in given for number in range(len(batch))):
        prompt, chosen, rejected = pair.sizes[0].tolist()
        parts = pair.tokens.split([prompt, chosen - 1, rejected - 1])
        last: tuple[list[int], ...] = [], [int(pair.targets[chosen - 1])], [int(pair.targets[-1])]  # only targets
        for column, part, end in zip(found.values(), parts, last, strict=True):
            column.append([*part.tolist(), *end])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, required=True, help="Python of an environment with trl")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="rows with a chosen and a rejected answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="pairs per step")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--max-length", type=int, default=1024, help="maximum tokens of a prompt with its answer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="setting of both contestants"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = settings(args)
    with tempfile.TemporaryDirectory(prefix="sansgpu-preference-") as name:
        try:
            say(TRL)
            theirs = train_theirs(args.peer_python, given, Path(name))
            say(OURS)
            ours = train_ours(given, Path(name) / "run")
        except NoResultError as failure:
            sys.exit(str(failure))
    rows = [ours.row(OURS), theirs.row(TRL)]
    add_ratios(rows, "pairs_per_second", TRL)
    add_ratios(rows, "peak_gb", TRL, "memory_ratio")
    difference = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=False))
    title = f"{args.steps} steps of {args.batch} pairs, {args.precision}, {args.threads} threads"
    print_table(f"{title}; largest difference of a loss: {difference:.2g}", COLUMNS, rows)
    write_json(args.json, "preference", vars(args), rows, {"largest_difference": difference})


if __name__ == "__main__":
    run_trl(read_job()) if sys.argv[1:2] == ["--worker"] else main()
