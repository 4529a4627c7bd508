"""Trains a graph encoder, compared with the same model in plain PyTorch on the same batches.

    python -m benchmarks.graph.encoder [--config configs/graph_80m.yaml] [--data SOURCE] [--steps 20] [--json FILE]

Measures two kinds of data: windows in which every root except the first and the last has a triple whose tail fills all
of its leaf slots, and triples of Python's standard library, where most slots are empty. Real nodes are nodes with a
token. Plain PyTorch computes logits for all nodes and sansgpu only for masked nodes, as the table shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from benchmarks.contest import Contestant, Outcome, Row, Sample, add_ratios, print_table, take_turns, write_json
from benchmarks.ours import MEASURED, assignments, at_step, command, sample

WARM_UP = 2
OURS, PLAIN = "sansgpu", "plain PyTorch, fp32"
COLUMNS = {
    "": ("name", "s"),
    "logits of": ("logits_of", "s"),
    "s/step": ("median_step_seconds", ".3f"),
    "real nodes/s": ("nodes_per_second", ",.0f"),
    "GFLOP/s": ("gflops", ",.0f"),
    "peak memory, GB": ("peak_gb", ".2f"),
    "faster by": ("ratio", ".2f"),
    "last loss": ("loss", ".3f"),
}
RELATIONS = 12  # relation types in the standard library's triples
WINDOWS, WORDS = 400, 2000  # number of generated texts, and of distinct words in them
SETTINGS = {**{k: v for k, v in MEASURED.items() if k != "training.window_warmup_ratio"}, "data.validation_split": 0.01}


def filled_rows(roots: int, leaves: int, relations: int) -> list[dict[str, object]]:
    """Returns texts of invented one-token words, each the head of a triple with a tail of `leaves` words."""
    draws = random.Random(0)
    words = ["".join(parts) for parts in product("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")]
    words = draws.sample(words, WORDS)
    rows: list[dict[str, object]] = []
    for number in range(WINDOWS):
        text = draws.sample(words, roots - 2)
        triples, place = [], 1  # texts start with a space, so that every word has the same token
        for word in text:
            tail, relation = " ".join(draws.sample(words, leaves)), f"relation {draws.randrange(relations):02d}"
            span = [place, place + len(word)]
            triples.append({"head": word, "relation": relation, "tail": tail, "head_span": span})
            place += len(word) + 1
        rows.append({"id": f"w{number}", "text": " " + " ".join(text), "triples": triples})
    return rows


def contestants(
    name: str, config: Path, settings: dict[str, object], folder: Path, args: argparse.Namespace
) -> list[Contestant]:
    """Returns sansgpu and plain PyTorch on the same data."""
    total = WARM_UP + args.steps
    ours = {**SETTINGS, **settings, "training.max_steps": total}
    label = Path(name).stem.replace(" ", "-")
    line = command(folder / f"{label}-ours", {**ours, "training.threads": args.threads}, config)
    job = folder / f"{label}.json"
    facts = {"config": str(config), "overrides": assignments({**SETTINGS, **settings}), "steps": total}
    job.write_text(json.dumps({**facts, "threads": args.threads, "cache": str(folder / "cache")}))
    plain = [sys.executable, "-m", "benchmarks.graph.plain_encoder", str(job)]
    read = partial(noted, folder / f"{label}.nodes")
    return [
        Contestant(f"{OURS}, {name}", line, read, until=at_step(total)),
        Contestant(f"{PLAIN}, {name}", plain, read),
    ]


def noted(file: Path, outcome: Outcome) -> Sample:
    """Returns the measured steps and writes the mean number of nodes per step, which only plain PyTorch prints."""
    counts = [event["nodes"] for _, event in outcome.named("step") if "nodes" in event]
    if counts:
        file.write_text(json.dumps(sum(counts[WARM_UP:]) / len(counts[WARM_UP:])))
    return sample(outcome)


def flops_a_node(width: int, inner: int, layers: int, vocabulary: int, nodes: float, masked: float) -> float:
    """Returns the FLOPs per node: 6 per matmul parameter, 12 L D T for attention, and the head on masked nodes.

    T is the number of real nodes per graph.
    """
    blocks = layers * (4 * width * width + 2 * width * inner)
    return 6 * blocks + 12 * layers * width * nodes + 6 * masked * (vocabulary * width + width * width)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/graph_80m.yaml"))
    parser.add_argument("--set", action="append", default=[], dest="changes", help="key.path=value, both contestants")
    parser.add_argument("--data", default="python-stdlib-graph", help="dataset of the second measurement")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="sansgpu-graph-") as name:
        rows = measured(args, Path(name))
    for part in rows:
        title = f"{args.config.name}, {part}: {rows[part][0]['nodes']:,.0f} real nodes a step"
        print_table(title, COLUMNS, rows[part])
    values = {**vars(args), "config": str(args.config)}
    write_json(args.json, "graph", values, [row for part in rows.values() for row in part])


def measured(args: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    """Returns the result rows by kind of data."""
    from sansgpu.tasks.configuration import load_config
    from sansgpu.tasks.graph.settings import GraphDataConfig, GraphModelConfig

    config, _ = load_config(args.config, args.changes)
    model = GraphModelConfig.of(config)
    data = folder / "filled.jsonl"
    lines = (json.dumps(row) for row in filled_rows(config.roots, model.leaf_slots, model.n_relations or RELATIONS))
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    shape = {
        "model.vocab_size": model.vocab_size or config.data.vocab_size,
        "model.n_relations": model.n_relations or RELATIONS,
        "model.leaves": model.leaf_slots,
    }
    changes: dict[str, object] = {**shape, "data.long_tails": "drop"}
    changes |= dict(change.split("=", 1) for change in args.changes)
    kinds: dict[str, dict[str, object]] = {
        "filled windows": {**changes, "data.dataset_name": data, "data.triples": "first"},
        args.data: {**changes, "data.dataset_name": args.data},
    }
    found = {}
    for name, settings in kinds.items():
        rows = take_turns(contestants(name, args.config, settings, folder, args), args.rounds)
        noted_nodes = folder / f"{Path(name).stem.replace(' ', '-')}.nodes"
        if not noted_nodes.exists():
            raise SystemExit(f"{name}: {rows[-1].get('status')}")
        nodes = json.loads(noted_nodes.read_text())
        training = config.training
        examples = training.gradient_accumulation_steps * (1 if training.batch_size == "auto" else training.batch_size)
        vocabulary = model.vocab_size or config.data.vocab_size
        sizes = (model.d_model, model.d_ff, model.n_layers, vocabulary)
        flops = flops_a_node(*sizes, nodes / examples, GraphDataConfig.of(config).mask_ratio) * nodes
        for row in rows:
            row["nodes"] = nodes
            row["logits_of"] = "masked nodes" if row["name"].startswith(OURS) else "all nodes"
            if "runs" in row:
                row["nodes_per_second"] = nodes / row["median_step_seconds"]
                row["gflops"] = flops / row["median_step_seconds"] / 1e9
                row["peak_gb"] = row["peak_rss_bytes"] / 1e9
        add_ratios(rows, "nodes_per_second", f"{PLAIN}, {name}")
        found[name] = rows
    return found


if __name__ == "__main__":
    main()
