"""Compares two sets of settings by the bits per byte after equal steps, for several texts, model sizes and seeds.

    python -m benchmarks.recipe.grid --text TRAIN:VALID [--text ...] --set KEY=VALUE [--size 3M 10M 30M] [--seeds 3]

Each pair of runs has the same model and the same number of steps of 4,096 tokens. The first run has no further
settings, or with `--against-0.2` those of version 0.2. The second one has the settings of `--set`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import ours
from benchmarks.contest import ROOT, NoResultError, Row, print_table, say, spawn, write_json
from sansgpu.config.learning_rate import default_learning_rate

CONFIG = ROOT / "configs" / "cpu_fast.yaml"
SIZES: dict[str, dict[str, object]] = {
    "3M": {"model.d_model": 256, "model.n_layers": 4, "training.max_steps": 120},
    "10M": {"model.d_model": 320, "model.n_layers": 6, "training.max_steps": 150},
    "30M": {"model.d_model": 512, "model.n_layers": 8, "training.max_steps": 200},
}
HEAD_DIM = 64
VERSION_0_2 = {
    "training.muon_momentum_start": 0.95,
    "training.muon_embedding_rate": 1,
    "training.warmup_steps": 50,
    "training.weight_decay": 0.1,
    "model.initialization": "random",
}
COLUMNS = {
    "text": ("text", "s"),
    "size": ("size", "s"),
    "first": ("first", ".4f"),
    "second": ("second", ".4f"),
    "change %": ("change", "+.2f"),
    "between seeds %": ("spread", ".2f"),
}


def bits_per_byte(text: str, size: str, seed: int, settings: dict[str, object], cache: Path) -> float:
    """Trains a model and returns its last evaluation. Raises NoResultError if the run fails."""
    train, _, valid = text.partition(":")
    width = int(str(SIZES[size]["model.d_model"]))
    given = {
        "data.dataset_name": Path(train).resolve(),
        "data.validation_name": Path(valid).resolve(),
        **SIZES[size],
        "model.n_heads": width // HEAD_DIM,
        "model.d_ff": 4 * width,
        "training.learning_rate": default_learning_rate("muon", width),
        "training.seed": seed,
        "training.report_to": "none",
        "training.sample_tokens": 0,
        **settings,
    }
    with tempfile.TemporaryDirectory(prefix="sansgpu-grid-") as folder:
        outcome = spawn(ours.command(Path(folder) / "run", given, CONFIG), environment={"SANSGPU_CACHE": str(cache)})
    evaluations = outcome.named("eval")
    if outcome.code or not evaluations:
        raise NoResultError(f"exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    return float(evaluations[-1][1]["bits_per_byte"])


def compare(text: str, size: str, seeds: int, sets: list[dict[str, object]], cache: Path) -> Row:
    """Returns the mean of both sets of settings over the seeds, and the standard deviation of the second."""
    row: Row = {"text": Path(text.partition(":")[0]).name, "size": size}
    try:
        results = [[bits_per_byte(text, size, seed, settings, cache) for settings in sets] for seed in range(seeds)]
    except NoResultError as failure:
        return {**row, "status": str(failure)}
    first, second = (statistics.mean(result) for result in zip(*results, strict=True))
    spread = 100 * statistics.stdev(result[1] for result in results) / second if seeds > 1 else None
    return {**row, "first": first, "second": second, "change": 100 * (second / first - 1), "spread": spread}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe.grid", description=__doc__)
    parser.add_argument("--text", action="append", required=True, metavar="TRAIN:VALID", help="files; repeatable")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the second run; repeatable")
    parser.add_argument("--against-0.2", action="store_true", dest="old", help="first run: the settings of version 0.2")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    second: dict[str, object] = dict(setting.split("=", 1) for setting in args.set)
    sets = [dict(VERSION_0_2) if args.old else {}, second]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sansgpu-grid-cache-") as cache:
        for text in args.text:
            for size in args.size:
                say(f"{text}, {size}")
                rows.append(compare(text, size, args.seeds, sets, Path(cache)))
    changes = [row["change"] for row in rows if "change" in row]
    if changes:
        rows.append({"text": "mean", "size": "", "change": statistics.mean(changes)})
    print_table("bits per byte after equal steps", COLUMNS, rows)
    write_json(args.json, "recipe_grid", vars(args), rows)


if __name__ == "__main__":
    main()
