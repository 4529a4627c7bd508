"""Signals that end a command. A thread acknowledges them at once, even while the main thread cannot.

Python runs signal handlers in the main thread between two bytecodes. They do not run while that thread computes in
native code or waits for a disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

STOPPING = "stopping after this step; press Ctrl-C again to stop now"
# Signals that act like SIGTERM: of a closed terminal, those that clusters send before a time limit (Slurm's --signal,
# submitit), and that of a limit of CPU time (ulimit -t). Without a handler, each would end the process at once.
LIKE_SIGTERM = tuple(
    getattr(signal, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signal, name)
)
_CPU_LIMIT = getattr(signal, "SIGXCPU", None)
REPORT_SECONDS = 2.0  # before the grace period ends: time to report that the step is abandoned, and to exit


class SignalWatch:
    """Calls `notice` with the number of every signal that has a Python handler, in a thread.

    Only the main thread may create and close it.
    """

    def __init__(self, notice: Callable[[int], None]) -> None:
        self._notice = notice
        self._read, self._write = os.pipe()
        if os.name == "posix":
            os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.close(self._write)  # ends the thread

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            for number in numbers:
                self._notice(number)
        os.close(self._read)


def _forget_watch() -> None:
    """Stops a forked process from writing its signals to the pipe of its parent."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watch)


def write_line(message: str) -> None:
    """Writes a line to stderr, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()


def as_sigterm(number: int, frame: FrameType | None) -> None:
    """A handler that makes a signal of LIKE_SIGTERM act like SIGTERM, whether that is handled or ends the process."""
    signal.raise_signal(signal.SIGTERM)


def meaning(number: int) -> int:
    """Returns SIGTERM for a signal that acts like it, and any other signal unchanged."""
    return signal.SIGTERM if number in LIKE_SIGTERM else number


def unhandled_signals() -> list[int]:
    """Returns the signals of LIKE_SIGTERM that the process neither ignores (nohup: SIGHUP) nor handles by itself."""
    return [number for number in LIKE_SIGTERM if signal.getsignal(number) in (signal.SIG_DFL, as_sigterm)]


class Interrupt:
    """Handles SIGINT, SIGTERM and those like it within its context: a second signal ends the process.

    `signal` is SIGINT or SIGTERM after the first signal, which is acknowledged, and None before. A process that is
    still in its context at the end of its grace period ends, too. Signals that the process ignores (nohup: SIGHUP) or
    has handlers of its own for, such as submitit's, stay as they are.
    """

    def __init__(
        self,
        grace_seconds: float | None,
        repeat_seconds: float = 0.0,
        say: Callable[[str], None] = write_line,
        acknowledge: Callable[[str], None] = write_line,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """`grace_seconds` is the time from the first signal to SIGKILL, or None if there is no limit.

        A signal within `repeat_seconds` of the first is ignored: a launcher forwards the signal that the terminal
        already sent to its processes. `say` writes a line, and `acknowledge` shows one while the run continues.
        `on_exit` is called before the process ends within its context.
        """
        self.signal: int | None = None
        self._grace_seconds, self._repeat_seconds = grace_seconds, repeat_seconds
        self._say, self._acknowledge, self._on_exit = say, acknowledge, on_exit
        self._received_at: float | None = None
        self._left = threading.Event()
        self._watch: SignalWatch | None = None
        self._numbers: tuple[int, ...] = ()
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # other threads cannot install handlers
            self._numbers = (signal.SIGINT, signal.SIGTERM, *unhandled_signals())
            self._watch = SignalWatch(self._notice)
            for number in self._numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if self._watch is not None:
            self._watch.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal returned it

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or meaning(number)

    def _notice(self, number: int) -> None:
        """Runs in the thread of the watch."""
        if number not in self._numbers:
            return
        if self._received_at is None:
            self.signal, self._received_at = self.signal or meaning(number), time.monotonic()
            _in_thread(self._acknowledge, STOPPING)
            if self._grace_seconds is not None:
                _in_thread(self._abandon, number, self._grace_seconds)
        elif number == _CPU_LIMIT:
            return  # the kernel repeats it every second, and kills the process at the hard limit
        elif time.monotonic() - self._received_at >= self._repeat_seconds:
            self._exit(number)

    def _abandon(self, number: int, grace_seconds: float) -> None:
        """Ends the process shortly before the end of its grace period, unless it has left its context."""
        if not self._left.wait(max(0.0, grace_seconds - REPORT_SECONDS)):
            self._exit(
                number,
                f"sansgpu: the step did not end within the grace period of {grace_seconds:g} s, so it was not saved; "
                "continue from the newest snapshot with --resume latest.",
            )

    def _exit(self, number: int, message: str | None = None) -> None:
        def leave() -> None:
            self._on_exit()
            if message:
                self._say(message)

        _in_thread(leave).join(REPORT_SECONDS / 2)
        os._exit(128 + meaning(number))


def _in_thread(call: Callable[..., None], *arguments: object) -> threading.Thread:
    """Runs a call that writes to a terminal in a thread, because a blocked terminal must not delay anything else."""
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread
