"""Learns labels from 8 examples per label, compared with SetFit in accuracy and CPU time.

    python -m benchmarks.fine_tuning.few_shot --model FOLDER --data FOLDER [--peer-python PYTHON] [--draws 5]
        [--sets sst2 genres] [--threads N] [--json FILE]

The data folder has `sst2` (train.tsv and test.tsv with sentence and label), `stsb` (sts-train.csv, whose genres are the
labels of first sentences) and `wn18rr` (definitions, labeled with four of WordNet's topics). In each draw, both learn
from the same rows with their default settings and are tested on the same 500 other rows. Seconds are measured for the
whole process, including imports and tests. CPU seconds do not depend on the load by other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev

from benchmarks.contest import NoResultError, Outcome, Row, finished, print_table, run_worker, say, write_json
from benchmarks.ours import command

Labeled = tuple[str, str]

SHOTS, TESTED = 8, 500
SENTIMENTS = {"0": "negative", "1": "positive"}
TOPICS = {"law": "law", "war machine": "military", "chemistry": "chemistry", "computing": "computing"}
COLUMNS = {
    "data": ("data", "s"),
    "with": ("name", "s"),
    "accuracy": ("accuracy", ".3f"),
    "spread": ("accuracy_spread", ".3f"),
    "processor s": ("processor_seconds", ".1f"),
    "s": ("seconds", ".1f"),
}


def sentiments(file: Path) -> list[Labeled]:
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    return [(text, SENTIMENTS[label]) for text, label in (line.rsplit("\t", 1) for line in lines)]


def genres(folder: Path) -> list[Labeled]:
    rows = [line.split("\t") for line in (folder / "sts-train.csv").read_text(encoding="utf-8").split("\n") if line]
    found: dict[str, str] = {}
    for row in rows:
        found.setdefault(row[5], row[0])
    return list(found.items())


def topics(folder: Path) -> list[Labeled]:
    """Returns WordNet definitions with their topic, for words that have exactly one topic."""
    lines = (folder / "entity2text.txt").read_text(encoding="utf-8").splitlines()
    definitions = dict(line.split("\t", 1) for line in lines)
    found: dict[str, list[str]] = {}
    for part in ("train", "dev", "test"):
        for line in (folder / f"{part}.tsv").read_text(encoding="utf-8").splitlines():
            word, relation, topic = line.split("\t")
            if relation == "_synset_domain_topic_of":
                found.setdefault(word, []).append(definitions[topic].split(",")[0])
    alone = ((definitions[word], names[0]) for word, names in found.items() if len(names) == 1)
    return [(text, TOPICS[name]) for text, name in alone if name in TOPICS]


# Each function returns the rows to draw training examples from, and the test rows if they are separate.
SETS: dict[str, Callable[[Path], tuple[list[Labeled], list[Labeled] | None]]] = {
    "sst2": lambda data: (sentiments(data / "sst2/train.tsv"), sentiments(data / "sst2/test.tsv")),
    "genres": lambda data: (genres(data / "stsb"), None),
    "topics": lambda data: (topics(data / "wn18rr"), None),
}


def draw(rows: list[Labeled], tests: list[Labeled] | None, seed: int) -> tuple[list[Labeled], list[Labeled]]:
    """Draws the training rows of every label, and the test rows."""
    random_ = random.Random(seed)
    rows = sorted(set(rows))
    random_.shuffle(rows)
    chosen = [row for label in sorted({label for _, label in rows}) for row in _first(rows, label)]
    if tests is None:
        used = set(chosen)
        return chosen, [row for row in rows if row not in used][:TESTED]
    tests = sorted(set(tests))
    random_.shuffle(tests)
    return chosen, tests[:TESTED]


def _first(rows: list[Labeled], label: str) -> list[Labeled]:
    return [row for row in rows if row[1] == label][:SHOTS]


def write(path: Path, rows: Iterable[Labeled]) -> Path:
    lines = (json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def ours(job: Row, folder: Path) -> Row:
    settings = {
        "task": "classify",
        "training.few_shot": "true",
        "training.seed": job["seed"],
        "training.threads": job["threads"],
        "model.name_or_path": job["model"],
        "data.dataset_name": job["train"],
        "data.validation_name": job["test"],
    }
    outcome = finished(command(folder / "run", settings), "eval")
    return cost(outcome, outcome.named("eval")[-1][1])


def peer(python: str, job: Row, folder: Path) -> Row:
    outcome = run_worker(job, folder, "benchmarks.fine_tuning.few_shot_peer", python=python)
    return cost(outcome, outcome.named("result")[-1][1])


def cost(outcome: Outcome, scored: Row) -> Row:
    return {
        "accuracy": scored["accuracy"],
        "processor_seconds": outcome.cpu_seconds,
        "seconds": outcome.wall_seconds,
    }


def row(data: str, name: str, found: list[Row]) -> Row:
    means = {key: mean(one[key] for one in found) for key in found[0]}
    accuracies = [one["accuracy"] for one in found]
    spread = stdev(accuracies) if len(found) > 1 else 0.0
    return {"data": data, "name": name, **means, "accuracy_spread": spread, "accuracies": accuracies}


def measure(name: str, arguments: argparse.Namespace) -> list[Row]:
    """Returns a row of results for each contestant, which run alternately."""
    rows, tests = SETS[name](arguments.data)
    found: dict[str, list[Row]] = {}
    for seed in range(arguments.draws):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            train, test = draw(rows, tests, seed)
            job = {"model": str(arguments.model), "seed": seed, "threads": arguments.threads}
            job["train"] = str(write(folder / "train.jsonl", train))
            job["test"] = str(write(folder / "test.jsonl", test))
            say(f"{name}, draw {seed}")
            found.setdefault("sansgpu", []).append(ours(job, folder))
            if arguments.peer_python:
                found.setdefault("SetFit", []).append(peer(arguments.peer_python, job, folder))
    return [row(name, contestant, results) for contestant, results in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer-python", help="Python of an environment with setfit; default: measure only sansgpu")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        rows = [row for name in arguments.sets for row in measure(name, arguments)]
    except NoResultError as failure:
        raise SystemExit(str(failure)) from None
    print_table(f"{SHOTS} examples of each label, {arguments.draws} draws", COLUMNS, rows)
    write_json(arguments.json, "few_shot", vars(arguments), rows)


if __name__ == "__main__":
    main()
