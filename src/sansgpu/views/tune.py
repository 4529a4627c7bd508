"""A hyperparameter search: its events and result, in the terminal and as report.html."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID
from rich.table import Table
from rich.text import Text

from sansgpu.config.tasks import BITS_PER_BYTE, LOSS
from sansgpu.config.wording import counted, duration
from sansgpu.files.atomic import write_text
from sansgpu.tasks.configuration import settings_of
from sansgpu.views.bench import as_html
from sansgpu.views.page import PlotlyFigure, page, templates
from sansgpu.views.tables import grid, print_table
from sansgpu.views.terminal import DESCRIPTION, FIGURES, clock

HEIGHT = 380  # pixels of a plot
COLOR_SCALE = [[0, "#1f9e89"], [1, "#e8743b"]]  # visible on light and dark backgrounds

Parameters = dict[str, Any]  # values of a trial by configuration key


@dataclass(frozen=True)
class SearchEstimate:
    """Search space and estimated time. Seconds and `finish` are None if no trial could be timed."""

    space: dict[str, str]
    trials: int | None
    trial_seconds: float | None
    seconds: float | None
    finish: str | None  # ISO 8601


@dataclass(frozen=True)
class SearchBegin:
    """A search was started or resumed."""

    folder: str
    finished: int  # trials
    evaluations: int  # number in each trial
    evaluations_changed: bool  # True if the configuration asks for a different number
    estimate: SearchEstimate


@dataclass(frozen=True)
class TrialBegin:
    """A trial was started, or resumed from `step`."""

    trial: int
    parameters: Parameters
    resumed: bool
    step: int


@dataclass(frozen=True)
class TrialStep:
    """A trial made a step."""

    trial: int
    step: int
    total_steps: int | None
    metric: str  # name and value of the task's main metric


@dataclass(frozen=True)
class TrialEnd:
    """A trial ended. `left` estimates the rest of the search."""

    trial: int
    state: str
    loss: float | None
    parameters: Parameters
    seconds: float
    why: str | None
    best: tuple[int, float] | None  # trial and loss
    finished: int
    left: SearchEstimate


SearchEvent = SearchBegin | TrialBegin | TrialStep | TrialEnd


@dataclass(frozen=True)
class TrialRow:
    """One trial in the result of a search."""

    trial: int
    state: str
    loss: float | None
    bits_per_byte: float | None
    step: int | None
    parameters: Parameters
    seconds: float
    why: str | None


@dataclass(frozen=True)
class SearchResult:
    """The trials of a search, best first."""

    name: str
    task: str
    measure: str
    folder: str
    best: TrialRow
    default: TrialRow | None  # the unchanged configuration
    gain: float | None  # relative decrease of the loss from the unchanged configuration to the best trial
    importance: dict[str, float]
    seconds: float
    trials: list[TrialRow]
    files: list[str]

    @property
    def measure_label(self) -> str:
        if self.measure == LOSS.name and (main := settings_of(self.task).main_metric) != LOSS:
            return f"loss (minus the {main.label})"
        return next(metric.label for metric in (LOSS, BITS_PER_BYTE) if metric.name == self.measure)

    @property
    def keys(self) -> list[str]:
        """The keys that any trial changed."""
        return list(dict.fromkeys(key for row in self.trials for key in row.parameters))


def value(chosen: object) -> str:
    """Formats a parameter's value with three significant digits."""
    return f"{chosen:.3g}" if isinstance(chosen, float) else "null" if chosen is None else str(chosen)


def state(row: TrialRow) -> str:
    """Returns a trial's state, with the step if it was pruned."""
    if row.state == "pruned":
        return f"pruned at {row.step}"
    return "baseline" if row.trial == 0 and row.state == "done" else row.state


def parameters(chosen: Parameters) -> str:
    """Formats a trial's parameters, e.g. "learning_rate 0.003"; "baseline" if the trial changes none."""
    return ", ".join(f"{key.rpartition('.')[2]} {value(v)}" for key, v in chosen.items()) or "baseline"


