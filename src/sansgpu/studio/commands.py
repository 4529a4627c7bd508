"""Runs `sansgpu` commands: those whose results a page shows, and processes that go on if the studio ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.plain_data import InvalidDataError, open_regular, parse_json, read_regular
from sansgpu.files.atomic import write_text

PROGRAM = (sys.executable, "-P", "-m", "sansgpu")  # -P: modules in the project's folder are not imported
MAX_OUTPUT_BYTES = 64 << 20
MAX_LINES = 100  # messages of a command that are kept
MAX_LINE_BYTES = 1 << 20
LOG_BYTES = 32 << 10  # a page shows so much of the end of a process's output
WARNING, FAILURE = "warning: ", "sansgpu: "  # starts of lines on stderr


class Command:
    """A command that was started. Its result is known once it has ended."""

    def __init__(self, arguments: Sequence[str], fresh: object, done: Callable[[], None] | None) -> None:
        self.arguments, self.fresh, self._done = list(arguments), fresh, done
        self.code: int | None = None  # its exit code; None while it runs
        self.output = ""
        self.warnings: list[str] = []
        self.status = "waiting for another command"
        self.error = ""
        self._started = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, folder: Path, place: asyncio.Semaphore) -> None:
        """Starts the command in a folder once there is a place for it."""
        self._task = asyncio.get_running_loop().create_task(self._run(folder, place))

    @property
    def is_running(self) -> bool:
        return self.code is None

    @property
    def seconds(self) -> int:
        return int(time.monotonic() - self._started)

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object that the command printed; empty if it failed."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.output) if self.code == 0 else {}
            return found if isinstance(found, dict) else {}
        return {}

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.code = self.code if self.code is not None else -signal.SIGKILL

    async def _run(self, folder: Path, place: asyncio.Semaphore) -> None:
        async with place:
            self.status = "starting"
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *PROGRAM, *self.arguments, cwd=folder, stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
                    limit=MAX_LINE_BYTES,
                )  # fmt: skip
                assert self._process.stdout is not None
                assert self._process.stderr is not None
                await asyncio.gather(self._read(self._process.stdout), self._follow(self._process.stderr))
                code = await self._process.wait()
            except (OSError, ValueError) as error:  # it cannot be started, or prints an endless line
                self.error, code = f"the command failed: {error}", 1
            if code and not self.error:
                self.error = self.status or f"the command ended with exit code {code}"
            if code == 0 and self._done is not None:
                try:
                    self._done()
                except SansGPUError as error:
                    self.error, code = str(error), 1
            self.code = code

    async def _read(self, stream: asyncio.StreamReader) -> None:
        read = bytearray()
        while part := await stream.read(1 << 16):
            if len(read) + len(part) > MAX_OUTPUT_BYTES:
                raise ValueError(f"it printed more than {MAX_OUTPUT_BYTES >> 20} MB")
            read += part
        self.output = read.decode(errors="replace")

    async def _follow(self, stream: asyncio.StreamReader) -> None:
        """Reads the messages on stderr, of which the last one is the status."""
        async for content in stream:
            line = content.decode(errors="replace").strip()
            if line.startswith(WARNING):
                self.warnings = [*self.warnings, line.removeprefix(WARNING)][-MAX_LINES:]
            elif line.startswith(FAILURE):
                self.error = line.removeprefix(FAILURE)
            elif line:
                self.status = line


class Commands:
    """The commands whose results pages show. Each has a slot, in which a different command replaces it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._slots = folder, dict[str, Command]()
        self._place: asyncio.Semaphore | None = None

    def run(
        self, slot: str, arguments: Sequence[str], fresh: object = None, done: Callable[[], None] | None = None
    ) -> Command:
        """Returns the command in `slot`, and starts it unless it runs or has ended with the same arguments and `fresh`.

        `fresh` is any value that changes when the files that the command reads change. `done` is called when the
        command has succeeded.
        """
        known = self._slots.get(slot)
        if known is None or known.arguments != [*arguments] or known.fresh != fresh:
            self.forget(slot)
            self._place = self._place or asyncio.Semaphore(1)  # one at a time, because each uses all cores
            self._slots[slot] = known = Command(arguments, fresh, done)
            known.start(self._folder, self._place)
        return known

    def known(self, slot: str) -> Command | None:
        return self._slots.get(slot)

    def forget(self, slot: str) -> None:
        """Cancels the command in a slot, if there is one."""
        if (known := self._slots.pop(slot, None)) is not None:
            known.cancel()

    def forget_failed(self, way: str) -> None:
        """Lets the failed commands of a way, whose slots begin with its name, run again."""
        for slot, command in [*self._slots.items()]:
            if command.code and slot.startswith(f"{way}/"):
                self.forget(slot)

    def forget_running(self, slot: str) -> None:
        """Cancels the command in a slot if it still runs, because its result is not needed any more."""
        if (known := self._slots.get(slot)) is not None and known.is_running:
            self.forget(slot)

    def stop(self) -> None:
        for slot in [*self._slots]:
            self.forget(slot)


