"""Reads and writes events as JSON lines: metrics.jsonl and --headless output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from pydantic_core import from_json

from sansgpu.config.plain_data import InvalidDataError, open_regular
from sansgpu.config.wording import counted
from sansgpu.events.escape import printable_json
from sansgpu.events.event import Event, RecordError
from sansgpu.events.schema import event_flaw
from sansgpu.files.atomic import atomic_write

MAX_LINE_BYTES = 4 << 20  # maximum size of an event, whose longest field is a sample


def line(event: Event) -> str:
    """Formats an event as one line of JSON."""
    return json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"


class MetricsFile:
    """A sink that writes metrics.jsonl. A resumed run has the same record as an uninterrupted one.

    A resumed run truncates the file to the events up to the snapshot's step. This drops the `end` event and the final
    snapshot event of an interrupted process; the training loop emits that snapshot event again if an uninterrupted run
    would have it. Later `start` events are not written.
    """

    def __init__(self, path: Path, resumed_step: int | None = None) -> None:
        kept = b"" if resumed_step is None else _lines_until(path, resumed_step)
        with atomic_write(path) as partial:
            partial.write_bytes(kept)
        self._has_start, self._path = bool(kept), path
        self._file = path.open("a", encoding="utf-8")

    def emit(self, event: Event) -> None:
        """Appends one line, which is synced to disk with the next snapshot. Raises RecordError if writing fails."""
        if event["event"] == "start" and self._has_start:
            return
        try:
            self._file.write(line(event))
            self._file.flush()
        except OSError as error:
            what_to_do = "snapshots are not affected; free disk space and resume"
            raise RecordError(f"{self._path} cannot be written: {error.strerror}; {what_to_do}.") from None

    def close(self) -> None:
        self._file.close()


class JsonLines:
    """A sink for --headless that writes every event to a stream, `start` first as in metrics.jsonl."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._early: list[Event] = []
        self._started = False

    def emit(self, event: Event) -> None:
        if event["event"] == "start" or self._started:
            self._started = True
            self._write(event, *self._early)
            self._early = []
        else:
            self._early.append(event)

    def close(self) -> None:
        """Writes the events that are buffered because the run never started. The stream stays open."""
        self._write(*self._early)
        self._early = []

    def _write(self, *events: Event) -> None:
        try:
            self._stream.write(printable_json("".join(map(line, events)), self._stream.encoding))
            self._stream.flush()
        except BrokenPipeError:
            redirect_to_null(self._stream)


class _Line(NamedTuple):
    """A line of metrics.jsonl, including its line end."""

    content: bytes
    event: Event | None  # None if the line is invalid
    flaw: str  # reason; empty for a torn last line


def read_events(path: Path) -> list[Event]:
    """Returns the valid events of a metrics.jsonl. Raises OSError."""
    return read_record(path)[0]


def read_record(path: Path) -> tuple[list[Event], str | None]:
    """Returns the valid events of a metrics.jsonl, and a sentence about invalid lines or None. Raises OSError.

    A last line that was cut off by a kill is ignored.
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
                flaws.append(f"{path}: line {number:,} is ignored: {line.flaw}")
    except InvalidDataError as error:
        flaws.append(f"{path} is ignored: {error}")
    if not flaws:
        return events, None
    return events, flaws[0] + (f", and {counted(len(flaws) - 1, 'more line')}." if len(flaws) > 1 else ".")


def _lines(path: Path) -> Iterator[_Line]:
    """Yields the lines of a metrics.jsonl. Only "\n" ends a line, because strings may contain other line separators."""
    last = -1  # step of the last step event
    with open_regular(path) as file:
        while content := file.readline(MAX_LINE_BYTES):
            if len(content) == MAX_LINE_BYTES:
                yield _Line(content, None, f"it exceeds {MAX_LINE_BYTES:,} bytes; the rest of the file is ignored")
                return
            try:
                event = from_json(content, allow_inf_nan=False)
            except ValueError as error:
                torn = not content.endswith(b"\n") or not content.strip()
                yield _Line(content, None, "" if torn else f"invalid JSON: {error}")
                continue
            flaw = event_flaw(event)
            if flaw is None and event["event"] == "step":
                flaw = f"step is {event['step']}, but an earlier line has {last}" if event["step"] <= last else None
                last = max(last, event["step"])
            yield _Line(content, event if flaw is None else None, flaw or "")


def _lines_until(path: Path, resumed_step: int) -> bytes:
    """Returns the lines of a record up to a step, including invalid lines."""
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


def redirect_to_null(stream: IO[str]) -> None:
    """Redirects a stream whose reader has exited to /dev/null, including its buffered text."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
