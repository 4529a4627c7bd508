"""Compares nanoGPT's CPU example with configs/shakespeare_char.yaml: seconds from process start to a target loss.

`python -m benchmarks.recipe.shakespeare --data input.txt [--nanogpt FOLDER]`
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import ours
from benchmarks.contest import ROOT, NoResultError, Row, add_ratios, print_table, say, spawn, write_json

TARGET = 1.88  # validation loss in nanoGPT's README for this example
CONFIG = ROOT / "configs" / "shakespeare_char.yaml"
NANOGPT_ARGUMENTS = (
    *("--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1", "--block_size=64", "--batch_size=12"),
    *("--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"),
)
EVALUATED = re.compile(r"step (\d+): train loss [\d.]+, val loss ([\d.]+)")
COLUMNS = {
    "contestant": ("name", "s"),
    "seconds to target": ("seconds_to_target", ".1f"),
    "x ours": ("ratio", ".2f"),
    "loss there": ("loss_at_target", ".3f"),
    "seconds in all": ("wall_seconds", ".1f"),
    "last loss": ("loss", ".3f"),
    "steps": ("steps", ",d"),
}


def text_of(nanogpt: Path) -> Path:
    """Returns the path of the training text that nanoGPT's prepare.py downloads."""
    return nanogpt / "data" / "shakespeare_char" / "input.txt"


def compare(text: Path, nanogpt: Path | None, target: float = TARGET, rounds: int = 1) -> list[Row]:
    """Runs both alternately, or only sansgpu without a checkout of nanoGPT. Returns one row per run."""
    rows: list[Row] = []
    race: dict[str, Callable[[Path], Row]] = {"sansgpu": partial(run_ours, text, target)}
    if nanogpt is not None:
        race["nanoGPT"] = partial(run_nanogpt, nanogpt, text, target)
    with tempfile.TemporaryDirectory(prefix="sansgpu-shakespeare-") as name:
        for number in range(rounds):
            for contestant, run in race.items():
                say(f"round {number + 1} of {rounds}: {contestant}")
                try:
                    rows.append(run(Path(name) / f"{contestant}-{number}"))
                except NoResultError as failure:
                    rows.append({"name": contestant, "status": str(failure)})
    add_ratios(rows, "seconds_to_target", to="sansgpu")
    print_table(f"Shakespeare by characters, to a validation loss of {target}", COLUMNS, rows)
    return rows


def run_ours(text: Path, target: float, output: Path) -> Row:
    """Runs sansgpu to its end. Raises NoResultError if it fails."""
    settings = {"data.dataset_name": text.resolve(), "training.report_to": "none"}
    outcome = spawn(ours.command(output, settings, CONFIG))
    losses = [(seconds, event["step"], event["loss"]) for seconds, event in outcome.named("eval")]
    if outcome.code or not losses:
        raise NoResultError(f"exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    return _row("sansgpu", losses, outcome.wall_seconds, outcome.peak_rss_bytes, target)


def run_nanogpt(checkout: Path, text: Path, target: float, folder: Path) -> Row:
    """Runs nanoGPT's train.py in a copy of the checkout on the same text. Raises NoResultError if it fails."""
    shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".git", "out*"))
    data = text_of(folder)
    shutil.copyfile(text, data)
    prepared = spawn([sys.executable, str(data.with_name("prepare.py"))], cwd=folder)
    if prepared.code:
        raise NoResultError(f"nanoGPT's prepare.py failed: {prepared.errors.strip()[-300:]}")
    outcome = spawn(
        [sys.executable, "train.py", "config/train_shakespeare_char.py", *NANOGPT_ARGUMENTS],
        environment={"PYTHONUNBUFFERED": "1"},
        cwd=folder,
    )
    found = [(seconds, EVALUATED.match(line)) for seconds, line in outcome.lines]
    losses = [(seconds, int(match[1]), float(match[2])) for seconds, match in found if match]
    if outcome.code or not losses:
        raise NoResultError(f"nanoGPT's train.py: exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    return _row("nanoGPT", losses, outcome.wall_seconds + prepared.wall_seconds, outcome.peak_rss_bytes, target)


def _row(name: str, losses: list[tuple[float, int, float]], wall: float, peak: int, target: float) -> Row:
    """Returns a result row; `losses` are (seconds since the start, step, validation loss)."""
    row: Row = {"name": name, "wall_seconds": wall, "peak_rss_bytes": peak}
    row |= {"steps": losses[-1][1], "loss": losses[-1][2], "evaluations": losses}
    reached = next((entry for entry in losses if entry[2] <= target), None)
    if reached:
        row |= {"seconds_to_target": reached[0], "loss_at_target": reached[2]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe.shakespeare", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="training text; default: the one in the checkout")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="checkout of nanoGPT; default: only run sansgpu")
    parser.add_argument("--target", type=float, default=TARGET, help="validation loss (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    text = args.data or (text_of(args.nanogpt) if args.nanogpt else None)
    if text is None or not text.is_file():
        parser.error("give the text with --data FILE" if text is None else f"{text} does not exist; give --data FILE")
    rows = compare(text, args.nanogpt, args.target, args.rounds)
    write_json(args.json, "shakespeare", {**vars(args), "text_bytes": text.stat().st_size}, rows)


if __name__ == "__main__":
    main()
