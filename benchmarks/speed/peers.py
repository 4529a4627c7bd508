"""Compares sansgpu with its peers: the same model, data and tokens per step, measured alternately.

`python -m benchmarks.speed.peers --size cpu_small`
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import corpus, ours
from benchmarks.contest import (
    WARM_UP,
    Contestant,
    NoResultError,
    Outcome,
    Row,
    Sample,
    add_ratios,
    print_table,
    say,
    take_turns,
    write_json,
)
from benchmarks.recipe import shakespeare
from benchmarks.sizes import LEARNING_RATE, SIZES, WEIGHT_DECAY, Job, Size

# In packed windows, tokens do not attend to other documents ("apart"), or they do ("seen across").
APART, ACROSS = "apart", "seen across"
NEEDS = {  # packages that are not dependencies of sansgpu
    "hf-fp32": ("accelerate",),
    "hf-bf16": ("accelerate",),
    "hf-bf16-compile": ("accelerate",),
    "plain": (),
    "lightning": ("lightning",),
}
COLUMNS = {
    "contestant": ("name", "s"),
    "step s": ("median_step_seconds", ".3f"),
    "x ours": ("ratio", ".2f"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "documents": ("documents", "s"),
    "micro-batch": ("variant", "s"),
    "first step s": ("first_step_seconds", ".1f"),
    "peak GB": ("peak_rss_gb", ".2f"),
    "last loss": ("loss", ".3f"),
}


def settings_of(size: Size, data: str) -> dict[str, object]:
    """Returns sansgpu's settings for the model that the peers train."""
    return {
        "data.dataset_name": data,
        "training.optimizer": "adamw",
        "training.learning_rate": LEARNING_RATE,
        "training.weight_decay": WEIGHT_DECAY,
        **size.model_keys(),
    }


def contestants(
    size: Size, peers: list[str], precisions: list[str], data: str, steps: int, folder: Path
) -> list[Contestant]:
    """Returns sansgpu, also in other precisions, and one contestant per peer and micro-batch size."""
    common = settings_of(size, data)
    field = [ours.contestant("sansgpu", folder / "ours", common, steps)]
    for precision in precisions:
        changed = {**common, "training.precision": precision}
        field.append(ours.contestant(f"sansgpu {precision}", folder / precision, changed, steps))
    if size.modern_d_ff:
        modern = {**common, "model.activation": "swiglu", "model.d_ff": size.modern_d_ff}
        field.append(ours.contestant("sansgpu modern", folder / "modern", modern, steps))
    return field + peer_contestants(size, peers, steps, folder)


def peer_contestants(size: Size, peers: list[str], steps: int, folder: Path) -> list[Contestant]:
    """Returns one contestant per peer and micro-batch size."""
    field = []
    for kind in peers:
        for micro_batch in size.micro_batches:
            name = f"{kind}-{micro_batch}"
            job = Job(kind, size, folder / "train.npy", micro_batch, WARM_UP + steps, folder / name)
            command = [sys.executable, "-m", "benchmarks.speed.contestants", str(job.write(folder / f"{name}.json"))]
            variant = f"{micro_batch} x {job.accumulation}"
            field.append(Contestant(kind, command, read_steps, variant, NEEDS[kind]))
    return field


def with_cache(contestant: Contestant, folder: Path) -> Contestant:
    """Returns the contestant with its own, empty cache for torch.compile."""
    place = folder / "inductor" / f"{contestant.name} {contestant.variant}".replace(" ", "-")
    return replace(contestant, environment={**contestant.environment, "TORCHINDUCTOR_CACHE_DIR": str(place)})


def read_steps(outcome: Outcome) -> Sample:
    """Reads the last JSON line of a peer: step_seconds, including the warm-up, and loss."""
    result = next((event for _, event in reversed(outcome.events) if "step_seconds" in event), None)
    if result is None:
        raise NoResultError("it printed no JSON line with step_seconds")
    seconds = [float(value) for value in result["step_seconds"]]
    if len(seconds) <= WARM_UP:
        raise NoResultError(f"the run ended after {len(seconds)} steps")
    loss = result.get("loss")
    return Sample(seconds[WARM_UP:], seconds[0], outcome.peak_rss_bytes, loss, outcome.wall_seconds)


