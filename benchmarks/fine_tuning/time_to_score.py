"""Measures how long sansgpu trains until it scores what the Trainer scores at the end of its training.

    python -m benchmarks.fine_tuning.time_to_score --task classify|tokens|qa|embed|sft --model FOLDER --train FILE
        --dev FILE [--epochs 3] [--batch 16] [--learning-rate 5e-5] [--evaluations 12] [--seeds 1] [--threads N]
        [--own KEY=VALUE] [--json FILE]

The peer trains as in `benchmarks.fine_tuning.understanding`, with the settings of transformers' examples. sansgpu has
its own defaults, changed by --own, and evaluates during its run, `--evaluations` times in all. Both count only the
seconds of training steps: the Trainer all of them, sansgpu those before the first evaluation with the Trainer's final
score. The score of task sft is the held-out loss; there, `--set model.adapter=lora` trains both by LoRA.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.contest import NoResultError, Row, finished, print_table, say, write_json
from benchmarks.fine_tuning.understanding import (
    LOWER_IS_BETTER,
    MEASURES,
    TASKS,
    Learned,
    learn_theirs,
    rows_parser,
    settings,
)
from benchmarks.ours import command, setting

COLUMNS = {
    "": ("name", "s"),
    "final score": ("quality", ".4g"),
    "per seed": ("qualities", "s"),
    "training, s": ("seconds", ",.1f"),
    "to the peer's score, s": ("seconds_to_score", ",.1f"),
    "faster by": ("ratio", ".1f"),
}


def seconds_to(target: float, measure: str, given: dict[str, object], steps: int, output: Path) -> tuple[float, Row]:
    """Trains with sansgpu; returns the seconds until it scores `target`, or infinity, and a row about the run."""
    watched: dict[str, object] = {
        "training.eval_steps": steps,
        "training.logging_steps": 1,
        "training.save_steps": 0,
        "training.report_to": "none",
    }
    outcome = finished(command(output, {**given, **watched}), "eval")
    seconds = [event["step_seconds"] for _, event in outcome.named("step")]
    scores = [(event["step"], event[measure]) for _, event in outcome.named("eval")]
    sign = -1 if measure in LOWER_IS_BETTER else 1
    reached = next((sum(seconds[:step]) for step, score in scores if sign * score >= sign * target), float("inf"))
    return reached, {"quality": scores[-1][1], "seconds": sum(seconds), "scores": scores}


def row(name: str, runs: list[Row]) -> Row:
    """Returns medians over seeds."""
    keys = ("quality", "seconds", "seconds_to_score")
    qualities = " ".join(f"{run['quality']:.4g}" for run in runs)
    return {
        "name": name,
        "qualities": qualities,
        **{key: median(run[key] for run in runs) for key in keys},
        "runs": runs,
    }


def peer_row(found: Learned) -> Row:
    seconds = sum(found.step_seconds)
    return {"quality": found.metrics[found.measure], "seconds": seconds, "seconds_to_score": seconds}


def main() -> None:
    parser = rows_parser(__doc__, (*TASKS, "sft"))
    parser.add_argument("--evaluations", type=int, default=12, help="evaluations of sansgpu's run")
    parser.add_argument(
        "--own", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of sansgpu's run"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    theirs, ours = list[Row](), list[Row]()
    with tempfile.TemporaryDirectory(prefix="sansgpu-score-") as folder:
        for seed in range(1, args.seeds + 1):
            given = settings(args, seed)
            own = {key: value for key, value in given.items() if key != "training.learning_rate"}
            try:
                say(f"seed {seed} of {args.seeds}: Hugging Face Trainer")
                peer = learn_theirs(given, Path(folder) / f"peer-{seed}")
                steps = max(1, len(peer.step_seconds) // args.evaluations)
                target = peer.metrics[peer.measure]
                say(f"seed {seed} of {args.seeds}: sansgpu, until it scores {target:.4g}")
                output = Path(folder) / f"ours-{seed}"
                seconds, run = seconds_to(target, peer.measure, {**own, **dict(args.own)}, steps, output)
            except NoResultError as failure:
                sys.exit(str(failure))
            theirs.append(peer_row(peer))
            ours.append({**run, "seconds_to_score": seconds})
    rows = [row("sansgpu", ours), row("Hugging Face Trainer", theirs)]
    for found in rows:
        found["ratio"] = rows[1]["seconds"] / found["seconds_to_score"]
    print_table(f"task {args.task}, {args.threads} threads; score: {MEASURES[peer.measure]}", COLUMNS, rows)
    write_json(args.json, "time_to_score", vars(args), rows)


if __name__ == "__main__":
    main()
