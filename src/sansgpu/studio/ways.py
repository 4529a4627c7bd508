"""The steps before a run: purpose, data, model and time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.parse import normal_time
from sansgpu.config.paths import RUNS
from sansgpu.config.wording import counted, truncate
from sansgpu.data.preview.look import DataLook
from sansgpu.files.atomic import atomic_write, make_folder, write_failures_as
from sansgpu.jobs.init.answers import PURPOSES, parse_hours
from sansgpu.jobs.init.corpora import SHORT_NAMES
from sansgpu.jobs.runs import run_folders
from sansgpu.studio.commands import Command
from sansgpu.studio.model_choice import local_models, suggested_models
from sansgpu.studio.pages import Handler, Studio, form_of
from sansgpu.studio.project import MAX_UPLOAD_BYTES, Answers, as_argument, safe_name
from sansgpu.studio.remedies import config_with, fields_by_key
from sansgpu.views.data_look import look_parts

# Keys that the page of the time offers, if they act in the task.
OFFERED = (
    "training.num_epochs", "data.max_length", "model.max_seq_len", "model.adapter", "model.lora_rank",
    "training.learning_rate", "training.gradient_accumulation_steps", "data.validation_split",
)  # fmt: skip
_LOOK = TypeAdapter(DataLook)
MAX_WAYS = 50  # on the first page
MAX_WATCHED = 1000  # files of a dataset whose changes are seen


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    steps = _Ways(studio)
    way = "/way/{name}"
    return [
        ("/", "GET", steps.start),
        ("/ways", "POST", steps.begin),
        (f"{way}/purpose", "GET", steps.purpose),
        (f"{way}/purpose", "POST", steps.choose_purpose),
        (f"{way}/data", "GET", steps.data),
        (f"{way}/upload/{{file:path}}", "PUT", steps.upload),
        (f"{way}/remove", "POST", steps.remove),
        (f"{way}/source", "POST", steps.choose_source),
        (f"{way}/look", "GET", steps.look),
        (f"{way}/set", "POST", steps.set_key),
        (f"{way}/unset", "POST", steps.unset_key),
        (f"{way}/again", "POST", steps.again),
        (f"{way}/model", "GET", steps.model),
        (f"{way}/model", "POST", steps.choose_model),
        (f"{way}/fit", "GET", steps.fit),
        (f"{way}/time", "GET", steps.time),
        (f"{way}/time", "POST", steps.choose_time),
        (f"{way}/plan", "GET", steps.plan),
        (f"{way}/rewrite", "POST", steps.rewrite),
        (f"{way}/start", "POST", steps.start_run),
    ]


class _Ways:
    """The pages and forms of these steps."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project

    # Purpose

    async def start(self, request: Request) -> Response:
        project = self._project
        known = [(name, project.answers_or_problem(name), project.runs_of(name)) for name in project.ways()[:MAX_WAYS]]
        number = await asyncio.to_thread(lambda: sum(1 for _ in run_folders(project.root / RUNS)))
        return self._studio.page(
            request, "start.html", purposes=PURPOSES, ways=known, number_of_runs=number, current="purpose",
            steps=self._studio.steps("purpose", None, None),
        )  # fmt: skip

    async def begin(self, request: Request) -> Response:
        form = await form_of(request)
        task = form.get("task") or None
        if task is not None and task not in PURPOSES:
            raise ConfigError(f"there is no purpose {truncate(task)}; choose one from the page.")
        name = self._project.new_way(form.get("name") or _short_name(task), Answers(task, task_is_guessed=task is None))
        return self._studio.back(f"/way/{name}/data")

    async def purpose(self, request: Request) -> Response:
        return self._studio.way_page(request, "purpose", "purpose.html", purposes=PURPOSES)

    async def choose_purpose(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        self._change(name, task=_one_of(PURPOSES, form.get("task", "")), task_is_guessed=False, model=None)
        return self._studio.back(f"/way/{name}/data")

    # Data

    async def data(self, request: Request) -> Response:
        name = request.path_params["name"]
        folder = self._project.upload_folder(name)
        files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        files = [file for file in files if not file.startswith(".")]
        answers = self._project.answers(name)
        built_in = PURPOSES[answers.task].built_in if answers.task else None
        return self._studio.way_page(
            request, "data", "data_step.html", files=files, built_in=built_in, corpora=SHORT_NAMES,
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
        self._change(name, data=self._project.dataset(name))
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
        self._change(name, data=self._project.dataset(name))
        return self._studio.back(f"/way/{name}/data")

    async def choose_source(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        if not (data := form.get("data", "")):
            raise ConfigError("the name of the data is empty; drop a file, or write a path or a name on the Hub.")
        self._change(name, data=as_argument(data))
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
        arguments = [
            "data",
            answers.data,
            *(["--task", answers.task] if answers.task and not answers.task_is_guessed else []),
        ]
        if answers.model and self._project.has(answers.model):
            arguments += ["--model", answers.model]
        command = self._project.commands.run(
            f"{name}/look", [*arguments, *_set(answers.settings), "--json"], self._state_of(answers.data)
        )
        found = None
        if not command.is_running and command.code == 0:
            try:
                found = _LOOK.validate_python(command.result)
            except ValidationError:
                command.error = "the look at the data cannot be read; update sansgpu."
        if found is not None and found.task_is_guessed and found.task in PURPOSES and found.task != answers.task:
            self._change(name, task=found.task, task_is_guessed=True)
        parts = look_parts(found) if found is not None else {}
        return {"command": command, "found": found, **parts}

    def _state_of(self, data: str) -> Any:
        """Returns what changes when the files of a dataset change."""
        path = self._project.root / data
        try:
            files = [path, *islice(path.rglob("*"), MAX_WATCHED)] if path.is_dir() else [path]
            return [(str(one), one.stat().st_mtime_ns, one.stat().st_size) for one in files]
        except (OSError, ValueError):
            return None

    async def set_key(self, request: Request) -> Response:
        """Writes a key; an empty value removes it."""
        name, form = request.path_params["name"], await form_of(request)
        answers = _with_keys(self._project.answers(name), form)
        config_with(answers, answers.settings)  # raises ConfigError
        self._save(name, answers)
        return self._studio.back(_before(request, f"/way/{name}/data"))

    async def unset_key(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        self._save(name, self._project.answers(name).without_key(form.get("key", "")))
        return self._studio.back(_before(request, f"/way/{name}/data"))

    # Model

    async def model(self, request: Request) -> Response:
        answers = self._project.answers(request.path_params["name"])
        purpose = PURPOSES[_chosen_task(answers)]
        local = await asyncio.to_thread(local_models, self._project.root, purpose) if purpose.model else []
        return self._studio.way_page(
            request, "model", "model_step.html", purpose=purpose, local=local,
            suggested=suggested_models(answers.task, purpose), **self._fit_values(request.path_params["name"]),
        )  # fmt: skip

    async def choose_model(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        if not (model := form.get("other") or form.get("model", "")):
            raise ConfigError("no model is chosen; choose one, or write a folder, a GGUF file or a name on the Hub.")
        self._change(name, model=as_argument(model))
        return self._studio.back(f"/way/{name}/model")

    async def fit(self, request: Request) -> Response:
        name = request.path_params["name"]
        answers = self._project.answers(name)
        return self._studio.page(
            request, "fit_part.html", way=name, answers=answers, purpose=PURPOSES[_chosen_task(answers)],
            **self._fit_values(name),
        )  # fmt: skip

    def _fit_values(self, name: str) -> dict[str, Any]:
        """Returns the command that estimates what the model needs, or what can be trained from scratch."""
        answers = self._project.answers(name)
        available = f"{psutil.virtual_memory().available / 1e9:.0f}GB"
        if PURPOSES[_chosen_task(answers)].model is None:
            known = self._project.commands.known(f"{name}/fit")  # memory changes with each look
            arguments = known.arguments if known else ["plan", "--memory", available, "--json"]
        elif answers.model and answers.data:
            chosen = (
                f"task={answers.task}",
                f"model.name_or_path={answers.model}",
                f"data.dataset_name={answers.data}",
            )
            arguments = ["plan", *_set((*chosen, *answers.settings)), "--json"]
        else:
            return {"command": None}
        return {"command": self._project.commands.run(f"{name}/fit", arguments)}

    # Time

    async def time(self, request: Request) -> Response:
        name = request.path_params["name"]
        answers = self._project.answers(name)
        config = config_with(answers, answers.settings)
        fields = fields_by_key()
        offered = {key: fields[key] for key in OFFERED if config.acts(key)}
        chosen = dict(one.partition("=")[::2] for one in answers.settings)
        return self._studio.way_page(
            request, "time", "time_step.html", offered=offered, chosen=chosen, keys=fields, **self._plan_values(name)
        )

    async def choose_time(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        kind, time = form.get("kind", ""), ""
        if kind == "hours":
            time = form.get("hours", "") + form.get("unit", "")
            parse_hours(time)
        elif kind == "until":
            try:
                time = normal_time(form.get("until", ""))
            except ValueError as error:
                raise ConfigError(f"the time cannot be used: {error}.") from None
        answers = _with_keys(replace(self._project.answers(name), time=time), form)
        config_with(answers, answers.settings)  # raises ConfigError
        self._save(name, answers)
        return self._studio.back(f"/way/{name}/time")

    async def plan(self, request: Request) -> Response:
        name = request.path_params["name"]
        answers, values = self._project.answers(name), self._plan_values(name)
        return self._studio.page(
            request, "plan_part.html", way=name, answers=answers, is_part=True, yaml=self._studio.yaml(name, answers),
            **values,
        )  # fmt: skip

    def _plan_values(self, name: str) -> dict[str, Any]:
        """Returns the command that writes the configuration, and then the one that plans it."""
        answers, edited = self._project.answers(name), self._project.is_edited(name)
        _chosen_task(answers)
        if not answers.data:
            raise ConfigError("the data are not chosen yet; go back to the step Data.")
        commands, arguments = self._project.commands, answers.init_command(name)
        known = commands.known(f"{name}/write")
        if known is not None and ":" in answers.time:  # the hours until then shrink with each look
            arguments = _with_hours_of(arguments, known.arguments)
        writes: Command | None = None
        if not edited or (known is not None and known.is_running):
            fresh = self._state_of(answers.data), answers.settings, answers.time
            writes = commands.run(
                f"{name}/write", [*arguments, "--json"], fresh, lambda: self._project.note_written(name)
            )
        planned: Command | None = None
        if edited or (writes is not None and not writes.is_running and writes.code == 0):
            text = self._project.config_text(name)
            planned = commands.run(f"{name}/plan", ["plan", f"{name}.yaml", "--json"], text)
        allowed = 3600 * parse_hours(arguments[arguments.index("--hours") + 1]) if "--hours" in arguments else None
        return {"writes": writes, "planned": planned, "edited": edited, "init": arguments, "allowed": allowed}

    async def rewrite(self, request: Request) -> Response:
        """Replaces a configuration that was edited by hand; the old one is kept as NAME.old.yaml."""
        name = request.path_params["name"]
        self._project.answers(name)
        file = self._project.root / f"{name}.yaml"
        with write_failures_as(SansGPUError, file):
            file.replace(file.with_suffix(".old.yaml"))
        self._project.commands.forget(f"{name}/write")
        return self._studio.back(f"/way/{name}/time")

    async def start_run(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._project.answers(name)
        if not self._project.config_text(name):
            raise ConfigError(f"{name}.yaml is not written yet; wait until the plan is shown.")
        if active := next((run for run in self._project.runs_of(name) if self._project.process(run).is_alive), None):
            raise ConfigError(f"{active} is being trained already; stop it first.")
        run = self._project.new_run(name)
        self._project.start(run, ["train", f"{name}.yaml", "--output-dir", run, "--plain"])
        return self._studio.back(f"/run?run={run}")

    async def again(self, request: Request) -> Response:
        """Runs the failed commands of a way again."""
        name = request.path_params["name"]
        self._project.commands.forget_failed(name)
        return self._studio.back(_before(request, f"/way/{name}/data"))

    def _change(self, name: str, **changes: Any) -> None:
        self._save(name, replace(self._project.answers(name), **changes))

    def _save(self, name: str, answers: Answers) -> None:
        self._project.save(name, answers)
        self._project.commands.forget_failed(name)


def _short_name(task: str | None) -> str:
    """Returns a name for a way from its purpose, such as assistant."""
    return PURPOSES[task].title.lower().removeprefix("an ").removeprefix("a ") if task else "model"


def _with_keys(answers: Answers, form: Mapping[str, str]) -> Answers:
    """Returns the answers with the keys that a form sets; an empty value removes a key."""
    for key, value in form.items():
        if key == "task":
            answers = replace(answers, task=_one_of(PURPOSES, value), task_is_guessed=False)
        elif key == "setting":
            answers = answers.with_setting(value)
        elif key in fields_by_key():
            answers = answers.with_setting(f"{key}={value}") if value else answers.without_key(key)
    return answers


def _row_examples(task: str | None) -> list[str]:
    """Returns an example of each form of rows that a task reads, as JSON."""
    from sansgpu.data.forms.registry import FORMS
    from sansgpu.tasks.configuration import SCHEMA

    forms = FORMS[SCHEMA.tasks.tasks[task].rows].forms if task in SCHEMA.tasks.tasks else ()
    return [json.dumps(form.example, ensure_ascii=False) for form in forms]


def _set(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def _with_hours_of(arguments: list[str], known: list[str]) -> list[str]:
    """Returns arguments with the hours of a command that is otherwise the same, so that it is not run again."""
    place = arguments.index("--hours") + 1
    before = known[place : place + 1] if known[place - 1 : place] == ["--hours"] else []
    changed = [*arguments[:place], *(before or arguments[place : place + 1]), *arguments[place + 1 :]]
    return changed if changed == known[: len(changed)] else arguments


def _one_of(purposes: Mapping[str, Any], task: str) -> str:
    if task not in purposes:
        raise ConfigError(f"there is no purpose {truncate(task)}; choose one from the page.")
    return task


def _chosen_task(answers: Answers) -> str:
    if answers.task is None:
        raise ConfigError("the purpose is not chosen yet; go back to the step Purpose.")
    return answers.task


def _too_large(name: str) -> str:
    most = counted(MAX_UPLOAD_BYTES >> 30, "GB", "GB")
    return f"{truncate(name)} is larger than {most}; put it into a folder on this machine, and name the folder."


def _before(request: Request, otherwise: str) -> str:
    """Returns the page that sent a form, if it is a step of the same way."""
    path = request.headers.get("referer", "").partition("://")[2].partition("/")[2].partition("?")[0]
    way = "/".join(otherwise.split("/")[1:3])
    return f"/{path}" if path.startswith(f"{way}/") else otherwise
