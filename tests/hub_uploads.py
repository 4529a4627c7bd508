"""A local server that takes models as the Hugging Face Hub does, and can refuse, fail or stall."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlparse

from tests.hub_server import HubHandler, serving_with

TOKEN = "hf_secret"


@dataclass
class Repository:
    """A repository of a model: its files after the last commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class UploadHub:
    """Repositories by name, and the large files that were uploaded, by SHA-256. Only `owner` may create some."""

    owner: str = "me"
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    fails_at: str = ""  # part of a path whose requests are answered with status 500
    stalls: bool = False  # requests that upload a large file are not answered
    stalled: threading.Event = field(default_factory=threading.Event)


class _UploadHandler(HubHandler):
    hub: UploadHub

    def do_HEAD(self) -> None:  # noqa: N802  http.server calls it
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", unquote(urlparse(self.path).path))
        if found and found[2] not in self.hub.repositories[found[1]].files:
            self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
        else:
            self._send(b"", 200, {"ETag": '"1"', "X-Repo-Commit": "a" * 40})

    def do_GET(self) -> None:  # noqa: N802  http.server calls it
        name = urlparse(self.path).path.removeprefix("/api/models/")
        found = self.hub.repositories.get(name)
        facts = {"_id": "1", "id": name, "sha": "a" * 40, "private": False, "tags": [], "downloads": 0, "likes": 0}
        self._answer(facts) if found else self._answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:  # noqa: N802  http.server calls it
        if self.hub.stalls:
            self.hub.stalled.set()
            threading.Event().wait(60)
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if self._fails():
            return
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(b"")

    def do_POST(self) -> None:  # noqa: N802  http.server calls it
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlparse(self.path).path)
        if self._fails():
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": [{"message": "empty or missing license"}]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            self._answer({"files": [_upload_mode(file) for file in json.loads(body)["files"]]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer({"transfer": "basic", "objects": [self._place(item) for item in json.loads(body)["objects"]]})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": "not found"}, 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if wanted["organization"] != self.hub.owner:
            self._answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        elif name in self.hub.repositories:
            self._answer({"error": "exists", "url": self._address(name)}, 409)
        else:
            self.hub.repositories[name] = Repository(wanted.get("visibility") == "private")
            self._answer({"url": self._address(name)})

    def _place(self, item: dict[str, Any]) -> dict[str, Any]:
        if item["oid"] in self.hub.objects:
            return item
        return {**item, "actions": {"upload": {"href": f"{self._address('large')}/{item['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
        self._answer({"commitUrl": f"{self._address(name)}/commit/{'b' * 40}", "commitOid": "b" * 40})

    def _fails(self) -> bool:
        fails = bool(self.hub.fails_at) and self.hub.fails_at in self.path
        if fails:
            self._answer({"error": "the disk is full"}, 500)
        return fails

    def _address(self, name: str) -> str:
        return f"http://{self.headers['Host']}/{name}"

    def _answer(self, value: dict[str, Any], code: int = 200) -> None:
        headers = {"Content-Type": "application/json", **({"X-Error-Message": value["error"]} if code >= 400 else {})}
        self._send(json.dumps(value).encode(), code, headers)


def _upload_mode(file: dict[str, Any]) -> dict[str, Any]:
    """Chooses large file storage for weights, as the Hub does by the names of files."""
    is_large = file["path"].endswith((".safetensors", ".gguf", ".onnx"))
    return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


@contextmanager
def serving_uploads(hub: UploadHub) -> Iterator[str]:
    """Serves a Hub and yields its address."""
    with serving_with(type("Handler", (_UploadHandler,), {"hub": hub})) as address:
        yield address
