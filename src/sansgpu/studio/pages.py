"""Renders the pages of the studio, and reads what their forms send."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

import yaml
from jinja2 import ChoiceLoader, Environment, PackageLoader, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import counted, duration
from sansgpu.jobs.init.answers import PURPOSES
from sansgpu.studio.access import RefusedError
from sansgpu.studio.project import Choices, Project, shown_command
from sansgpu.studio.remedies import remedies
from sansgpu.tasks.configuration import SCHEMA
from sansgpu.views.plots import PALETTE
from sansgpu.views.tables import storage

MAX_FORM_BYTES = 1 << 20
MAX_MESSAGES = 50
Handler = Callable[[Request], Awaitable[Response]]
WAY_STEPS = {"purpose": "Purpose", "data": "Data", "model": "Model", "time": "Time"}
RUN_STEPS = {"run": "Run", "try": "Try", "take": "Take away"}


@dataclass(frozen=True)
class Step:
    """A step of the way; without an address, it cannot be opened yet."""

    title: str
    address: str | None
    is_current: bool


class Studio:
    """The project, and what every page needs."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._messages: dict[str, str] = {}
        loaders = [PackageLoader("sansgpu.studio"), PackageLoader("sansgpu.views")]
        self._templates = Environment(
            loader=ChoiceLoader(loaders), autoescape=select_autoescape(["html"]), trim_blocks=True, lstrip_blocks=True
        )
        self._templates.globals.update(
            storage=storage, duration=duration, counted=counted, shown_command=shown_command, remedies=remedies,
            project=project, address=address, palette=PALETTE, tasks=SCHEMA.tasks.tasks,
        )  # fmt: skip

    def page(self, request: Request, template: str, **values: Any) -> HTMLResponse:
        """Renders a page or a part of a page, with the message about the form that led to it."""
        message = self._messages.pop(request.query_params.get("message", ""), "")
        return HTMLResponse(self._templates.get_template(template).render(message=message, **values))

    def back(self, target: str, message: str = "") -> Response:
        """Redirects to a page after a form was handled; `message` says what went wrong."""
        if message:
            key = secrets.token_hex(4)
            self._messages = dict([*self._messages.items(), (key, message)][-MAX_MESSAGES:])
            target += ("&" if "?" in target else "?") + urlencode({"message": key})
        return RedirectResponse(target, HTTPStatus.SEE_OTHER)

    async def run_in(self, request: Request) -> str:
        """Returns the path of the run that a form names. Raises ConfigError if it is not in the project."""
        return self.project.run_path((await form_of(request)).get("run", ""))

    def steps(self, current: str, way: str | None, run: str | None) -> list[Step]:
        """Returns the steps of a way. Those after the start need a run."""
        ready = {"run"} if run else set()
        if run and (self.project.run_folder(run) / "final").is_dir():
            ready |= {"try", "take"}
        answers = self.project.answers_or_problem(way) if way else None
        if isinstance(answers, Choices):
            ready |= {"purpose", "data"} | ({"model"} if answers.task and answers.data else set())
            purpose = PURPOSES.get(answers.task or "")
            ready |= {"time"} if "model" in ready and (answers.model or not (purpose and purpose.model)) else set()
        ways = {name: f"/way/{way}/{name}" for name in WAY_STEPS}
        addresses = ways | {name: address(f"/{name}", run=run) for name in RUN_STEPS}
        titles = WAY_STEPS | RUN_STEPS
        return [Step(titles[name], addresses[name] if name in ready else None, current == name) for name in titles]

    def way_page(self, request: Request, step: str, template: str, **values: Any) -> HTMLResponse:
        """Renders the page of a step before the run."""
        name = request.path_params["name"]
        answers, runs = self.project.answers(name), self.project.runs_of(name)
        return self.page(
            request, template, way=name, answers=answers, runs=runs, yaml=self.yaml(name, answers), current=step,
            steps=self.steps(step, name, runs[0] if runs else None), **values,
        )  # fmt: skip

    def yaml(self, name: str, answers: Choices) -> str:
        """Returns the configuration of a way, or the keys that are chosen before there is one."""
        if text := self.project.config_text(name):
            return text
        values: dict[str, Any] = {"task": answers.task, "data": {"dataset_name": answers.data}}
        values |= {"model": {"name_or_path": answers.model}} if answers.model else {}
        return yaml.safe_dump(values, sort_keys=False) + "".join(f"# {one}\n" for one in answers.settings)

    def guarded(self, handler: Handler) -> Handler:
        """Turns errors into a message on the page before, or on a page of its own."""

        @functools.wraps(handler)
        async def guarded(request: Request) -> Response:
            try:
                return await handler(request)
            except (SansGPUError, RefusedError) as error:
                status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
                sentence = " ".join(str(error).split())
                if request.method == "POST" and "referer" in request.headers:
                    path, _, query = request.headers["referer"].partition("://")[2].partition("/")[2].partition("?")
                    kept = {name: values[0] for name, values in parse_qs(query).items() if name != "message"}
                    return self.back(address(f"/{path}", **kept), sentence)
                way = request.path_params.get("name")
                answer = self.page(request, "problem.html", problem=sentence, steps=self.steps("", way, None))
                answer.status_code = int(status)
                return answer

        return guarded


def address(path: str, **query: str | None) -> str:
    """Returns the address of a page of the studio."""
    given = {name: value for name, value in query.items() if value is not None}
    return quote(path) + (f"?{urlencode(given)}" if given else "")


async def form_of(request: Request) -> Mapping[str, str]:
    """Returns the fields of a form, of which each has one value. Raises ConfigError if it is too large."""
    fields = await fields_of(request)
    return {name: values[-1].strip() for name, values in fields.items()}


async def fields_of(request: Request) -> dict[str, list[str]]:
    """Returns the fields of a form. Raises ConfigError if it is too large."""
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > MAX_FORM_BYTES:
            raise ConfigError(f"the form has more than {MAX_FORM_BYTES >> 20} MB; put long texts into a file.")
    return parse_qs(read.decode(errors="replace").replace("%00", ""), keep_blank_values=True)


def query_of(request: Request, name: str) -> str:
    """Returns a value from the address. Raises ConfigError if it is missing."""
    if not (value := request.query_params.get(name, "")):
        raise ConfigError(f"the address has no {name}; go back to the list of runs.")
    return value


def page_before(request: Request, otherwise: str) -> str:
    """Returns the page that sent a form, if it is a step of the same way."""
    path = request.headers.get("referer", "").partition("://")[2].partition("/")[2].partition("?")[0]
    way = "/".join(otherwise.split("/")[1:3])
    return f"/{path}" if path.startswith(f"{way}/") else otherwise
