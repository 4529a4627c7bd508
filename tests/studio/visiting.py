"""Starts `sansgpu studio` in a process, and visits its pages as a browser without scripts does."""

from __future__ import annotations

import html
import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.processes import environment

SECONDS = 180  # limit of everything that a test waits for


@dataclass(frozen=True)
class Page:
    """An answer of the studio."""

    status: int
    body: str
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The visible words."""
        body = re.sub(r"<(script|style)\b.*?</\1>", " ", self.body, flags=re.DOTALL)
        return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


@dataclass
class Studio:
    """A running studio, and a visitor with a cookie."""

    process: subprocess.Popen[str]
    address: str  # it has the token
    folder: Path
    cookie: str = ""
    last: str = "/"  # the page that was visited last

    @property
    def host(self) -> str:
        return self.address.removeprefix("http://").partition("/")[0]

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Page:
        """Sends one request, with the headers that a browser sends."""
        usual = {"Host": self.host, "Cookie": self.cookie, "Referer": f"http://{self.host}{self.last}"}
        usual |= {} if method == "GET" else {"Origin": f"http://{self.host}"}
        sent = {name: value for name, value in {**usual, **headers}.items() if value}
        connection = http.client.HTTPConnection(self.host, timeout=SECONDS)
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        page = Page(answer.status, answer.read().decode(errors="replace"), dict(answer.getheaders()))
        connection.close()
        return page

    def open(self, path: str) -> Page:
        """Opens a page, and follows where it leads."""
        page = self.request("GET", path)
        while page.status == 303:
            path = page.headers["location"]
            page = self.request("GET", path)
        self.last = path
        return page

    def submit(self, path: str, **fields: str) -> Page:
        """Sends a form, and opens the page to which it leads."""
        page = self.request("POST", path, urlencode(fields).encode())
        return self.open(page.headers["location"]) if page.status == 303 else page

    def upload(self, way: str, name: str, content: bytes) -> Page:
        return self.request("PUT", f"/way/{way}/upload/{quote(name, safe='')}", content)

    def enter(self) -> Page:
        """Opens the printed address, which gives the cookie."""
        page = self.request("GET", "/" + self.address.partition(self.host)[2].removeprefix("/"))
        self.cookie = page.headers["set-cookie"].partition(";")[0]
        return self.open(page.headers["location"])

    def until(self, path: str, ready: Callable[[Page], bool]) -> Page:
        """Opens a page again and again until it is ready."""
        deadline = time.monotonic() + SECONDS
        while not ready(page := self.open(path)):
            assert time.monotonic() < deadline, page.text
            time.sleep(0.3)
        return page

    def shows(self, path: str, words: str) -> Page:
        """Opens a page until it shows these words. Fails as soon as it shows a problem instead."""

        def ready(page: Page) -> bool:
            assert words in page.text or 'class="problem"' not in page.body, page.text
            return words in page.text

        return self.until(path, ready)


@contextmanager
def studio(folder: Path, *arguments: str, **variables: str) -> Iterator[Studio]:
    """Starts the studio in a process of its own."""
    command = [sys.executable, "-m", "sansgpu", "studio", str(folder), "--port", "0", *arguments]
    around = environment(folder.parent / "cache") | {"HF_HUB_OFFLINE": "1"} | variables
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, process.communicate()
        yield Studio(process, found[0], folder)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
        _stop_processes(folder)


def _stop_processes(folder: Path) -> None:
    """Stops the runs and servers that a test has left."""
    for file in folder.glob(".studio/processes/*.json"):
        found = re.search(r'"pid": (\d+)', file.read_text(encoding="utf-8"))
        if found:
            try:
                os.kill(int(found[1]), signal.SIGKILL)
            except ProcessLookupError:
                continue
