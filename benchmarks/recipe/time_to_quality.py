"""Time to quality: how long sansgpu takes to reach the bits per byte that a plain training loop reaches in a given
number of minutes.

    python -m benchmarks.recipe.time_to_quality --data TEXT --valid TEXT --minutes 20

The baseline is a GPT-2 of cpu_small's size without dropout, with 32,000 tokens, bf16, torch.compile and AdamW. Both
start from the raw text with empty caches, and neither time includes the last evaluation.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import corpus, ours
from benchmarks.contest import ROOT, Event, NoResultError, Outcome, Row, add_ratios, print_table, say, spawn, write_json
from benchmarks.sizes import SIZES, Job

COLUMNS = {
    "contestant": ("name", "s"),
    "wall s": ("wall_seconds", ".0f"),
    "x ours": ("ratio", ".2f"),
    "bits per byte": ("bits_per_byte", ".4f"),
    "steps": ("steps", ",d"),
    "peak GB": ("peak_rss_gb", ".2f"),
}


def run_baseline(data: str, valid: Path, minutes: float, size_name: str, micro_batch: int, folder: Path) -> Row:
    """Runs the plain loop. Its wall time covers tokenization, start, compilation and steps, but not evaluation."""
    size = replace(SIZES[size_name], dropout=0.0)
    facts = corpus.prepare(data, size.vocab_size, folder, valid, cache=folder / "cache")
    job = Job(
        "plain", size, folder / "train.npy", micro_batch, 0, folder, minutes=minutes, valid_bytes=facts["valid_bytes"]
    )
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    command = [sys.executable, "-m", "benchmarks.speed.contestants", str(job.write(folder / "job.json"))]
    outcome = spawn(command, environment=environment)
    if outcome.code:
        raise NoResultError(f"the baseline: exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    trained_at, trained = outcome.named("trained")[-1]
    evaluation = outcome.named("eval")[-1][1]
    return {
        "name": f"plain GPT-2, {minutes:g} min",
        "wall_seconds": facts["seconds"] + trained_at,
        "step_seconds_in_all": trained["seconds"],
        "tokens_per_second": trained["tokens"] / trained["seconds"],
        "preparation": facts,
        "steps": trained["steps"],
        "bits_per_byte": evaluation["bits_per_byte"],
        "loss": evaluation["loss"],
        "peak_rss_bytes": outcome.peak_rss_bytes,
        "peak_rss_gb": outcome.peak_rss_bytes / 1e9,
    }


def run_ours(data: str, valid: Path, config: Path, settings: list[str], target: float, folder: Path) -> Row:
    """Runs sansgpu until an evaluation meets the target and returns the best one. Raises NoResultError if it fails.

    Its wall time ends with the last step before that evaluation.
    """

    def meets(event: Event) -> bool:
        return event.get("event") == "eval" and event["bits_per_byte"] <= target

    chosen: dict[str, object] = {"data.dataset_name": data, "data.validation_name": valid.resolve()}
    chosen |= {"training.report_to": "none", "training.sample_tokens": 0}
    chosen |= dict(setting.split("=", 1) for setting in settings)
    outcome: Outcome = spawn(
        ours.command(folder / "run", chosen, config),
        until=meets,
        environment={"SANSGPU_CACHE": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")},
    )
    evaluations = outcome.named("eval")
    if outcome.code or not evaluations:
        raise NoResultError(f"sansgpu: exit code {outcome.code}: {outcome.errors.strip()[-300:]}")
    best = min((event for _, event in evaluations), key=lambda event: float(event["bits_per_byte"]))
    reached = meets(best)
    trained_at = max(at for at, event in outcome.named("step") if event["step"] <= best["step"])
    return {
        "name": f"sansgpu, {config.name}" + ("" if reached else " (target not reached)"),
        "reached": reached,
        "wall_seconds": trained_at,
        "steps": best["step"],
        "bits_per_byte": best["bits_per_byte"],
        "loss": best["loss"],
        "evaluations": [(at, event["step"], event["loss"], event["bits_per_byte"]) for at, event in evaluations],
        "peak_rss_bytes": outcome.peak_rss_bytes,
        "peak_rss_gb": outcome.peak_rss_bytes / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recipe.time_to_quality", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "configs" / "default.yaml", metavar="CONFIG")
    parser.add_argument("--data", required=True, metavar="FILE", help="training text")
    parser.add_argument("--valid", required=True, type=Path, metavar="FILE", help="validation text")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of the baseline (%(default)s)")
    parser.add_argument("--target", type=float, help="target bits per byte; skips the baseline")
    parser.add_argument("--size", choices=SIZES, default="cpu_small", help="size of the baseline (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="baseline windows per micro-batch (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="sansgpu setting; repeatable")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    data = str(Path(args.data).resolve())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sansgpu-recipe-") as name:
        target = args.target
        if target is None:
            folder = Path(name) / "baseline"
            folder.mkdir()
            say(f"the baseline, {args.minutes:g} minutes")
            rows.append(run_baseline(data, args.valid, args.minutes, args.size, args.micro_batch, folder))
            target = rows[0]["bits_per_byte"]
        say(f"sansgpu, to {target:.4f} bits per byte")
        folder = Path(name) / "ours"
        folder.mkdir()
        rows.append(run_ours(data, args.valid, args.config, args.set, target, folder))
    if rows[-1]["reached"]:
        add_ratios(rows, "wall_seconds", to=rows[-1]["name"])
    print_table(f"from text to {target:.4f} bits per byte", COLUMNS, rows)
    write_json(args.json, "recipe", {**vars(args), "target": target}, rows)


if __name__ == "__main__":
    main()
