"""Trains and writes tiny runs for the tests of reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import RunPaths
from tests.processes import TINY, events_of, options, train_once, write_corpus, write_rows

Event = dict[str, Any]


def train(home: Path, name: str, **changes: object) -> Path:
    """Trains a tiny model on random sentences in this process, unless the run exists."""
    corpus = home / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    small = {"data.dataset_name": corpus, "training.max_steps": 8, "training.sample_tokens": 8}
    return train_once(home / name, options(TINY, small, changes))


def written(folder: Path, events: list[Event], source: Path) -> Path:
    """Writes a run's folder with `events` and the configuration and environment of the run `source`."""
    paths, real = RunPaths(folder), RunPaths(source)
    folder.mkdir(parents=True)
    for path, other in ((paths.config, real.config), (paths.environment, real.environment)):
        path.write_bytes(other.read_bytes())
    write_rows(paths.metrics, events)
    return folder


def changed(run: Path, change: Callable[[Event], Event | None]) -> list[Event]:
    """Returns the events of a run after `change`, which may return None to drop one."""
    return [new for event in events_of(run) if (new := change(dict(event))) is not None]