class Detached:
    """A process that goes on if the studio ends, by the file that was written when it was started.

    A run that was started in a terminal has no such file; its process is the one that holds the run's `lock`.
    """

    _children: list[subprocess.Popen[bytes]] = []  # noqa: RUF012  # polled, so that ended ones do not stay zombies

    def __init__(self, file: Path, lock: Path | None = None) -> None:
        self.file, self._lock = file, lock

    @classmethod
    def start(cls, arguments: Sequence[str], folder: Path, file: Path) -> None:
        """Starts a command whose output goes to a file. Raises OSError."""
        cls._children = [child for child in cls._children if child.poll() is None]
        log_file = file.with_suffix(".log")
        log_file.unlink(missing_ok=True)  # it may be a link
        with log_file.open("xb") as log:
            child = subprocess.Popen(
                [*PROGRAM, *arguments], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        cls._children.append(child)
        created = psutil.Process(child.pid).create_time()
        write_text(file, json.dumps({"pid": child.pid, "created": created, "command": [*arguments]}) + "\n")

    @property
    def log(self) -> str:
        """The end of what the process printed."""
        path = self.file.with_suffix(".log")
        if path.is_symlink():
            return ""
        with contextlib.suppress(OSError, InvalidDataError), open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            return file.read().decode(errors="replace")
        return ""

    @property
    def failure(self) -> str:
        """The message of a command that has failed, or ""."""
        lines = [line for line in self.log.splitlines() if line.startswith(FAILURE)]
        return lines[-1].removeprefix(FAILURE) if lines and not self.is_alive else ""

    @property
    def is_alive(self) -> bool:
        for child in type(self)._children:
            child.poll()
        return next(self._processes(), None) is not None

    def stop(self) -> None:
        """Asks the process to save and end. Raises ConfigError if it has ended."""
        process = next(self._processes(), None) or self._holder()
        if process is None:
            raise ConfigError("no process works on this any more; reload the page.")
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)

    @property
    def command(self) -> list[str]:
        """The arguments of the command that was started; empty if the file is missing or damaged."""
        found = self._known().get("command")
        return [*map(str, found)] if isinstance(found, list) else []

    def _known(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = parse_json(read_regular(self.file, 1 << 16))
            return found if isinstance(found, dict) else {}
        return {}

    def _processes(self) -> Iterator[psutil.Process]:
        """Yields the process that was started, if it lives."""
        known = self._known()
        with contextlib.suppress(ValueError, KeyError, TypeError, psutil.Error):
            process = psutil.Process(int(known["pid"]))
            if process.create_time() == known["created"] and process.status() != psutil.STATUS_ZOMBIE:
                yield process

    def _holder(self) -> psutil.Process | None:
        """Returns the process that has the run's lock open; of those with the same file, the one that started them."""
        if self._lock is None:
            return None
        lock, found = str(self._lock.resolve()), dict[int, psutil.Process]()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(opened.path == lock for opened in process.open_files()):
                    found[process.pid] = process
        with contextlib.suppress(psutil.Error):
            return next((process for process in found.values() if process.ppid() not in found), None)
        return None
