"""Measures how long sansgpu trains until it scores what the Trainer scores at the end of its training.

    python -m benchmarks.fine_tuning.time_to_score --task classify|tokens|qa|embed|sft|preference --model FOLDER
        --train FILE --dev FILE [--peer-python VENV/bin/python] [--epochs 3] [--batch 16] [--learning-rate 5e-5]
        [--evaluations 12] [--seeds 1] [--threads N] [--own KEY=VALUE] [--json FILE]

The peer trains as in `benchmarks.fine_tuning.understanding`, with the settings of transformers' examples. sansgpu has
its own defaults, changed by --own, and evaluates during its run, `--evaluations` times in all. The seconds are those
of training steps: the Trainer's of all of them, sansgpu's of those before the first evaluation with the Trainer's
final score. The seconds of the whole process include imports, reading the data and what is computed before the first
step; sansgpu's also include the evaluations until then. The score of tasks sft and preference is the held-out loss;
in sft, `--set model.adapter=lora` trains both by LoRA. The peer of task preference is TRL's DPOTrainer in a virtual
environment of its own, named by --peer-python.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.contest import NoResultError, Row, finished, print_table, say, write_json
from benchmarks.fine_tuning import preference
from benchmarks.fine_tuning.understanding import (
    LOWER_IS_BETTER,
    MEASURES,
    TASKS,
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
    "whole process, s": ("process_seconds", ",.0f"),
    "process faster by": ("process_ratio", ".1f"),
}


def learn_ours(target: float, measure: str, given: dict[str, object], steps: int, output: Path) -> Row:
    """Trains with sansgpu; returns a row with the seconds until it scores `target`, infinite if it never does."""
    watched: dict[str, object] = {
        "training.eval_steps": steps,
        "training.logging_steps": 1,
        "training.save_steps": 0,
        "training.report_to": "none",
    }
    outcome = finished(command(output, {**given, **watched}), "eval")
    seconds = [event["step_seconds"] for _, event in outcome.named("step")]
    events = outcome.named("eval")
    scores = [(event["step"], event[measure]) for _, event in events]
    sign = -1 if measure in LOWER_IS_BETTER else 1
    reached = [
        (sum(seconds[: event["step"]]), wall) for wall, event in events if sign * event[measure] >= sign * target
    ]
    to_score, process = min(reached, default=(float("inf"), float("inf")))
    return {
        "quality": scores[-1][1],
        "seconds": sum(seconds),
        "seconds_to_score": to_score,
        "process_seconds": process,
        "scores": scores,
    }


def row(name: str, runs: list[Row]) -> Row:
    """Returns medians over seeds."""
    keys = ("quality", "seconds", "seconds_to_score", "process_seconds")
    qualities = " ".join(f"{run['quality']:.4g}" for run in runs)
    return {
        "name": name,
        "qualities": qualities,
        **{key: median(run[key] for run in runs) for key in keys},
        "runs": runs,
    }


def learn_peer(given: dict[str, object], folder: Path, trl: Path | None) -> tuple[str, Row, int]:
    """Trains with the peer of the task; returns the name of the score, a row about the run, and its steps."""
    if given["task"] == "preference":
        if trl is None:
            raise NoResultError("task preference needs --peer-python, the Python of an environment with trl")
        folder.mkdir()
        pairs = preference.train_theirs(trl, given, folder)
        measure, score, seconds, process = "loss", pairs.held_out_loss, pairs.step_seconds, pairs.wall_seconds
    else:
        found = learn_theirs(given, folder)
        seconds, process = found.step_seconds, found.wall_seconds
        measure, score = found.measure, found.metrics[found.measure]
    row = {"quality": score, "seconds": sum(seconds), "seconds_to_score": sum(seconds), "process_seconds": process}
    return measure, row, len(seconds)


def main() -> None:
    parser = rows_parser(__doc__, (*TASKS, "sft", "preference"))
    parser.add_argument("--peer-python", type=Path, help="Python of an environment with trl, for task preference")
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
                say(f"seed {seed} of {args.seeds}: the peer")
                measure, peer, steps = learn_peer(given, Path(folder) / f"peer-{seed}", args.peer_python)
                say(f"seed {seed} of {args.seeds}: sansgpu, until it scores {peer['quality']:.4g}")
                output, interval = Path(folder) / f"ours-{seed}", max(1, steps // args.evaluations)
                found = learn_ours(peer["quality"], measure, {**own, **dict(args.own)}, interval, output)
            except NoResultError as failure:
                sys.exit(str(failure))
            theirs.append(peer)
            ours.append(found)
    rows = [row("sansgpu", ours), row("TRL" if args.task == "preference" else "Hugging Face Trainer", theirs)]
    for one in rows:
        one["ratio"] = rows[1]["seconds"] / one["seconds_to_score"]
        one["process_ratio"] = rows[1]["process_seconds"] / one["process_seconds"]
    print_table(f"task {args.task}, {args.threads} threads; score: {MEASURES[measure]}", COLUMNS, rows)
    write_json(args.json, "time_to_score", vars(args), rows)


if __name__ == "__main__":
    main()
