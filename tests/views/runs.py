"""Tiny runs for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import RunPaths
from tests import processes
from tests.processes import json_lines, write_corpus

Event = dict[str, Any]


def train(home: Path, name: str, **changes: object) -> Path:
    """Trains a tiny model on made-up sentences in this process."""
    corpus = home / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    small: dict[str, object] = {"training__max_steps": 8, "training__sample_tokens": 8}
    assert processes.train(home, home / name, **{**small, **changes}) == 0
    return home / name


def written(folder: Path, events: list[Event], source: Path) -> Path:
    """Writes a run's folder with `events` and the configuration and environment of the run `source`."""
    paths, real = RunPaths(folder), RunPaths(source)
    folder.mkdir(parents=True)
    for path, other in ((paths.config, real.config), (paths.environment, real.environment)):
        path.write_bytes(other.read_bytes())
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    return folder


def events_of(run: Path) -> list[Event]:
    return json_lines(RunPaths(run).metrics)


def changed(run: Path, change: Callable[[Event], Event | None]) -> list[Event]:
    """Returns the events of a run after `change`, which may return None to drop one."""
    return [new for event in events_of(run) if (new := change(dict(event))) is not None]
