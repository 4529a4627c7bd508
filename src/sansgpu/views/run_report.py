"""Renders report.html of one run, or a comparison of several runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType
from typing import Any

import yaml

from sansgpu.config import flatten
from sansgpu.config.wording import duration
from sansgpu.events.event import Event
from sansgpu.tasks.configuration import default_values
from sansgpu.views.page import PlotlyFigure, page
from sansgpu.views.plots import Plot, evenly
from sansgpu.views.record import RunRecord
from sansgpu.views.results import describe_results, evaluation_words, ran_on, size_bytes, summarize
from sansgpu.views.run_plots import Confusion, Drawing, NamedRun, entity_scores, time_parts
from sansgpu.views.tables import storage

MAX_ROWS, MAX_SAMPLES, MAX_WARNINGS = 200, 20, 100

Rows = list[tuple[str, list[str]]]  # a name, and one cell per run


@dataclass(frozen=True)
class RunPart:
    """The part of a report about a single run."""

    run: NamedRun
    evaluations: list[tuple[str, list[str]]]
    columns: list[str]
    samples: list[Event]
    warnings: list[Event]
    left_out: Mapping[str, int]  # number of omitted evaluations, samples and warnings
    yaml: list[tuple[str, bool]]  # lines, and True if a value is not the default
    changed: list[tuple[str, str, str]]
    environment: list[tuple[str, str]]
    commands: str
    files: list[tuple[str, str]]
    times: list[tuple[str, str, str]]
    best: int | None


def run_plots(records: Sequence[RunRecord]) -> list[tuple[str, list[Plot]]]:
    """Returns the plots of runs by section."""
    return _sections(Drawing(with_unique_names(records)))


def run_report(records: Sequence[RunRecord], held: Sequence[bool]) -> str:
    """Renders the page. `held` is True for each run that a process is training."""
    runs = with_unique_names(records)
    found = [dict(describe_results(summarize(record, now))) for record, now in zip(records, held, strict=True)]
    if len(runs) == 1:
        found[0] |= {"ran on": ran_on(records[0])} | (
            {"started": started} if (started := _start_time(records[0])) else {}
        )
    sections: list[tuple[str, Sequence[Plot | PlotlyFigure]]] = [*_sections(drawing := Drawing(runs))]
    confusions = [Confusion.of(record) for record in records]
    labels = [c.scores() if c else entity_scores(r) for c, r in zip(confusions, records, strict=True)]
    matrices = [
        matrix.figure(number, runs[number].label if len(runs) > 1 else "")
        for number, matrix in enumerate(confusions)
        if matrix is not None
    ]
    sections += [("Labels", matrices)] if any(labels) else []
    return page(
        "report.html",
        [plot for _, plots in sections for plot in plots],
        title=runs[0].label if len(runs) == 1 else f"{len(runs)} runs compared",
        runs=runs,
        axes=drawing.axes,
        tiles=_tiles(records[0], found[0]) if len(runs) == 1 else {},
        results=_as_rows(found),
        differing={
            "Configuration": _differing(map(_flat_config, runs)),
            "Environment": _differing(map(_machine, runs)),
        },
        sections=sections,
        parts=[_part(run) for run in runs],
        labels=labels,
    )


def _tiles(record: RunRecord, results: Mapping[str, str]) -> dict[str, str]:
    """Returns the most important results."""
    best = f"validation {record.settings.main_metric.label}, best"
    names = "state", "steps", best, "bits per byte, best", "tokens/s, median", "time", "memory, peak"
    return {name: results[name] for name in names if name in results}


def with_unique_names(records: Sequence[RunRecord]) -> list[NamedRun]:
    """Names each run by its folder, and by as much of the path as needed to be unique."""
    paths = [record.paths.root.absolute().parts for record in records]
    return [
        NamedRun(_shortest(path, [p for p in paths if p != path]), record)
        for path, record in zip(paths, records, strict=True)
    ]


def _shortest(path: tuple[str, ...], others: list[tuple[str, ...]]) -> str:
    length = 1
    while length < len(path) and any(other[-length:] == path[-length:] for other in others):
        length += 1
    return "/".join(path[-length:]).replace("//", "/")


def _sections(drawing: Drawing) -> list[tuple[str, list[Plot]]]:
    found = {
        "Curves": drawing.curves(),
        "Speed": drawing.speed(),
        "Time": drawing.breakdown(),
        "Resources": drawing.resources(),
    }
    return [(name, plots) for name, plots in found.items() if plots]


def _part(run: NamedRun) -> RunPart:
    record = run.record
    samples = [event for event in record.evaluations if event.get("sample")]
    warnings = record.events_named("warning")
    words = {event["step"]: dict(evaluation_words(record, event)) for event in record.evaluations}
    columns = list(dict.fromkeys(name for found in words.values() for name in found))
    best = record.best["step"] if record.best else None
    selected = _evenly_spaced(record.evaluations, MAX_ROWS, best)
    rows = [(f"{event['step']:,}", [words[event["step"]].get(c, "") for c in columns]) for event in selected]
    shown = _evenly_spaced(samples, MAX_SAMPLES, None)
    seconds, all_seconds = time_parts(record), record.seconds or 1.0
    return RunPart(
        run=run,
        evaluations=rows,
        columns=columns,
        samples=shown,
        warnings=warnings[:MAX_WARNINGS],
        left_out={
            "evaluations": len(record.evaluations) - len(selected),
            "samples": len(samples) - len(shown),
            "warnings": max(0, len(warnings) - MAX_WARNINGS),
        },
        yaml=list(_yaml_lines(record)),
        changed=_changed(record),
        environment=[(name, value) for name, value in _machine(run).items()],
        commands=_commands(record),
        files=_files(record),
        times=[
            (name, duration(s) if s >= 1 else f"{s:.2f} s", f"{s / all_seconds:.1%}") for name, s in seconds.items()
        ],
        best=best,
    )


def _evenly_spaced(events: list[Event], most: int, best: int | None) -> list[Event]:
    places = set(evenly(len(events), most))
    return [event for place, event in enumerate(events) if place in places or event["step"] == best]


def _flat_config(run: NamedRun) -> dict[str, str]:
    return {key: _plain(value) for key, value in flatten(run.record.config).items()}


def _plain(value: Any) -> str:
    return _scalar(value) if isinstance(value, (str, int, float, NoneType)) else _dumped(value)


@lru_cache(maxsize=1000, typed=True)  # two configurations, and the two tables of each, share most values
def _scalar(value: str | float | None) -> str:
    return _dumped(value)


def _dumped(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _machine(run: NamedRun) -> dict[str, str]:
    known = flatten(run.record.environment)
    if size := known.get("memory_bytes"):
        known["memory_bytes"] = storage(size)
    rates = [event["gemm_flops_per_second"] for event in run.record.steps if event.get("gemm_flops_per_second")]
    if rate := max(rates, default=run.record.start.get("gemm_flops_per_second")):
        known["best matrix product rate"] = f"{rate / 1e9:,.0f} GFLOP/s"
    if started := _start_time(run.record):
        known["started"] = started
    return {key.replace("packages.", "").replace("_bytes", "").replace("_", " "): str(v) for key, v in known.items()}


def _start_time(record: RunRecord) -> str:
    return str(record.start.get("time") or "").replace("T", " ").replace("+00:00", " UTC")


def _as_rows(found: Sequence[Mapping[str, str]]) -> Rows:
    names = dict.fromkeys(name for words in found for name in words)
    return [(name, [words.get(name, "") for words in found]) for name in names]


def _differing(found: Iterator[dict[str, str]]) -> Rows:
    return [(name, cells) for name, cells in _as_rows(list(found)) if len(set(cells)) > 1]


def _changed(record: RunRecord) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of every key that is not the default."""
    defaults = default_values(record.config)
    values = flatten(record.config)
    return [(k, _plain(v), _plain(defaults[k])) for k, v in values.items() if k in defaults and defaults[k] != v]


