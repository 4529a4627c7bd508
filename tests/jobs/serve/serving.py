"""Starts `sansgpu serve` in a fork or in a new process, and clients for it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from tests.forks import Fork
from tests.processes import Process, environment, fork_server
from tests.tasks.folders import model_folder

SECONDS = 120  # limit of everything that a test waits for
CONTEXT = 65536  # tokens: generating a text that fills it takes more than a minute
ENDLESS: dict[str, Any] = {"temperature": 0, "prompt": "red blue"}


def target() -> Path:
    """Returns the tiny chat model that most servers serve."""
    return model_folder("qwen2", max_position_embeddings=CONTEXT)


@dataclass
class Server:
    """A running server."""

    process: Process
    url: str
    line: str  # the line that the server printed at its start
    folder: Path  # the model's folder

    def client(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        """Sends a request without the client's checks; returns the status and the answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=SECONDS)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Sends a signal; returns the exit code and stderr."""
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, error


@contextmanager
def served(target: Path, cache: Path, *options: str, before: str = "", **variables: str) -> Iterator[Server]:
    """Serves a model on a free port of this machine: in a fork, or in a new process after the Python code `before`."""
    arguments = ["serve", str(target), "--port", "0", *options]
    surroundings = {**environment(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    surroundings["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])
    )
    process = _start_apart(before, arguments, surroundings) if before else fork_server().start(arguments, surroundings)
    try:
        line = process.first_line() if isinstance(process, Fork) else process.stdout.readline()  # type: ignore[union-attr]
        found = re.search(r"http://\S+", line)
        assert found, process.communicate()[1]
        yield Server(process, found[0], line, target)
    finally:
        process.kill()
        process.communicate()


def _start_apart(before: str, arguments: list[str], surroundings: dict[str, str]) -> subprocess.Popen[str]:
    code = f"{before}\nimport sys\nfrom sansgpu.cli import run\nsys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=surroundings)
