"""The live view: a full-screen display of a run, with keys that control it."""

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
from sansgpu.events.controls import Controls
from sansgpu.events.event import Event, data_messages
from sansgpu.events.jsonl import read_events
from sansgpu.views.live_screen import ScreenState, screen
from sansgpu.views.metric_curve import metric_points
from sansgpu.views.terminal import REDRAWS_PER_SECOND, Terminal

CPU_SHARE = 0.0012  # share of one core spent on drawing; it slows training by two to three times this share
MAX_REDRAW_SECONDS = 8.0
LAST_EVALUATIONS = 5  # printed when the view ends
_ENTER = b"\x1b[?1049h\x1b[?25l"  # alternate screen, cursor hidden
_LEAVE = b"\x1b[?1049l\x1b[?25h"  # normal screen, cursor visible


class LiveView:
    """A sink that draws the run on the full terminal while it trains, and prints a summary in plain lines after it."""

    def __init__(
        self, console: Console, controls: Controls, system: Callable[[], dict[str, Any] | None] = lambda: None
    ) -> None:
        """`system` returns the latest sample of resource usage."""
        self._console, self._controls, self._system = console, controls, system
        self._screen, self._events = ScreenState(), list[Event]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._hurry = threading.Event()  # draws as soon as REDRAWS_PER_SECOND allows
        self._keys = _Keys()
        self._live: Live | None = None
        self._sigtstp_handler: Any = None  # the previous SIGTSTP handler
        self._thread = threading.Thread(target=self._run, name="live view", daemon=True)

    def emit(self, event: Event) -> None:
        with self._lock:
            self._note(event)
        if event["event"] == "start":
            self._begin()
        elif event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Restores the terminal and prints a summary."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._controls.on_signal = None
        if self._live is not None:
            self._thread.join()
            self._live.stop()
            self._keys.close()
            if self._sigtstp_handler is not None:
                signal.signal(signal.SIGTSTP, self._sigtstp_handler)
        plain = Terminal(self._console)
        for event in self._summary():
            plain.emit({key: value for key, value in event.items() if key != "sample"})  # printed after a finished run

    def _acknowledge(self, message: str) -> None:
        """Shows immediately that a signal arrived."""
        with self._lock:
            self._screen.news.append((message, "cyan"))
        self._hurry.set()

    def leave_at_once(self) -> None:
        """Restores the terminal from a signal handler, without locks or drawing."""
        if self._live is not None and not self._ended.is_set():
            self._keys.close()
            with contextlib.suppress(OSError):
                os.write(sys.stdout.fileno(), _LEAVE)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Handles Ctrl-Z: restores the terminal for the shell, and reopens the view when the run is continued."""
        self.leave_at_once()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._keys.open()
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), _ENTER)

    def _begin(self) -> None:
        self._keys.open()
        self._screen.keys = self._keys.available
        self._controls.on_exit, self._controls.on_signal = self.leave_at_once, self._acknowledge
        self._live = Live(console=self._console, screen=True, auto_refresh=False, transient=True)
        self._live.start()
        if hasattr(signal, "SIGTSTP") and threading.current_thread() is threading.main_thread():
            self._sigtstp_handler = signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()

    def _note(self, event: Event) -> None:
        shown, name = self._screen, event["event"]
        if name == "start":
            shown.start, shown.stepped = event, time.monotonic()
            shown.news += [(message, "") for message in data_messages(event)]
            for earlier in _earlier_events(event):
                points = shown.training if earlier["event"] == "step" else shown.validation
                points += metric_points([earlier], shown.settings.main_metric)
        elif name == "step":
            shown.step, shown.stepped = event, time.monotonic()
            shown.training += metric_points([event], shown.settings.main_metric)
        elif name == "eval":
            shown.evaluation = event
            metric = shown.settings.main_metric
            shown.validation += metric_points([event], metric)
            shown.news.append((f"step {event['step']:,}: validation {metric.words(event)}", ""))
        elif name == "snapshot" and event["path"] != shown.start.get("resumed_from"):
            shown.snapshot = event["path"], time.monotonic()
            shown.news.append((f"step {event['step']:,}: snapshot {event['path']}", "dim"))
        elif name == "warning":
            at = f"step {event['step']:,}: " if "step" in event else ""
            shown.news.append((f"{at}{event['message']}", "yellow"))
        if name == "warning" and not shown.start:
            Terminal(self._console).emit(event)  # the view is not open yet
            return
        if name == "step":  # keep only the last one
            self._events = [other for other in self._events if other["event"] != "step"]
        self._events.append(event)

    def _summary(self) -> list[Event]:
        """Returns all warnings, and the last events of every other name."""
        left, kept = {"eval": LAST_EVALUATIONS, "snapshot": 1}, list[Event]()
        for event in reversed(self._events):
            name = event["event"]
            if left.get(name, 1):
                kept.append(event)
                if name in left:
                    left[name] -= 1
        return kept[::-1]

    def _run(self) -> None:
        """Draws as often as CPU_SHARE allows, and reads keys in between."""
        frame_seconds: deque[float] = deque(maxlen=5)  # a median, because the first frame also imports modules
        while not self._ended.is_set():
            began, spent = time.monotonic(), time.thread_time()
            self._draw()
            frame_seconds.append(time.thread_time() - spent)
            pause = min(MAX_REDRAW_SECONDS, max(1 / REDRAWS_PER_SECOND, median(frame_seconds) / CPU_SHARE))
            self._listen(began + 1 / REDRAWS_PER_SECOND, began + pause)

    def _listen(self, earliest: float, latest: float) -> None:
        """Waits until `latest`, or until `earliest` if there is something new to show at once."""
        while not self._ended.is_set() and (left := latest - time.monotonic()) > 0:
            key = self._keys.wait(min(left, 1 / REDRAWS_PER_SECOND))
            if key and self._press(key):
                self._hurry.set()
            if self._hurry.is_set():
                latest = earliest
        self._hurry.clear()

    def _press(self, key: str) -> bool:
        controls = self._controls
        actions = {"p": controls.pause, "s": controls.save, "e": controls.evaluate, "q": controls.stop}
        if (action := actions.get(key.lower())) is None:
            return False
        action()
        announced = {"s": "a snapshot", "e": "an evaluation", "q": "save and stop"}
        if key.lower() in announced:
            with self._lock:
                self._screen.news.append((f"after this step: {announced[key.lower()]}", "cyan"))
        return True

    def _draw(self) -> None:
        assert self._live is not None
        with self._lock:
            self._screen.system = self._system() or {}
            self._screen.state = (
                "ending" if self._controls.stopping else "paused" if self._controls.paused else "training"
            )
            size = self._console.size
            picture = screen(self._screen, size.width, size.height)
        self._live.update(picture, refresh=True)


def _earlier_events(start: Event) -> list[Event]:
    """Returns the step and eval events of earlier processes of a resumed run."""
    if not start["step"]:
        return []
    events = read_events(RunPaths(Path(start["output_dir"])).metrics)
    points = [event for event in events if event["event"] in ("step", "eval") and event["loss"] is not None]
    return [event for event in points if event["step"] <= start["step"]]


class _Keys:
    """Reads single keys if standard input is a terminal."""

    def __init__(self) -> None:
        self.available = False
        self._before: Any = None

    def open(self) -> None:
        """Disables line buffering and echo. Ctrl-C still sends a signal."""
        try:
            import termios  # not on Windows
            import tty

            is_foreground = sys.stdin.isatty() and os.getpgrp() == os.tcgetpgrp(sys.stdin.fileno())
        except (ImportError, OSError):  # a process started by a launcher may have no terminal
            return
        if not is_foreground:
            return
        self._before = termios.tcgetattr(sys.stdin)
        tty.setcbreak(sys.stdin)
        self.available = True

    def wait(self, seconds: float) -> str | None:
        """Returns a key that is pressed within `seconds`, or None."""
        if not self.available:
            time.sleep(seconds)
            return None
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "ignore") if ready else None

    def close(self) -> None:
        """Restores the terminal's settings."""
        if self.available:
            import termios

            self.available = False
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
