"""The live view: a screen that follows the run, and keys that steer it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from sansgpu.config import RunPaths
from sansgpu.watch.controls import Controls
from sansgpu.watch.events import Event
from sansgpu.watch.jsonl import read_events
from sansgpu.watch.live_screen import Point, Shown, screen
from sansgpu.watch.results import evaluation_words
from sansgpu.watch.terminal import REDRAWS_PER_SECOND, Terminal

SHARE = 0.0012  # of one core's time, that drawing may take: a step waits two or three times as long for it
LONGEST_PAUSE = 8.0  # seconds without a new picture
LAST_EVALUATIONS = 5  # that stay in the terminal when the view is gone
_ENTER = b"\x1b[?1049h\x1b[?25l"  # the other screen, without a cursor
_LEAVE = b"\x1b[?1049l\x1b[?25h"  # the normal screen, with its cursor


class LiveView:
    """A sink that fills the terminal while the run goes on, and leaves a summary in plain lines."""

    def __init__(
        self, console: Console, controls: Controls, system: Callable[[], dict[str, Any] | None] = lambda: None
    ) -> None:
        """`system` tells the last sample of the machine."""
        self._console, self._controls, self._system = console, controls, system
        self._shown, self._kept = Shown(), list[Event]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._keys = _Keys()
        self._live: Live | None = None
        self._stopped: Any = None  # what Ctrl-Z did before
        self._thread = threading.Thread(target=self._run, name="live view", daemon=True)

    def emit(self, event: Event) -> None:
        """Note one event; the screen follows."""
        with self._lock:
            self._note(event)
        if event["event"] == "start":
            self._begin()
        elif event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Give the terminal back, with what is worth keeping in it."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._live is not None:
            self._thread.join()
            self._live.stop()
            self._keys.close()
            if self._stopped is not None:
                signal.signal(signal.SIGTSTP, self._stopped)
        plain = Terminal(self._console)
        for event in self._worth_keeping():
            plain.emit(event)

    def leave_at_once(self) -> None:
        """Give the terminal back from a signal handler: no lock is taken, nothing is drawn."""
        if self._live is not None and not self._ended.is_set():
            self._keys.close()
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), _LEAVE)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal, and what is continued takes it again."""
        self.leave_at_once()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._keys.open()
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), _ENTER)

    def _begin(self) -> None:
        self._keys.open()
        self._shown.keys = self._keys.there
        self._controls.leaving = self.leave_at_once
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._live.start()
        if hasattr(signal, "SIGTSTP") and threading.current_thread() is threading.main_thread():
            self._stopped = signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()

    def _note(self, event: Event) -> None:
        shown, kind = self._shown, event["event"]
        if kind == "start":
            shown.start, shown.stepped = event, time.monotonic()
            for earlier in _earlier(event):
                points = shown.training if earlier["event"] == "step" else shown.validation
                points += _point(earlier)
        elif kind == "step":
            shown.step, shown.stepped = event, time.monotonic()
            shown.training += _point(event)
        elif kind == "eval":
            shown.evaluation = event
            shown.validation += _point(event)
            shown.news.append((f"step {event['step']:,}: validation {' '.join(evaluation_words(event)[0])}", ""))
        elif kind == "snapshot":
            shown.snapshot = event["path"], time.monotonic()
            shown.news.append((f"step {event['step']:,}: snapshot {event['path']}", "dim"))
        elif kind == "warning":
            at = f"step {event['step']:,}: " if "step" in event else ""
            shown.news.append((f"{at}{event['message']}", "yellow"))
        if kind == "warning" and not shown.start:
            Terminal(self._console).emit(event)  # there is no view yet
            return
        if kind == "step":  # of many the last
            self._kept = [kept for kept in self._kept if kept["event"] != "step"]
        self._kept.append(event)

    def _worth_keeping(self) -> list[Event]:
        """All warnings, and of what there are many the last."""
        left, kept = {"eval": LAST_EVALUATIONS, "snapshot": 1}, list[Event]()
        for event in reversed(self._kept):
            kind = event["event"]
            if left.get(kind, 1):
                kept.append(event)
                if kind in left:
                    left[kind] -= 1
        return kept[::-1]

    def _run(self) -> None:
        """Draw as often as it may, and listen to the keys meanwhile."""
        costs: deque[float] = deque(maxlen=5)  # the last frames'; the first of all loads much
        while not self._ended.is_set():
            began, spent = time.monotonic(), time.thread_time()
            self._draw()
            costs.append(time.thread_time() - spent)
            pause = min(LONGEST_PAUSE, max(1 / REDRAWS_PER_SECOND, median(costs) / SHARE))
            self._listen(began + 1 / REDRAWS_PER_SECOND, began + pause)

    def _listen(self, earliest: float, latest: float) -> None:
        """Wait until it is time to draw: a key is answered at once, all else may wait."""
        while not self._ended.is_set() and (left := latest - time.monotonic()) > 0:
            key = self._keys.wait(min(left, 1 / REDRAWS_PER_SECOND))
            if key and self._press(key):
                latest = earliest

    def _press(self, key: str) -> bool:
        controls = self._controls
        wishes = {"p": controls.pause, "s": controls.save, "e": controls.evaluate, "q": controls.stop}
        if (wish := wishes.get(key.lower())) is None:
            return False
        wish()
        said = {"s": "a snapshot will be written", "e": "it will be evaluated", "q": "it will be saved, and end"}
        if key.lower() in said:
            with self._lock:
                self._shown.news.append((f"after this step {said[key.lower()]}", "cyan"))
        return True

    def _draw(self) -> None:
        assert self._live is not None
        with self._lock:
            self._shown.system = self._system() or {}
            self._shown.state = (
                "ending" if self._controls.stopping else "paused" if self._controls.paused else "training"
            )
            size = self._console.size
            picture = screen(self._shown, size.width, size.height)
        self._live.update(picture, refresh=True)


def _earlier(start: Event) -> list[Event]:
    """What the run's earlier processes have told, where it goes on."""
    if not start["step"]:
        return []
    events = read_events(RunPaths(Path(start["output_dir"])).metrics)
    points = [event for event in events if event["event"] in ("step", "eval") and event["loss"] is not None]
    return [event for event in points if event["step"] <= start["step"]]


def _point(event: Event) -> list[Point]:
    """The event's point of a curve; none if its loss was not finite."""
    return [] if event["loss"] is None else [(event["step"], event["loss"])]


class _Keys:
    """Single keys from the terminal, where standard input is one."""

    def __init__(self) -> None:
        self.there = False
        self._before: Any = None

    def open(self) -> None:
        """Have keys come one by one, unseen; Ctrl-C stays what it is."""
        try:
            import termios  # not on Windows
            import tty

            mine = sys.stdin.isatty() and os.getpgrp() == os.tcgetpgrp(sys.stdin.fileno())
        except (ImportError, OSError):  # a launcher's process has no terminal of its own
            return
        if not mine:
            return
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self.there = True

    def wait(self, seconds: float) -> str | None:
        """A key that comes within so many seconds."""
        if not self.there:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore") if ready else None

    def close(self) -> None:
        """As it was."""
        if self.there:
            import termios

            self.there = False
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