def print_estimate(console: Console, estimate: SearchEstimate) -> None:
    """Prints the search space and the estimated time."""
    table = grid()
    for key, values in estimate.space.items():
        table.add_row(key, values)
    console.print(table)
    console.print(_length(estimate), soft_wrap=True, highlight=False)


def _length(estimate: SearchEstimate) -> str:
    each, seconds, trials = estimate.trial_seconds, estimate.seconds, estimate.trials
    text = counted(trials, "trial") if trials else "trials"
    if each is not None:
        text += f" of about {duration(each)}"
    if seconds == 0:
        return text + ", all finished"
    if seconds is None:
        return text + "; no time estimate, because the model does not fit into memory here"
    return f"{text}, about {duration(seconds)} total (less with pruning), done {_finish(estimate)}"


def _finish(estimate: SearchEstimate) -> str:
    return clock(datetime.fromisoformat(estimate.finish)) if estimate.finish else "unknown"


class TuneTerminal:
    """Prints the events of a search."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._running: dict[int, str] = {}  # progress of each running trial

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchBegin():
                self._begin(event)
            case TrialBegin():
                self._begin_trial(event)
            case TrialStep():
                of = f"/{event.total_steps:,}" if event.total_steps else ""
                self._running[event.trial] = f"step {event.step:,}{of} {event.metric}"
                self._redraw()
            case TrialEnd():
                self._end_trial(event)

    def close(self) -> None:
        """Stops the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _begin(self, event: SearchBegin) -> None:
        trials, finished = event.estimate.trials, event.finished
        print_estimate(self._console, event.estimate)
        if event.evaluations_changed:
            self._say(f"each trial is evaluated {counted(event.evaluations, 'time')} to allow pruning")
        if finished:
            of = f" of {trials}" if trials else ""
            self._say(f"continuing {event.folder}: {finished}{of} trials done")
        else:
            self._say(f"writing to {event.folder}; if you stop the search, the same command continues it")
        if self._console.is_terminal:
            columns = DESCRIPTION, BarColumn(bar_width=20), FIGURES
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("trials", total=trials, completed=finished, figures="")
            self._bar.start()

    def _begin_trial(self, event: TrialBegin) -> None:
        self._running[event.trial] = "starting"
        if event.resumed:
            action = f"resumes from step {event.step}" if event.step else "restarts"
            self._say(f"trial {event.trial} {action}: {parameters(event.parameters)}")
        self._redraw()

    def _end_trial(self, event: TrialEnd) -> None:
        self._running.pop(event.trial, None)
        loss = "" if event.loss is None else f"  {event.loss:.4f}"
        parts = [f"trial {event.trial:>3}  {event.state:<7}{loss}", parameters(event.parameters)]
        parts.append(duration(event.seconds))
        if event.best:
            trial, best = event.best
            parts.append(f"best {best:.4f} (trial {trial})")
        if event.left.seconds:
            parts.append(f"{duration(event.left.seconds)} left, done {_finish(event.left)}")
        styles = {"failed": "red", "pruned": "dim"}
        self._say("  ".join(parts), styles.get(event.state, ""))
        if event.why:
            self._say(f"           {event.why}", "red")
        self._redraw(event.finished)

    def _redraw(self, finished: int | None = None) -> None:
        if self._bar is not None and self._task is not None:
            figures = "  ".join(f"trial {number}: {text}" for number, text in sorted(self._running.items()))
            self._bar.update(self._task, completed=finished, figures=figures)


