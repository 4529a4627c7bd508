"""A local server that answers like the Hugging Face Hub for one repository, and can fail, cut answers off or stall."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlparse

import pytest

Fault = Literal["fail", "gone", "cut", "stall", None]
STALL_SECONDS = 2.0
CONVERTED, CONVERTED_REVISION = "refs/convert/parquet", "b" * 40


def _no_fault(_: int) -> Fault:
    return None


@dataclass
class Hub:
    """A dataset or model: the files of `folder`, at one revision."""

    name: str
    folder: Path
    revision: str = "a" * 40
    kind: Literal["datasets", "models"] = "datasets"
    fault: Callable[[int], Fault] = _no_fault  # returns what goes wrong with a download, given its number from 1
    rejects_tokens: bool = False  # as the Hub does with invalid ones
    converted: Path | None = None  # files of the branch refs/convert/parquet
    waits: list[dict[str, str]] = field(default_factory=list)  # headers of the answers 429 to the next requests
    status: int | None = None  # status of all responses, except to the request that checks the Hub is reachable
    downloads: list[str] = field(default_factory=list)  # the file and range of each download of data
    requests: int = 0
    sent: int = 0  # bytes of data

    def files(self) -> dict[str, Path]:
        return {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}

    def entries(self, below: str = "") -> list[dict[str, Any]]:
        """Returns the files and folders directly in a folder, as the Hub describes them."""
        start = f"{below}/" if below else ""
        inside = {path.removeprefix(start): file for path, file in self.files().items() if path.startswith(start)}
        folders = sorted({path.split("/")[0] for path in inside if "/" in path})
        found = [{"type": "directory", "path": start + name, "oid": "0" * 40, "size": 0} for name in folders]
        return found + [_file_entry(start + path, file) for path, file in inside.items() if "/" not in path]

    def of_paths(self, paths: list[str]) -> list[dict[str, Any]]:
        files = self.files()
        return [_file_entry(path, files[path]) for path in paths if path in files]

    def facts(self) -> dict[str, Any]:
        shared = {
            "_id": "1",
            "id": self.name,
            "sha": self.revision,
            "private": False,
            "gated": False,
            "disabled": False,
        }
        dates = dict.fromkeys(("lastModified", "createdAt"), "2026-01-01T00:00:00.000Z")
        siblings = [{"rfilename": path} for path in self.files()]
        return {**shared, **dates, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}


def _file_entry(path: str, file: Path) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": file.stat().st_size, "oid": _digest(file.read_bytes())}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests without keeping connections open."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, body: bytes, code: int = 200, headers: dict[str, str] | None = None, is_cut: bool = False) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), "Connection": "close", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)


class _RepositoryHandler(HubHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _respond(self, body: bytes = b"") -> None:
        hub, path = self.hub, unquote(urlparse(self.path).path)
        hub.requests += 1
        if path != "/" and hub.waits:
            self._send(b'{"error": "rate limit"}', 429, hub.waits.pop(0))
            return
        if CONVERTED in path or CONVERTED_REVISION in path:
            if hub.converted is None:
                self._send(b'{"error": "no branch"}', 404, {"X-Error-Code": "RevisionNotFound"})
                return
            hub, path = (
                replace(hub, folder=hub.converted, revision=CONVERTED_REVISION),
                path.replace(CONVERTED, "converted"),
            )
        api = f"/api/{hub.kind}/{hub.name}"
        resolve = f"{'/datasets' if hub.kind == 'datasets' else ''}/{hub.name}/resolve/"
        if path == "/":
            self._send(b"{}")
        elif hub.status is not None:
            self._send(b'{"error": "busy"}', hub.status)
        elif hub.rejects_tokens and "Authorization" in self.headers:
            message = "Invalid credentials in Authorization header"
            self._send(json.dumps({"error": message}).encode(), 401, {"X-Error-Message": message})
        elif path == api or path.startswith(f"{api}/revision/"):
            self._send(json.dumps(hub.facts()).encode())
        elif found := re.fullmatch(rf"{re.escape(api)}/tree/[^/]+/?(.*)", path):
            entries = hub.entries(found[1].rstrip("/"))
            if entries:
                self._send(json.dumps(entries).encode())
            else:
                self._send(b'{"error": "not found"}', 404, {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"{api}/paths-info/"):
            is_json = "json" in self.headers.get("Content-Type", "")
            self._send(json.dumps(hub.of_paths((json.loads if is_json else parse_qs)(body.decode())["paths"])).encode())
        elif path.startswith(resolve) and (file := path.removeprefix(resolve).partition("/")[2]) in hub.files():
            self._send_file(file, hub.files()[file].read_bytes())
        else:
            self._send(b'{"error": "not found"}', 404, {"X-Error-Code": "EntryNotFound"})

    def _send_file(self, name: str, content: bytes) -> None:
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.hub.revision, "Accept-Ranges": "bytes"}
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None or self.command == "HEAD":
            self._send(content, 200, headers)
            return
        start, stop = int(found[1]), min(int(found[2] or len(content)), len(content) - 1) + 1
        self.hub.downloads.append(f"{name} {start}-{stop}")
        fault = self.hub.fault(len(self.hub.downloads))
        if fault in ("fail", "gone"):
            self._send(b"", 503 if fault == "fail" else 404)
            return
        if fault == "stall":
            time.sleep(STALL_SECONDS)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(content[start:stop], 206, headers, is_cut=fault is not None)
        self.hub.sent += stop - start


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serves a dataset or model and yields the server's address."""
    with serving_with(type("Handler", (_RepositoryHandler,), {"hub": hub})) as address:
        yield address


@contextmanager
def serving_with(handler: type[HubHandler]) -> Iterator[str]:
    """Starts a server and yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that gave up
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def connect(monkeypatch: pytest.MonkeyPatch, address: str, home: Path) -> None:
    """Makes this process and those that it starts use a server as the Hub."""
    monkeypatch.setenv("HF_ENDPOINT", address)  # for new processes
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", address)