def _yaml_lines(record: RunRecord) -> Iterator[tuple[str, bool]]:
    changed = {key for key, _, _ in _changed(record)}

    def lines(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, bool]]:
        for name, value in values.items():
            if isinstance(value, dict) and value:
                yield f"{name}:", False
                yield from (("  " + line, is_changed) for line, is_changed in lines(value, f"{prefix}{name}."))
            else:
                text = f"{_plain(name)}: {_plain(value)}"
                if "\n" in text or isinstance(value, (list, dict)):
                    text = yaml.safe_dump({name: value}, allow_unicode=True, width=10**6).rstrip("\n")
                yield from ((line, prefix + name in changed) for line in text.splitlines())

    return lines(record.config, "")


def _commands(record: RunRecord) -> str:
    known = record.environment
    packages = {"sansgpu": known.get("sansgpu"), **(known.get("packages") or {})}
    versions = " ".join(shlex.quote(f"{name}=={str(v).split('+')[0]}") for name, v in packages.items() if v)
    lines = [f"pip install {versions}"] if versions else []
    world = known.get("world_size") or 1
    many = f" --processes {world}" if world > 1 else ""
    return "\n".join([*lines, f"sansgpu train config.yaml{many} --output-dir runs/{shlex.quote(record.name)}-again"])


def _files(record: RunRecord) -> list[tuple[str, str]]:
    paths = record.paths
    inside = sorted(path for path in paths.root.iterdir() if not path.name.startswith("."))
    found = [(path.name + ("/" if path.is_dir() else ""), path) for path in inside if path != paths.snapshots]
    if paths.snapshots.is_dir():
        found += [
            (f"{paths.snapshots.name}/{path.name}/", path)
            for path in sorted(paths.snapshots.iterdir())
            if path.is_dir()
        ]
    return [(name, storage(size_bytes(path))) for name, path in found if path != paths.report]


def default_file(records: Sequence[RunRecord], form: str) -> Path:
    """Returns the default output path: in the run's folder for one run, otherwise the working directory."""
    if form == "html":
        return records[0].paths.report if len(records) == 1 else Path("report.html")
    return records[0].paths.root / "plots" if len(records) == 1 else Path("plots")
