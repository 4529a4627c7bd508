"""The step Take away: files for other programs, a server, and the Hugging Face Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate
from sansgpu.studio.pages import Handler, Studio, address, form_of, query_of
from sansgpu.studio.runs import finished_record, record_of, run_page
from sansgpu.studio.using import ModelServer, kind_of

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


_TYPES = {
    "q8_0": "8 bits, nearly exact", "q4_k": "4 bits, the smallest", "f16": "16 bits", "f32": "32 bits, exact",
    "int8": "8 bits, the smallest",
}  # fmt: skip


@dataclass(frozen=True)
class ExportForm:
    """A format of `sansgpu export`, with its types, the recommended one first."""

    name: str
    title: str
    words: str
    types: tuple[str, ...] = ()


_FORMS = {
    "text": (
        ExportForm("ollama", "Ollama", "files for the app Ollama, on any computer", ("q8_0", "q4_k", "f16")),
        ExportForm("gguf", "GGUF", "one file for llama.cpp, LM Studio and others", ("q8_0", "q4_k", "f16", "f32")),
        ExportForm("hf", "Hugging Face folder", "for transformers and vLLM"),
    ),
    "predict": (
        ExportForm("hf", "Hugging Face folder", "for transformers"),
        ExportForm("onnx", "ONNX", "for onnxruntime, also in browsers and phones", ("f32", "int8")),
    ),
    "search": (
        ExportForm("hf", "Sentence Transformers folder", "for sentence-transformers"),
        ExportForm("onnx", "ONNX", "for onnxruntime, also in browsers and phones", ("f32", "int8")),
    ),
    "": (ExportForm("hf", "Hugging Face folder", "for transformers"),),
}


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    pages = _Taking(studio)
    return [
        ("/take", "GET", pages.page),
        ("/take/export", "POST", pages.export),
        ("/take/exported", "GET", pages.exported),
        ("/take/file", "GET", pages.file),
        ("/take/serve", "POST", pages.serve),
        ("/take/stop", "POST", pages.stop),
        ("/take/server", "GET", pages.server),
    ]


def _files_at(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the name and size of a file, or of each file of a folder."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            yield file.name if file == path else str(file.relative_to(path)), file.stat().st_size


class _Taking:
    """The pages and forms of this step."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project

    async def page(self, request: Request) -> Response:
        run = query_of(request, "run")
        kind = kind_of(finished_record(self._project, run))
        return run_page(
            self._studio, request, "take", "take_step.html", run, kind=kind, forms=_FORMS[kind], types=_TYPES,
            server=ModelServer(self._project, run), serves=kind in ("text", "search"), **self._exported(run),
        )  # fmt: skip

    async def export(self, request: Request) -> Response:
        form = await form_of(request)
        run, name = self._project.run_path(form.get("run", "")), form.get("format", "")
        record = record_of(self._project, run)
        known = {one.name: one for one in _FORMS[kind_of(record)]} if record else {}
        if name not in known:
            raise ConfigError(f"there is no format {truncate(name)} for this model; choose one from the page.")
        arguments = ["export", run, "--format", name]
        if (given := form.get("type", "")) in known[name].types and given:
            arguments += ["--type", given]
        if hub := form.get("hub", ""):
            if not _HUB_NAME.fullmatch(hub):
                raise ConfigError(f"{truncate(hub)} is not a name on the Hub; write OWNER/NAME.")
            arguments += ["--push-to-hub", hub, *(["--private"] if form.get("private") else [])]
        self._project.commands.run(f"{run}/export", arguments, object())
        return self._studio.back(address("/take", run=run))

    async def exported(self, request: Request) -> Response:
        run = query_of(request, "run")
        return self._studio.page(request, "exported_part.html", run=run, **self._exported(run))

    def _exported(self, run: str) -> dict[str, Any]:
        """Returns the last export: its command, the path and files that it wrote, and the commands that use them."""
        command = self._project.commands.known(f"{run}/export")
        printed = command.output.splitlines() if command is not None and command.code == 0 else []
        path = Path(printed[0]) if printed else None
        lines = [line.replace(f"{path}/", "") for line in printed[1:]]  # to be used in the folder of the files
        lines += [f"ollama run {line.split()[2]}" for line in lines if line.startswith("ollama create ")]
        files = sorted(_files_at(self._project.root / path)) if path is not None else []
        return {"command": command, "path": path, "lines": lines, "files": files}

    async def file(self, request: Request) -> Response:
        """Sends a file that the last export of a run wrote."""
        run, name = query_of(request, "run"), query_of(request, "name")
        found = self._exported(run)
        if name not in dict(found["files"]):
            raise ConfigError(f"{run} has no exported file {truncate(name)}; export it first.")
        path = self._project.root / found["path"]
        file = (path if path.is_file() else path / name).resolve()
        if not file.is_relative_to(self._project.root):
            raise ConfigError(f"{found['path']} is outside of the project; copy it from there.")
        return FileResponse(file, media_type="application/octet-stream", filename=file.name)

    async def serve(self, request: Request) -> Response:
        run = await self._studio.run_in(request)
        ModelServer(self._project, run).start()
        return self._studio.back(address("/take", run=run))

    async def stop(self, request: Request) -> Response:
        run = await self._studio.run_in(request)
        ModelServer(self._project, run).stop()
        return self._studio.back(address("/take", run=run))

    async def server(self, request: Request) -> Response:
        run = query_of(request, "run")
        self._project.run_folder(run)
        return self._studio.page(request, "server_part.html", run=run, server=ModelServer(self._project, run))