def print_tune(console: Console, result: SearchResult) -> None:
    """Prints the trials, best first, the gain, and the importance of the parameters."""
    bits = result.measure == LOSS.name and any(row.bits_per_byte is not None for row in result.trials)
    table = Table(box=None, pad_edge=False)
    for name in ("trial", "", result.measure_label, *([BITS_PER_BYTE.label] if bits else [])):
        table.add_column(name, justify="left" if not name else "right", no_wrap=not name)
    for name in (*(key.rpartition(".")[2].replace("_", " ") for key in result.keys), "minutes"):  # spaces let them wrap
        table.add_column(name, justify="right")
    for row in result.trials:
        figures = [row.loss, *([row.bits_per_byte] if bits else [])]
        table.add_row(
            str(row.trial),
            state(row),
            *("" if figure is None else f"{figure:.4f}" for figure in figures),
            *chosen_values(row, result),
            f"{row.seconds / 60:.1f}",
            style="bold" if row is result.best else {"failed": "red", "done": None}.get(row.state, "dim"),
        )
    print_table(console, table)
    for row in result.trials:
        if row.why:
            console.print(Text(f"trial {row.trial} failed: {row.why}", "red"), soft_wrap=True)
    written = f"written: {', '.join(result.files)}", f"train it with: sansgpu train {result.files[0]}"
    for sentence in (*sentences(result), *written):
        console.print(sentence, soft_wrap=True, highlight=False)


def chosen_values(row: TrialRow, result: SearchResult) -> list[str]:
    """Returns the text of a trial's values in the order of the result's keys."""
    return [value(row.parameters[key]) if key in row.parameters else "" for key in result.keys]


def sentences(result: SearchResult) -> list[str]:
    """Describes the result of the search."""
    best, default, measure = result.best, result.default, result.measure_label
    found = []
    if best.trial == 0:
        found.append(f"the unchanged configuration was the best: {measure} {best.loss:.4f}")
    elif default is not None:
        change = "compared to" if result.gain is None else f"{result.gain:.2%} below"
        found.append(
            f"trial {best.trial} has {measure} {best.loss:.4f}, {change} the {default.loss:.4f} of the unchanged "
            "configuration"
        )
    if result.importance:
        shares = [f"{key.rpartition('.')[2]} {share:.0%}" for key, share in result.importance.items()]
        found.append(
            f"importance (share of the differences between trials that a parameter explains): {', '.join(shares)}"
        )
    return found


def write_tune_report(result: SearchResult, study: Any, folder: Path) -> None:
    """Writes report.html of a search and its optuna.Study. Raises OSError."""
    page_of = page(
        "bench.html",
        _figures(result, study),
        title=f"{result.name}: hyperparameter search",
        body=as_html(_text(result)),
    )
    write_text(folder / "report.html", page_of)


def _text(result: SearchResult) -> str:
    """Returns the text above the plots as Markdown."""
    states = ", ".join(f"{count} {name}" for name, count in Counter(row.state for row in result.trials).items())
    words = {function.__name__: function for function in (chosen_values, duration, sentences, state, value)}
    time = f"{datetime.now():%Y-%m-%d %H:%M}"
    return templates().get_template("tune.md").render(r=result, states=states, time=time, **words)


def _figures(result: SearchResult, study: Any) -> list[PlotlyFigure]:
    """Draws Optuna's plots. Plots that compare trials need at least two finished ones."""
    from optuna import visualization

    name = result.measure_label
    colors = {"colorscale": COLOR_SCALE, "reversescale": False, "showscale": False}  # too wide for phones
    history = visualization.plot_optimization_history(study, target_name=name)
    intermediate = visualization.plot_intermediate_values(study)
    intermediate.update_xaxes(title="% of the trial").update_yaxes(title=name)
    found = [
        (f"Final {name} of every finished trial, and the best so far", history),
        (f"{name.capitalize()} of every trial during training", intermediate),
    ]
    if sum(row.state == "done" and bool(row.parameters) for row in result.trials) > 1:
        by_value = visualization.plot_slice(study, target_name=name).update_traces(marker=colors)
        found.append((f"{name.capitalize()} by each parameter", by_value.update_layout(width=None)))
    if result.importance:
        caption = "Importance: share of the differences between trials that each parameter explains"
        found.append((caption, visualization.plot_param_importances(study)))
    drawn = []
    for number, (caption, figure) in enumerate(found):
        figure.update_layout(title=None, template=None, height=HEIGHT, margin={"l": 10, "r": 16, "t": 8, "b": 10})
        figure.update_xaxes(automargin=True, zeroline=False).update_yaxes(automargin=True, zeroline=False)
        figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
        drawn.append(PlotlyFigure(f"search-{number}", caption, figure.to_json()))
    return drawn