def add_arguments(parser: argparse.ArgumentParser, peers: str, rounds: int = 2) -> None:
    """Adds the arguments of a comparison with peers; `peers` and `rounds` are their defaults."""
    parser.add_argument("--size", choices=SIZES, default="cpu_small")
    parser.add_argument(
        "--peers", default=peers, help=f"comma-separated subset of {','.join(NEEDS)}; default: '%(default)s'"
    )
    parser.add_argument("--data", default=corpus.PYTHON_STDLIB, help="value of data.dataset_name (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help=f"measured steps after a warm-up of {WARM_UP}")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="number of runs of each contestant under each condition"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line and checks the arguments of `add_arguments`; `peers` becomes a list."""
    args = parser.parse_args()
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := [name for name in args.peers if name not in NEEDS]:
        parser.error(f"--peers: unknown {', '.join(unknown)}; choose from {', '.join(NEEDS)}")
    if args.steps < 1 or args.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    return args


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.peers", description=__doc__)
    add_arguments(parser, ",".join(NEEDS))
    parser.add_argument(
        "--folder-command",
        metavar="CMD",
        help="shell command of one more contestant: it reads the job file $BENCHMARK_JOB and prints a JSON line with "
        "step_seconds (a list that starts with the warm-up) and loss",
    )
    parser.add_argument(
        "--precisions",
        default=[],
        nargs="+",
        choices=("fp32", "bf16", "int16", "int8"),
        help="also run sansgpu in these precisions",
    )
    parser.add_argument("--dropout", type=float, metavar="P", help="instead of the size's own, for every contestant")
    parser.add_argument("--nanogpt", type=Path, metavar="FOLDER", help="checkout of nanoGPT; runs its CPU example, too")
    args = parse(parser)
    if args.nanogpt and not shakespeare.text_of(args.nanogpt).is_file():
        parser.error(f"{shakespeare.text_of(args.nanogpt)} does not exist; run nanoGPT's prepare.py first")
    return args


def main() -> None:
    args = arguments()
    size = SIZES[args.size] if args.dropout is None else replace(SIZES[args.size], dropout=args.dropout)
    data = str(Path(args.data).resolve()) if os.path.exists(args.data) else args.data
    with tempfile.TemporaryDirectory(prefix="sansgpu-peers-") as name:
        folder = Path(name)
        say("preparing the data")
        facts = corpus.prepare(data, size.vocab_size, folder)
        field = contestants(size, args.peers, args.precisions, data, args.steps, folder)
        if args.folder_command:
            job = Job("given", size, folder / "train.npy", size.micro_batches[-1], WARM_UP + args.steps, folder)
            environment = {"BENCHMARK_JOB": str(job.write(folder / "given.json"))}
            shell = ["bash", "-c", args.folder_command]
            field.append(Contestant("given command", shell, read_steps, environment=environment))
        rows = take_turns([with_cache(contestant, folder) for contestant in field], args.rounds)
    add_ratios(rows, "median_step_seconds", to="sansgpu")
    for row in rows:
        row["documents"] = APART if row["name"].startswith("sansgpu") else ACROSS if row["name"] in NEEDS else None
        if "median_step_seconds" in row:
            row["tokens_per_second"] = size.tokens_a_step / row["median_step_seconds"]
            row["peak_rss_gb"] = row["peak_rss_bytes"] / 1e9
    title = f"{args.size}: {size.tokens_a_step:,} tokens a step, medians of {args.steps} steps x {args.rounds}"
    print_table(title, COLUMNS, rows)
    settings: Row = {**vars(args), "size_keys": size.model_keys(), "data": facts}
    if args.nanogpt:
        settings["shakespeare"] = shakespeare.compare(shakespeare.text_of(args.nanogpt), args.nanogpt)
    write_json(args.json, "peers", settings, rows)


if __name__ == "__main__":
    main()
