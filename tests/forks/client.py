"""Sends commands to the fork server. Imports little, so that scripts can use it as a fast `sansgpu`."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any


class Command:
    """Runs `python -m MODULE ARGUMENTS` in a fork of the server at `address`.

    `streams` are the file descriptors of stdin, stdout and stderr.
    """

    def __init__(
        self, address: str, arguments: list[str], streams: list[int], environment: dict[str, str], folder: str,
        module: str = "sansgpu", limited: bool = False,
    ) -> None:  # fmt: skip
        asked = {"module": module, "arguments": arguments, "environment": environment, "folder": folder}
        asked["limited"] = limited
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            socket.send_fds(connection, [b"."], streams)
            connection.sendall(json.dumps(asked).encode())
            connection.shutdown(socket.SHUT_WR)
            self._answers = connection.makefile("rb", buffering=0)
        self.pid = int(self._answers.readline())

    def ended(self, seconds: float = 0) -> bool:
        """Waits at most `seconds` and returns whether the command has ended."""
        return bool(select.select([self._answers], [], [], seconds)[0])

    def outcome(self) -> dict[str, Any]:
        """Waits until the command ends and returns its exit code and resource usage."""
        with self._answers:
            found: dict[str, Any] = json.loads(self._answers.read())
        return found


if __name__ == "__main__":
    command = Command(sys.argv[1], sys.argv[2:], [0, 1, 2], dict(os.environ), os.getcwd())
    for number in (signal.SIGINT, signal.SIGTERM):  # for scripts that stop a server
        signal.signal(number, lambda number, _: os.kill(command.pid, number))
    code = command.outcome()["code"]
    sys.exit(code if code >= 0 else 128 - code)
