"""Processes of `sansgpu` as forks of one that has imported everything: a short command takes a second less than five.

What a test kills or signals, or whose environment acts when Python or torch starts, runs in a process of its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.forks import client

LONGEST_SECONDS = 240.0  # after which a command is killed


class ForkServer:
    """Runs command lines in forks of a process that starts with `environment`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._socket = folder, folder / "socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks.server", str(self._socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Random hashes would make a command differ from the same command run again.
            env={**environment, "PYTHONHASHSEED": "0"},
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(
        self, arguments: list[str], streams: list[int], environment: dict[str, str], folder: Path, limited: bool = False
    ) -> dict[str, Any]:
        """Runs `sansgpu ARGUMENTS` in `folder`; `streams` are the descriptors of stdin, stdout and stderr.

        Returns its exit code, whether it was killed for taking too long, its CPU time and its peak memory. If it is
        limited, as bad input must be, CPU time and memory have bounds.
        """
        return client.ask(str(self._socket), arguments, streams, environment, str(folder), limited)

    def finish(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
        """Runs `sansgpu ARGUMENTS` in this folder; returns its exit code, stdout and stderr."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            found = self.run(arguments, streams, environment, Path.cwd())
            assert not found["late"], arguments
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return found["code"], texts[0], texts[1]

    def command(self) -> Path:
        """Returns a folder with an executable `sansgpu` for scripts."""
        (self._folder / "bin").mkdir(exist_ok=True)
        script = self._folder / "bin/sansgpu"
        words = [sys.executable, "-S", "-E", str(Path(client.__file__)), str(self._socket)]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        return script.parent

    def close(self) -> None:
        """Stops the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
