"""Events as JSON lines: a run's metrics.jsonl, and --headless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

from sansgpu.watch.events import Event
from sansgpu.watch.files import to_nowhere, write_text


def line(event: Event) -> str:
    """One event as one line."""
    return json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"


class Metrics:
    """metrics.jsonl: the record of a run, the same whether or not it was interrupted.

    A resumed run continues the file behind the snapshot's step. So it holds one `start`, the run's first, and
    neither the `end` nor the extra snapshot of a process that was stopped; that a snapshot was resumed from is
    said again by the loop where it belongs to the record.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        kept = [] if resumed_step is None else _before(path, resumed_step)
        write_text(path, "".join(kept))
        self._has_start = bool(kept)
        self._file = path.open("a", encoding="utf-8")

    def emit(self, event: Event) -> None:
        """Append one line. The writer of snapshots has them synced to disk."""
        if event["event"] == "start" and self._has_start:
            return
        self._file.write(line(event))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLines:
    """--headless: every event on a stream, `start` first as in metrics.jsonl."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._early: list[Event] = []
        self._started = False

    def emit(self, event: Event) -> None:
        """Write one line, as long as somebody reads it."""
        if event["event"] == "start" or self._started:
            self._started = True
            self._write(event, *self._early)
            self._early = []
        else:
            self._early.append(event)

    def close(self) -> None:
        """Leave the stream open; it is not ours. What was said of a run that did not start is said now."""
        self._write(*self._early)
        self._early = []

    def _write(self, *events: Event) -> None:
        try:
            self._stream.write("".join(map(line, events)))
            self._stream.flush()
        except BrokenPipeError:
            to_nowhere(self._stream)


def read_events(path: Path) -> list[Event]:
    """The events of a metrics.jsonl; a last line that a kill cut off is left out."""
    events: list[Event] = []
    if not path.is_file():
        return events
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return events


def _before(path: Path, resumed_step: int) -> list[str]:
    def stays(event: Event) -> bool:
        step = event.get("step", 0)
        return event["event"] != "end" and step <= resumed_step and (event["event"], step) != ("snapshot", resumed_step)

    return [line(event) for event in read_events(path) if stays(event)]
