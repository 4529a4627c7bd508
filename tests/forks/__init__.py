"""Runs `sansgpu` in forks of a process that has imported everything, so that a short command takes 1 s, not 5 s.

A command whose environment variables act when Python or torch starts needs a new process instead.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from tests.forks import client


class Fork:
    """A command that runs in a fork, with those methods of `subprocess.Popen` that tests use."""

    def __init__(self, address: Path, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  # `communicate` closes them
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), self._out.fileno(), self._err.fileno()]
            self._command = client.Command(str(address), arguments, streams, environment, str(Path.cwd()), module)
        self._encoding = environment.get("PYTHONIOENCODING", "utf-8")
        self.pid = self._command.pid
        self.returncode: int | None = None
        self._texts: tuple[str, str] | None = None  # stdout and stderr, once the command has ended

    def poll(self) -> int | None:
        """Returns the exit code, or None while the command runs; a negative code is the signal that ended it."""
        if self.returncode is None and self._command.ended():
            self.returncode = self._command.outcome()["code"]
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def first_line(self, timeout: float = 240) -> str:
        """Waits for the first line of stdout; returns an incomplete one if the command ends."""
        limit, text = time.monotonic() + timeout, b""
        while b"\n" not in text and self.poll() is None and time.monotonic() < limit:
            time.sleep(0.02)
            text = os.pread(self._out.fileno(), 1 << 16, 0)  # does not move the place at which the command writes
        return text.partition(b"\n")[0].decode(self._encoding)

    def communicate(self, timeout: float = 240) -> tuple[str, str]:
        """Waits until the command ends and returns its stdout and stderr."""
        if self.returncode is None and not self._command.ended(timeout):
            raise subprocess.TimeoutExpired("sansgpu", timeout)
        self.poll()
        if self._texts is None:
            self._texts = self._read(self._out), self._read(self._err)
        return self._texts

    def _read(self, file: IO[bytes]) -> str:
        with file:
            file.seek(0)
            return file.read().decode(self._encoding)


class ForkServer:
    """Runs commands in forks of a process that was started with `environment` and that all users of `folder` share.

    The server ends, and removes the folder, when all of them have ended.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._socket, users = folder, folder / "socket", folder / "users"
        with FileLock(folder / "lock"):
            if users.exists():
                self._user = os.open(users, os.O_WRONLY | os.O_NONBLOCK)  # closed when this process ends
                return
            os.mkfifo(users)
            stdin = os.open(users, os.O_RDONLY | os.O_NONBLOCK)
            self._user = os.open(users, os.O_WRONLY)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks.server", str(self._socket)],
                stdin=stdin,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],  # Python finds the package `tests` there
                # With random hashes, two runs of the same command could differ.
                env={**environment, "PYTHONHASHSEED": "0"},
            )
            os.close(stdin)
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == "ready\n"

    def start(self, arguments: list[str], environment: dict[str, str], module: str = "sansgpu") -> Fork:
        """Starts `python -m MODULE ARGUMENTS` in the current folder."""
        return Fork(self._socket, module, arguments, environment)

    def run_limited(
        self, arguments: list[str], streams: list[int], environment: dict[str, str], folder: Path
    ) -> dict[str, Any]:
        """Runs `sansgpu ARGUMENTS` in `folder` with limits on CPU time and memory, which bad input may exhaust.

        Returns its exit code, whether it was killed for taking too long, its CPU time and its peak memory.
        """
        return client.Command(str(self._socket), arguments, streams, environment, str(folder), limited=True).outcome()

    def command(self) -> Path:
        """Creates an executable `sansgpu` that scripts can run, and returns its folder."""
        (self._folder / "bin").mkdir(exist_ok=True)
        script = self._folder / "bin/sansgpu"
        words = [sys.executable, "-S", "-E", str(Path(client.__file__)), str(self._socket)]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return script.parent
