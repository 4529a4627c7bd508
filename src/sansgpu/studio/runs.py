"""The pages of runs: one that is trained, the list of all, and several compared."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sansgpu.config import ConfigError, RunPaths
from sansgpu.config.paths import RUNS, contains_run
from sansgpu.config.wording import truncate
from sansgpu.events.event import Event
from sansgpu.files.ownership import is_locked
from sansgpu.jobs.runs import KnownRuns, list_runs
from sansgpu.studio.pages import Handler, Studio, address, fields_of, form_of, query_of
from sansgpu.studio.project import Project
from sansgpu.views.page import figure
from sansgpu.views.record import RunRecord
from sansgpu.views.results import describe_results, evaluation_words, summarize
from sansgpu.views.run_report import run_plots, with_unique_names

MAX_EVALUATIONS, MAX_SAMPLES, MAX_WARNINGS = 12, 6, 20
MAX_COMPARED = 8
LOG_LINES = 60
POLL_SECONDS, POLL_RATIO = 5, 30  # wait at least this long, and this many times as long as reading took


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    pages = _Runs(studio)
    return [
        ("/runs", "GET", pages.listed),
        ("/runs/table", "GET", pages.table),
        ("/compare", "GET", pages.compare),
        ("/run", "GET", pages.run),
        ("/run/state", "GET", pages.state),
        ("/plots", "GET", pages.plots),
        ("/run/stop", "POST", pages.stop),
        ("/run/resume", "POST", pages.resume),
        ("/run/fork", "POST", pages.fork),
    ]


def record_of(project: Project, run: str) -> RunRecord | None:
    """Returns the record of a run, or None if it has not begun yet. Raises ConfigError if it is damaged."""
    folder = project.run_folder(run)
    return RunRecord.open(folder) if contains_run(folder) else None


def finished_record(project: Project, run: str) -> RunRecord:
    """Returns the record of a run that has a final model. Raises ConfigError for other runs."""
    record = record_of(project, run)
    if record is None or not record.paths.final.is_dir():
        raise ConfigError(f"{run} has no final model yet; wait until the run has ended, or resume it.")
    return record


def way_of(project: Project, run: str) -> str | None:
    """Returns the way that a run belongs to, by their names, or None."""
    name = Path(run).name
    found = [way for way in project.ways() if run in project.runs_of(way)]
    return name if name in found else found[0] if found else None


def run_page(studio: Studio, request: Request, step: str, template: str, run: str, **values: Any) -> Response:
    """Renders the page of a step after the start of a run."""
    way = way_of(studio.project, run)
    text = studio.project.config_text(way) if way else ""
    return studio.page(
        request, template, run=run, way=way, current=step, steps=studio.steps(step, way, run), yaml=text, **values
    )


class _Runs:
    """The pages and forms of runs."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project
        self._stopping: set[str] = set()  # runs that were asked to stop
        self._known: KnownRuns = {}

    async def listed(self, request: Request) -> Response:
        return self._studio.page(request, "runs.html", current="runs", steps=[])

    async def table(self, request: Request) -> Response:
        folder = self._project.root / RUNS
        rows = await asyncio.to_thread(list_runs, folder, self._known) if folder.is_dir() else []
        found = [
            (str(Path(row.path).relative_to(self._project.root)), row, dict(describe_results(row))) for row in rows
        ]
        return self._studio.page(request, "runs_table.html", rows=found)

    async def compare(self, request: Request) -> Response:
        records = self._chosen(request)
        if len(records) < 2:
            raise ConfigError("fewer than two runs are chosen; choose several in the list of runs.")
        found = [dict(describe_results(summarize(record, is_locked(record.paths)))) for record in records.values()]
        names = dict.fromkeys(name for words in found for name in words)
        return self._studio.page(
            request, "compare.html", current="runs", steps=[], chosen=[*records],
            names=[named.label for named in with_unique_names([*records.values()])],
            rows=[(name, [words.get(name, "") for words in found]) for name in names],
        )  # fmt: skip

    def _chosen(self, request: Request) -> dict[str, RunRecord]:
        """Returns the records of the runs that an address names and that have begun."""
        runs = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_COMPARED]
        return {run: record for run in runs if (record := record_of(self._project, run)) is not None}

    async def run(self, request: Request) -> Response:
        run = query_of(request, "run")
        return run_page(self._studio, request, "run", "run_step.html", run, **await asyncio.to_thread(self._state, run))

    async def state(self, request: Request) -> Response:
        run = query_of(request, "run")
        state = await asyncio.to_thread(self._state, run)
        if state["version"] == request.query_params.get("version"):
            return Response(status_code=HTTPStatus.NO_CONTENT)  # the page stays as it is
        page = self._studio.page(request, "run_state.html", run=run, way=way_of(self._project, run), **state)
        if not state["is_active"]:
            page.headers["HX-Refresh"] = "true"  # the steps after the run can be opened now
        return page

    def _state(self, run: str) -> dict[str, Any]:
        """Returns what is known of a run and its process now, and after how many seconds to ask again."""
        started = time.monotonic()
        record, process = record_of(self._project, run), self._project.process(run)
        held = record is not None and is_locked(record.paths)
        is_active = held or process.is_alive
        log = process.log
        if record is None and not is_active and not log:
            raise ConfigError(f"there is no run {run}; choose one from the list of runs.")
        found: dict[str, Any] = {
            "is_active": is_active,
            "is_stopping": is_active and run in self._stopping,
            "failure": "" if is_active else process.failure,
            "record": record,
            "wait": max(POLL_SECONDS, round((time.monotonic() - started) * POLL_RATIO)),
        }
        found["log"] = "\n".join(log.splitlines()[-LOG_LINES:])
        found["version"] = str(zlib.crc32(repr((is_active, found["is_stopping"], found["log"])).encode()))
        if record is None:
            return found
        summary = summarize(record, is_active)
        said = dict.fromkeys(str(event.get("message", "")) for event in record.events_named("warning"))
        return {
            **found,
            "summary": summary,
            "results": dict(describe_results(summary)),
            "left": _seconds_left(record) if is_active else None,
            "evaluations": _evaluation_table(record),
            "last_evaluation": _last_evaluation(record),
            "samples": [event for event in record.evaluations if event.get("sample")][-MAX_SAMPLES:],
            "warnings": [*said][-MAX_WARNINGS:],
            "snapshots": _snapshots(record.paths),
            "version": f"{found['version']}-{len(record.steps)}-{len(record.evaluations)}",
        }

    async def plots(self, request: Request) -> Response:
        """Returns the plots of one run or of several as plotly figures."""
        records = [*self._chosen(request).values()]
        sections = await asyncio.to_thread(run_plots, records) if records else []
        return JSONResponse(
            [
                {"section": section, "name": plot.name, "title": plot.title, "note": plot.note, "wide": plot.wide,
                 **figure(plot)}
                for section, plots in sections
                for plot in plots
                if section in ("Curves", "Speed")
            ]
        )  # fmt: skip

    async def stop(self, request: Request) -> Response:
        run = await self._studio.run_in(request)
        self._project.process(run).stop()
        self._stopping.add(run)
        return self._studio.back(address("/run", run=run))

    async def resume(self, request: Request) -> Response:
        """Resumes a run, with changed keys if there are any: one `key.path=value` a line."""
        form = await form_of(request)
        run = self._project.run_path(form.get("run", ""))
        if self._state(run)["is_active"]:
            raise ConfigError(f"{run} is being trained already; stop it first.")
        changes = [line.strip() for line in form.get("changes", "").splitlines() if line.strip()]
        command = ["train", "--resume", "latest", "--output-dir", run, "--plain"]
        self._stopping.discard(run)
        self._project.start(run, [*command, *(part for change in changes for part in ("--set", change))])
        return self._studio.back(address("/run", run=run))

    async def fork(self, request: Request) -> Response:
        """Copies a snapshot into a new run, which can be resumed with other settings."""
        fields = await fields_of(request)
        run, snapshot = self._project.run_path(fields.get("run", [""])[0]), fields.get("snapshot", [""])[0]
        if snapshot not in _snapshots(RunPaths(self._project.root / run)):
            raise ConfigError(f"{run} has no snapshot {truncate(snapshot)}; reload the page.")
        target = self._project.new_run(f"{Path(run).name}-from-{snapshot.removeprefix('step-').lstrip('0')}")
        command = self._project.commands.run(
            f"{run}/fork", ["snapshots", "fork", run, "--snapshot", snapshot, "--output-dir", target], object()
        )
        while command.is_running:
            await asyncio.sleep(0.1)
        if command.code:
            raise ConfigError(command.error)
        return self._studio.back(address("/run", run=target))


