"""Events as JSON lines: a run's metrics.jsonl, and --headless."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from pydantic_core import from_json

from sansgpu.config.plain import FlawError, open_regular
from sansgpu.watch.escape import printable_json
from sansgpu.watch.event_schema import event_flaw
from sansgpu.watch.events import Event, RecordError
from sansgpu.watch.files import to_nowhere, whole_file

MOST_LINE_BYTES = 4 << 20  # of an event; a sample is the longest thing in one


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
        kept = b"" if resumed_step is None else _before(path, resumed_step)
        with whole_file(path) as partial:
            partial.write_bytes(kept)
        self._has_start, self._path = bool(kept), path
        self._file = path.open("a", encoding="utf-8")

    def emit(self, event: Event) -> None:
        """Append one line. The writer of snapshots has them synced to disk. Raises RecordError if the disk refuses."""
        if event["event"] == "start" and self._has_start:
            return
        try:
            self._file.write(line(event))
            self._file.flush()
        except OSError as error:
            what_to_do = "snapshots are untouched: free some space and resume"
            raise RecordError(f"{self._path} cannot be written: {error.strerror}; {what_to_do}.") from None

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
            self._stream.write(printable_json("".join(map(line, events))))
            self._stream.flush()
        except BrokenPipeError:
            to_nowhere(self._stream)


class _Line(NamedTuple):
    """A line of a metrics.jsonl, with its end."""

    content: bytes
    event: Event | None  # None if the line cannot be used
    flaw: str  # why not


def read_events(path: Path) -> list[Event]:
    """The events of a metrics.jsonl that can be used. Raises OSError."""
    return read_record(path)[0]


def read_record(path: Path) -> tuple[list[Event], str | None]:
    """The events of a metrics.jsonl, and a sentence about the lines that had to be left out, if any. Raises OSError.

    A last line that a kill cut off is left out without a word.
    """
    events: list[Event] = []
    flaws: list[str] = []
    if not path.exists():
        return events, None
    try:
        for number, line in enumerate(_lines(path), 1):
            if line.event is not None:
                events.append(line.event)
            elif line.flaw:
                flaws.append(f"{path}: line {number:,} is left out: {line.flaw}")
    except FlawError as error:
        flaws.append(f"{path} is left out: {error}")
    if not flaws:
        return events, None
    return events, flaws[0] + (f", and {len(flaws) - 1:,} more lines." if len(flaws) > 1 else ".")


def _lines(path: Path) -> Iterator[_Line]:
    """The lines of a metrics.jsonl, which end at "\n" alone: a text may hold other line separators."""
    last = -1  # the last step event's
    with open_regular(path) as file:
        while content := file.readline(MOST_LINE_BYTES):
            if len(content) == MOST_LINE_BYTES:
                yield _Line(content, None, f"it is longer than {MOST_LINE_BYTES:,} bytes; so is all that follows")
                return
            try:
                event = from_json(content, allow_inf_nan=False)
            except ValueError as error:
                torn = not content.endswith(b"\n") or not content.strip()
                yield _Line(content, None, "" if torn else f"no JSON: {error}")
                continue
            flaw = event_flaw(event)
            if flaw is None and event["event"] == "step":
                flaw = f"step is {event['step']}, but an earlier line has {last}" if event["step"] <= last else None
                last = max(last, event["step"])
            yield _Line(content, event if flaw is None else None, flaw or "")


def _before(path: Path, resumed_step: int) -> bytes:
    """The lines of a record up to a step; those that cannot be read stay where they are."""
    kept, inside = [], True
    for line in _lines(path) if path.exists() else ():
        if line.event is not None:
            step = line.event.get("step") or 0
            inside = step <= resumed_step
            if line.event["event"] == "end" or (line.event["event"], step) == ("snapshot", resumed_step):
                continue
        if inside and (line.event is not None or line.flaw):
            kept.append(line.content if line.content.endswith(b"\n") else line.content + b"\n")
    return b"".join(kept)
