"""Tiny runs for the tests of what is said of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.cli import run as cli
from sansgpu.config import RunPaths
from tests.processes import json_lines, settings, write_corpus

Event = dict[str, Any]


def train(home: Path, name: str, **changes: object) -> Path:
    """A run in this process, on made-up sentences."""
    corpus = home / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    merged = {"data__dataset_name": corpus, "training__max_steps": 8, "training__sample_tokens": 8, **changes}
    assert cli(["train", *settings(**merged), "--output-dir", str(home / name)]) == 0
    return home / name


def written(folder: Path, events: list[Event], source: Path) -> Path:
    """A run's folder with these events, and a real run's configuration and environment."""
    paths, real = RunPaths(folder), RunPaths(source)
    folder.mkdir(parents=True)
    for path, other in ((paths.config, real.config), (paths.environment, real.environment)):
        path.write_bytes(other.read_bytes())
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def events_of(run: Path) -> list[Event]:
    return json_lines(RunPaths(run).metrics)


def changed(run: Path, change: Callable[[Event], Event | None]) -> list[Event]:
    """The events of a run, each as `change` makes it; None leaves it out."""
    return [new for event in events_of(run) if (new := change(dict(event))) is not None]
