"""Measures how many tokens a student needs with a teacher to reach the loss that it reaches without one.

    python -m benchmarks.fine_tuning.distillation --teacher MODEL --data TEXTS [--tokens 4000000] [--ratios 0.5 0.33]
        [--weight 0.5] [--temperature 1] [--lessons DIR] [--set KEY=VALUE ...] [--json FILE]

The student is a decoder in Llama's layout, by default of 30M parameters with a vocabulary of 49,152. It trains without
a teacher on `--tokens` tokens, and then with the teacher's predictions on each fraction `--ratios` of them. Every run
has a complete learning rate schedule, so its final loss is that of a finished run. `first below` is the number of
tokens after which a run was first below the loss without a teacher. The predictions are written to `--lessons` once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contest import NoResultError, Outcome, Row, print_table, say, spawn, write_json
from benchmarks.ours import command

STUDENT: Row = {
    "model.architecture": "llama", "model.d_model": 384, "model.n_heads": 6, "model.n_layers": 6, "model.d_ff": 1024,
    "model.max_seq_len": 512, "training.batch_size": "auto", "training.gradient_accumulation_steps": 16,
    "training.window_warmup_ratio": 0, "training.save_steps": 0, "training.keep_last": 1,
    "training.report_to": "none", "device": "cpu",
}  # fmt: skip
EVALUATIONS = 20  # number of evaluations per run
COLUMNS = {
    "student": ("name", "s"),
    "tokens": ("tokens", ",d"),
    "loss": ("loss", ".4f"),
    "first below": ("first_below", ",d"),
    "share": ("share", ".2f"),
    "s": ("seconds", ".0f"),
}


def write_lessons(teacher: str, data: str, length: int, folder: Path) -> Row:
    """Writes the teacher's predictions, unless they are complete, and returns the summary of the command."""
    arguments = ["distill", teacher, "--data", data, "--output", str(folder), "--max-length", str(length), "--json"]
    outcome = spawn([sys.executable, "-m", "sansgpu", *arguments])
    if outcome.code:
        raise outcome.no_result()
    return outcome.events[-1][1]


def students(options: argparse.Namespace, settings: Row, lessons: Path) -> Iterator[tuple[str, float, Row]]:
    """Yields the name, the share of the tokens and the settings of each run, the one without a teacher first."""
    own = {"data.dataset_name": options.data, "data.tokenizer": lessons}
    own["data.max_length"] = settings["model.max_seq_len"]
    yield "alone", 1.0, {**settings, **own}
    section = "training.distillation"
    taught = {"teacher": lessons, "weight": options.weight, "temperature": options.temperature}
    for share in options.ratios:
        name = f"with the teacher, on {share:.0%} of the tokens"
        yield name, share, {**settings, **{f"{section}.{key}": value for key, value in taught.items()}}


def trained(tokens: int, folder: Path, settings: Row, goal: float | None) -> Row:
    """Trains a student on `tokens` tokens. Returns its losses and the tokens after which the loss first met `goal`."""
    per_step = int(settings["model.max_seq_len"]) * int(settings["training.gradient_accumulation_steps"])
    every = max(1, tokens // per_step // EVALUATIONS)
    paced = {**settings, "training.max_tokens": tokens, "training.eval_steps": every, "training.logging_steps": every}
    outcome = spawn(command(folder, paced))
    evaluations = _evaluations(outcome)
    row: Row = {"tokens": evaluations[-1][0], "loss": evaluations[-1][1], "curve": evaluations}
    row["seconds"] = outcome.wall_seconds
    row["first_below"] = next((seen for seen, loss in evaluations if goal is not None and loss <= goal), None)
    return row


def _evaluations(outcome: Outcome) -> list[tuple[int, float]]:
    """Returns (tokens trained on so far, loss) for each evaluation. Raises NoResultError if the run failed."""
    found, tokens = [], 0
    for _, event in outcome.events:
        if event["event"] == "step":
            tokens = int(event["tokens"])
        elif event["event"] == "eval":
            found.append((tokens, float(event["loss"])))
    if outcome.code or not found:
        raise outcome.no_result()
    return found


def compare(options: argparse.Namespace, home: Path) -> tuple[Row, list[Row]]:
    """Trains all students, and returns the summary of the predictions and a row for each student."""
    lessons, rows = options.lessons or home / "lessons", list[Row]()
    settings: Row = {**STUDENT, **dict(pair.split("=", 1) for pair in options.set)}
    say("writing the teacher's predictions")
    facts = write_lessons(options.teacher, options.data, int(settings["model.max_seq_len"]), lessons)
    for name, share, chosen in students(options, settings, lessons):
        tokens = round(options.tokens * share)
        say(f"{name}: {tokens:,} tokens")
        goal = rows[0]["loss"] if rows else None
        row = {"name": name, **trained(tokens, home / f"run-{len(rows)}", chosen, goal)}
        if row["first_below"]:
            row["share"] = row["first_below"] / rows[0]["tokens"]
        rows.append(row)
    return facts, rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokens", type=int, default=4_000_000)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 0.33])
    parser.add_argument("--weight", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lessons", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="sansgpu-distillation-") as home:
        facts, rows = compare(options, Path(home))
    print_table("Tokens needed to reach the loss of the student without a teacher", COLUMNS, rows)
    write_json(options.json, "distillation", vars(options), rows, {"lessons": facts})


if __name__ == "__main__":
    try:
        main()
    except NoResultError as failure:
        sys.exit(str(failure))
