"""The step Data: files of the user, what is recognized in them, and keys that say how to read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import counted, truncate
from sansgpu.data.forms.registry import FORMS
from sansgpu.data.preview.look import DataLook
from sansgpu.files.atomic import atomic_write, make_folder, write_failures_as
from sansgpu.jobs.init.answers import PURPOSES
from sansgpu.studio.pages import Handler, Studio, form_of, page_before
from sansgpu.studio.project import MAX_UPLOAD_BYTES, as_argument, safe_name
from sansgpu.studio.remedies import config_with, fields_by_key
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.views.data_look import look_parts

_LOOK = TypeAdapter(DataLook)


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    step, way = _DataStep(studio), "/way/{name}"
    return [
        (f"{way}/data", "GET", step.data),
        (f"{way}/upload/{{file:path}}", "PUT", step.upload),
        (f"{way}/remove", "POST", step.remove),
        (f"{way}/source", "POST", step.choose_source),
        (f"{way}/look", "GET", step.look),
        (f"{way}/set", "POST", step.set_key),
        (f"{way}/unset", "POST", step.unset_key),
        (f"{way}/again", "POST", step.again),
    ]


class _DataStep:
    """The page and forms of this step."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project

    async def data(self, request: Request) -> Response:
        name = request.path_params["name"]
        folder = self._project.upload_folder(name)
        files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        files = [file for file in files if not file.startswith(".")]
        answers = self._project.answers(name)
        built_in = PURPOSES[answers.task].built_in if answers.task else None
        return self._studio.way_page(
            request, "data", "data_step.html", files=files, built_in=built_in,
            purpose=PURPOSES.get(answers.task or ""), keys=fields_by_key(), row_examples=_row_examples(answers.task),
            **self._look_values(name),
        )  # fmt: skip

    async def upload(self, request: Request) -> Response:
        """Receives a file into the folder of the way. A later file of the same name replaces it."""
        name, given = request.path_params["name"], Path(request.path_params["file"])
        file = self._file_for(name, given)
        if int(request.headers.get("content-length", 0)) > MAX_UPLOAD_BYTES:
            raise ConfigError(_too_large(given.name))
        shown = file.relative_to(self._project.root)
        with write_failures_as(SansGPUError, shown):
            make_folder(file.parent)
            with atomic_write(file) as partial, partial.open("wb") as written:
                size = 0
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_UPLOAD_BYTES:
                        raise ConfigError(_too_large(given.name))
                    written.write(part)
                written.flush()
        self._project.change(name, data=self._project.dataset(name))
        return Response(status_code=204)

    def _file_for(self, name: str, given: Path) -> Path:
        """Returns where an uploaded file is kept: under its own name, or a similar one that is still free."""
        suffixes = "".join(given.suffixes[-2:]) if given.suffix in (".gz", ".zst", ".bz2", ".xz") else given.suffix
        ending = f".{safe_name(suffixes)}" if safe_name(suffixes) else ""
        stem = safe_name(given.name.removesuffix(suffixes), r"\w") or "data"
        file = self._project.upload_folder(name) / f"{stem}{ending}"
        number = 2
        while file.name != given.name and file.exists():
            file, number = file.with_name(f"{stem}-{number}{ending}"), number + 1
        return file

    async def remove(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        folder = self._project.upload_folder(name)
        file = folder / Path(form.get("file", "")).name
        if file.parent == folder and file.is_file() and not file.is_symlink():
            file.unlink()
        self._project.change(name, data=self._project.dataset(name))
        return self._studio.back(f"/way/{name}/data")

    async def choose_source(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        if not (data := form.get("data", "")):
            raise ConfigError("the name of the data is empty; drop a file, or write a path or a name on the Hub.")
        self._project.change(name, data=as_argument(data))
        return self._studio.back(f"/way/{name}/data")

    async def look(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._studio.page(
            request, "look_part.html", way=name, answers=self._project.answers(name), **self._look_values(name)
        )

    def _look_values(self, name: str) -> dict[str, Any]:
        """Returns the command that looks at the data, and what it has found so far."""
        answers = self._project.answers(name)
        if not answers.data:
            return {"command": None, "found": None}
        arguments = ["data", answers.data]
        if answers.task and not answers.task_is_guessed:
            arguments += ["--task", answers.task]
        if answers.model and self._project.has(answers.model):
            arguments += ["--model", answers.model]
        command = self._project.commands.run(
            f"{name}/look", [*arguments, *answers.set_arguments, "--json"], self._project.state_of(answers.data)
        )
        found = None
        if not command.is_running and command.code == 0:
            try:
                found = _LOOK.validate_python(command.result)
            except ValidationError:
                command.error = "the look at the data cannot be read; update sansgpu."
        if found is not None and found.task_is_guessed and found.task in PURPOSES and found.task != answers.task:
            self._project.change(name, task=found.task, task_is_guessed=True)
        parts = look_parts(found) if found is not None else {}
        return {"command": command, "found": found, **parts}

    async def set_key(self, request: Request) -> Response:
        """Writes a key; an empty value removes it."""
        name, form = request.path_params["name"], await form_of(request)
        answers = self._project.answers(name).with_form(form)
        config_with(answers)  # raises ConfigError
        self._project.save(name, answers)
        return self._studio.back(page_before(request, f"/way/{name}/data"))

    async def unset_key(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        self._project.save(name, self._project.answers(name).without_key(form.get("key", "")))
        return self._studio.back(page_before(request, f"/way/{name}/data"))

    async def again(self, request: Request) -> Response:
        """Runs the failed commands of a way again."""
        name = request.path_params["name"]
        self._project.commands.forget_failed(name)
        return self._studio.back(page_before(request, f"/way/{name}/data"))


def _row_examples(task: str | None) -> list[str]:
    """Returns an example of each form of rows that a task reads, as JSON."""
    forms = FORMS[SCHEMA.tasks.tasks[task].rows].forms if task in SCHEMA.tasks.tasks else ()
    return [json.dumps(form.example, ensure_ascii=False) for form in forms]


def _too_large(name: str) -> str:
    most = counted(MAX_UPLOAD_BYTES >> 30, "GB", "GB")
    return f"{truncate(name)} is larger than {most}; put it into a folder on this machine, and name the folder."