def _seconds_left(record: RunRecord) -> float | None:
    """Returns the seconds until the last step at the speed of the last ones."""
    steps, total = record.steps[-20:], record.total_steps
    seconds = [event["step_seconds"] for event in steps if event.get("step_seconds")]
    return None if not seconds or not total else max(0, total - record.step) * sum(seconds) / len(seconds)


def _evaluation_table(record: RunRecord) -> tuple[list[str], list[tuple[Event, list[str]]]]:
    """Returns the names of the metrics, and the last evaluations with their values."""
    shown = [(event, dict(evaluation_words(record, event))) for event in record.evaluations[-MAX_EVALUATIONS:]]
    names = list(dict.fromkeys(name for _, words in shown for name in words))
    return names, [(event, [words.get(name, "") for name in names]) for event, words in shown]


def _last_evaluation(record: RunRecord) -> list[tuple[str, str]]:
    """Returns the metrics of the last evaluation that say more than the loss, such as the accuracy."""
    words = evaluation_words(record, record.evaluations[-1]) if record.evaluations else ()
    percent = " (%)"
    return [
        (name.removesuffix(percent), f"{value}%" if name.endswith(percent) else value)
        for name, value in words
        if not name.startswith(("loss", "perplexity", "bits per byte"))
    ][:3]


def _snapshots(paths: RunPaths) -> Sequence[str]:
    if not paths.snapshots.is_dir():
        return []
    return sorted((path.name for path in paths.snapshots.iterdir() if path.name.startswith("step-")), reverse=True)
