"""The steps Purpose, Model and Time, before a run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import psutil
from starlette.requests import Request
from starlette.responses import Response

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.parse import normal_time
from sansgpu.config.paths import RUNS
from sansgpu.files.atomic import write_failures_as
from sansgpu.jobs.init.answers import PURPOSES, parse_hours
from sansgpu.jobs.runs import run_folders
from sansgpu.studio.commands import Command
from sansgpu.studio.model_choice import local_models, suggested_models
from sansgpu.studio.pages import Handler, Studio, form_of
from sansgpu.studio.project import Choices, as_argument, known_task, numbered
from sansgpu.studio.remedies import config_with, fields_by_key

# Keys that the page of the time offers, if they act in the task.
OFFERED = (
    "training.num_epochs", "data.max_length", "model.max_seq_len", "model.adapter", "model.lora_rank",
    "training.learning_rate", "training.gradient_accumulation_steps", "data.validation_split",
)  # fmt: skip
MAX_WAYS = 50  # on the first page


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    steps = _Ways(studio)
    way = "/way/{name}"
    return [
        ("/", "GET", steps.start),
        ("/ways", "POST", steps.begin),
        (f"{way}/purpose", "GET", steps.purpose),
        (f"{way}/purpose", "POST", steps.choose_purpose),
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
        if task is not None:
            known_task(task)
        name = self._project.new_way(form.get("name") or _short_name(task), Choices(task, task_is_guessed=task is None))
        return self._studio.back(f"/way/{name}/data")

    async def purpose(self, request: Request) -> Response:
        return self._studio.way_page(request, "purpose", "purpose.html", purposes=PURPOSES)

    async def choose_purpose(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        self._project.change(name, task=known_task(form.get("task", "")), task_is_guessed=False, model=None)
        return self._studio.back(f"/way/{name}/data")

    # Model

    async def model(self, request: Request) -> Response:
        answers = self._project.answers(request.path_params["name"])
        purpose = PURPOSES[_chosen_task(answers)]
        local = await asyncio.to_thread(local_models, self._project.root, purpose) if purpose.model else []
        suggested = suggested_models(purpose)
        return self._studio.way_page(
            request, "model", "model_step.html", purpose=purpose, local=local, suggested=suggested,
            recommended=next((one.name for one in [*local, *suggested] if one.is_recommended), None),
            **self._fit_values(request.path_params["name"]),
        )  # fmt: skip

    async def choose_model(self, request: Request) -> Response:
        name, form = request.path_params["name"], await form_of(request)
        if not (model := form.get("other") or form.get("model", "")):
            raise ConfigError("no model is chosen; choose one, or write a folder, a GGUF file or a name on the Hub.")
        self._project.change(name, model=as_argument(model))
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
        purpose = PURPOSES[_chosen_task(answers)]
        available = f"{psutil.virtual_memory().available / 1e9:.0f}GB"
        if purpose.model is None:
            known = self._project.commands.known(f"{name}/fit")  # memory changes with each look
            arguments = known.arguments if known else ["plan", "--memory", available, "--json"]
        elif answers.model and answers.data:
            chosen = (
                f"task={answers.task}",
                f"model.name_or_path={answers.model}",
                f"data.dataset_name={answers.data}",
                # `sansgpu init` configures this adapter for decoders.
                *(["model.adapter=lora"] if purpose.is_decoder else []),
            )
            arguments = ["plan", *replace(answers, settings=(*chosen, *answers.settings)).set_arguments, "--json"]
        else:
            return {"command": None}
        return {"command": self._project.commands.run(f"{name}/fit", arguments)}

    # Time

    async def time(self, request: Request) -> Response:
        name = request.path_params["name"]
        answers = self._project.answers(name)
        config = config_with(answers)
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
        answers = replace(self._project.answers(name), time=time).with_form(form)
        config_with(answers)  # raises ConfigError
        self._project.save(name, answers)
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
            fresh = self._project.state_of(answers.data), answers.settings, answers.time
            writes = commands.run(
                f"{name}/write", [*arguments, "--json"], fresh, lambda: self._project.note_written(name)
            )
        planned: Command | None = None
        commands.forget_running(f"{name}/fit")
        if writes is not None and writes.is_running:
            commands.forget_running(f"{name}/plan")  # it plans the configuration that is being replaced
        if edited or (writes is not None and not writes.is_running and writes.code == 0):
            text = self._project.config_text(name)
            planned = commands.run(f"{name}/plan", ["plan", f"{name}.yaml", "--json"], text)
        allowed = 3600 * parse_hours(arguments[arguments.index("--hours") + 1]) if "--hours" in arguments else None
        return {"writes": writes, "planned": planned, "edited": edited, "init": arguments, "allowed": allowed}

    async def rewrite(self, request: Request) -> Response:
        """Makes place for a new configuration; the one that was edited by hand is kept as NAME.old.yaml or .old-2."""
        name = request.path_params["name"]
        self._project.answers(name)
        file = self._project.root / f"{name}.yaml"
        with write_failures_as(SansGPUError, file):
            others = (self._project.root / f"{one}.yaml" for one in numbered(f"{name}.old"))
            file.rename(next(other for other in others if not other.exists()))
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


def _short_name(task: str | None) -> str:
    """Returns a name for a way from its purpose, such as assistant."""
    return PURPOSES[task].title.lower().removeprefix("an ").removeprefix("a ") if task else "model"


def _with_hours_of(arguments: list[str], known: list[str]) -> list[str]:
    """Returns arguments with the hours of a command that is otherwise the same, so that it is not run again."""
    place = arguments.index("--hours") + 1
    before = known[place : place + 1] if known[place - 1 : place] == ["--hours"] else []
    changed = [*arguments[:place], *(before or arguments[place : place + 1]), *arguments[place + 1 :]]
    return changed if changed == known[: len(changed)] else arguments


def _chosen_task(answers: Choices) -> str:
    if answers.task is None:
        raise ConfigError("the purpose is not chosen yet; go back to the step Purpose.")
    return answers.task
