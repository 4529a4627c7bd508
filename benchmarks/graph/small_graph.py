"""Measures link prediction on a small synthetic knowledge graph.

    python -m benchmarks.graph.small_graph [--steps 600] [--set KEY=VALUE] [--json FILE]

The graph resembles a small ontology. Its entities form two trees of types. A relation holds between every type of one
branch and every type of another branch, with a few exceptions. Names have one to four words joined by `_`. Trains on
5,242 facts, ranks all 135 entities as tails of each of 655 held-out facts, and prints the filtered MRR and Hits@10,
with a baseline that ranks entities by how often they are the relation's tail.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contest import ROOT, Row, print_table, write_json
from sansgpu.jobs.evaluate import link_prediction
from sansgpu.jobs.train import TrainRequest, train
from sansgpu.tasks.configuration import load_config
from sansgpu.train.loading import ModelRequest

ENTITIES, RELATIONS = 135, 46
BLOCK = 70  # typical number of facts between two related branches
SPLIT = {"train.tsv": 0.8, "dev.tsv": 0.1, "test.tsv": 0.1}
DROPPED_RATIO = 0.01  # fraction of the facts between related branches that are randomly dropped
MAX_BRANCH_PAIRS = 3  # pairs of related branches per relation
CONFIG = ROOT / "configs" / "knowledge_graph.yaml"
COLUMNS = {
    "": ("name", "s"),
    "MRR": ("mrr", ".3f"),
    "Hits@10": ("hits_at_10", ".3f"),
    "by frequency, MRR": ("relation_frequency_mrr", ".3f"),
    "minutes": ("minutes", ".1f"),
    "CPU minutes": ("cpu_minutes", ".1f"),
}

KINDS = (
    "anatomical biologic chemical clinical cognitive daily diagnostic embryonic environmental experimental functional "
    "genetic geographic governmental health hormonal immune inorganic intellectual laboratory legal machine medical "
    "mental molecular natural occupational organic pathologic pharmacologic physical professional regulatory research "
    "social spatial temporal therapeutic"
)
THINGS = (
    "abnormality action activity agent area attribute behavior cell component concept condition device disorder "
    "element entity event factor finding fluid function group hazard idea manner material measure object organ "
    "organism phenomenon plant procedure process product property region sequence sign structure substance system "
    "test tissue tool vitamin"
)
VERBS = (
    "affects analyzes assesses carries causes complicates consists_of contains degrades derives_from diagnoses "
    "disrupts evaluates exhibits follows indicates ingests interacts_with interconnects isa issues_in location_of "
    "manages manifests measures method_of occurs_in part_of performs practices precedes prevents process_of produces "
    "property_of result_of surrounds traverses treats tributary_of uses adjacent_to branch_of brings_about "
    "conceptually_near developmental_form_of"
)


def names(count: int, draws: random.Random) -> list[str]:
    """Returns distinct names of one to four words."""
    found: dict[str, None] = {}
    things = THINGS.split()
    while len(found) < count:
        words = draws.sample(KINDS.split(), draws.choice((0, 1, 1, 2))) + draws.sample(things, 1)
        if draws.random() < 0.25:
            words += ["or", draws.choice(things)]
        if len(words) == len(set(words)):
            found["_".join(words)] = None
    return list(found)


def branches(count: int, draws: random.Random) -> list[list[int]]:
    """Grows two random trees with `count` types in total. Returns the subtree of each type, including itself."""
    parents = [-1, -1]
    for number in range(2, count):
        parents.append(draws.randrange(max(0, number - 40), number))
    found: list[list[int]] = [[number] for number in range(count)]
    for number in reversed(range(count)):
        if parents[number] >= 0:
            found[parents[number]] += found[number]
    return found


def facts(seed: int = 3, entities: int = ENTITIES, relations: int = RELATIONS, block: int = BLOCK) -> list[list[str]]:
    """Returns [head, relation, tail] of all facts in random order; equal arguments give equal facts."""
    draws = random.Random(seed)
    named, trees, verbs = names(entities, draws), branches(entities, draws), VERBS.split()
    found: list[tuple[int, int, int]] = []
    for relation in range(relations):
        pairs: set[tuple[int, int]] = set()
        for _ in range(draws.randint(1, MAX_BRANCH_PAIRS)):
            pairs |= set(_pairs(trees, block, draws))
        found += [(head, relation, tail) for head, tail in sorted(pairs)]
    draws.shuffle(found)
    return [[named[head], verbs[relation], named[tail]] for head, relation, tail in found]


def _pairs(trees: list[list[int]], size: int, draws: random.Random) -> Iterator[tuple[int, int]]:
    """Yields about `size` (head, tail) pairs between two branches, except a sub-branch of heads and a few pairs."""
    while True:
        heads, tails = draws.choice(trees), draws.choice(trees)
        if size / 3 < len(heads) * len(tails) < 3 * size:
            break
    excepted = set(trees[draws.choice(heads)])
    excepted = set() if len(excepted) * 3 > len(heads) else excepted
    for head in heads:
        for tail in tails:
            if head not in excepted and draws.random() >= DROPPED_RATIO:
                yield head, tail


def write_graph(folder: Path, rows: list[list[str]]) -> Path:
    """Writes train.tsv, dev.tsv and test.tsv to `folder` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0.0
    for name, share in SPLIT.items():
        part = rows[round(start * len(rows)) : round((start + share) * len(rows))]
        (folder / name).write_text("".join("\t".join(row) + "\n" for row in part), encoding="utf-8")
        start += share
    return folder


def measured(folder: Path, changes: Sequence[str]) -> Row:
    """Trains on the graph and ranks the tails of its test split."""
    graph = write_graph(folder / "graph", facts())
    settings = (f"data.dataset_name={graph}", "training.report_to=none", *changes)
    start, cpu = time.perf_counter(), time.process_time()
    train(TrainRequest(CONFIG, settings, folder / "run"), [], _quiet)
    spent = {"minutes": (time.perf_counter() - start) / 60, "cpu_minutes": (time.process_time() - cpu) / 60}
    return {
        "name": "tails",
        **link_prediction(ModelRequest(str(folder / "run")), None, None, _quiet, _quiet)["tail"],
        **spent,
    }


def _quiet(*said: Any) -> None:
    """Discards progress messages."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="training steps; default: those of the configuration")
    parser.add_argument("--set", action="append", default=[], dest="changes", help="key.path=value")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    changes = [*args.changes, *([f"training.max_steps={args.steps}"] if args.steps else [])]
    load_config(CONFIG, changes)  # reports invalid settings before any work
    with tempfile.TemporaryDirectory(prefix="sansgpu-small-graph-") as name:
        row = measured(Path(name), changes)
    print_table(f"{row['candidates']} entities, {row['queries']} held-out facts", COLUMNS, [row])
    write_json(args.json, "small_graph", vars(args), [row])


if __name__ == "__main__":
    main()
