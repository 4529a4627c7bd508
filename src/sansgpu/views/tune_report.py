"""Writes report.html of a hyperparameter search."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from sansgpu.files.atomic import write_text
from sansgpu.views.bench_report import as_html
from sansgpu.views.page import PlotlyFigure, page
from sansgpu.views.terminal import duration
from sansgpu.views.tune_events import SearchResult
from sansgpu.views.tune_terminal import chosen_values, sentences, state, value

HEIGHT = 380  # pixels of a plot
COLOR_SCALE = [[0, "#1f9e89"], [1, "#e8743b"]]  # visible on light and dark backgrounds


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
    counted = [row.state for row in result.trials]
    states = ", ".join(f"{counted.count(state)} {state}" for state in dict.fromkeys(counted))
    best = result.best.parameters
    lines = [
        f"# {result.name}: hyperparameter search\n",
        f"{len(counted)} trials ({states}) in {duration(result.seconds)} of training, as of "
        f"{datetime.now():%Y-%m-%d %H:%M}.\n",
        *(f"{sentence[0].upper()}{sentence[1:]}.\n" for sentence in sentences(result)),
        *(
            ["The best values, also in best.yaml:\n", *(f"- `{key}`: {value(best[key])}" for key in best), ""]
            if best
            else []
        ),
    ]
    head = ["trial", "state", result.measure_label, *(key.rpartition(".")[2] for key in result.keys), "time", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in result.trials:
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        cells = [str(row.trial), state(row), loss, *chosen_values(row, result), duration(row.seconds), row.why or ""]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


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
        caption = "Share of the differences between trials that each parameter explains"
        found.append((caption, visualization.plot_param_importances(study)))
    drawn = []
    for number, (caption, figure) in enumerate(found):
        figure.update_layout(title=None, template=None, height=HEIGHT, margin={"l": 10, "r": 16, "t": 8, "b": 10})
        figure.update_xaxes(automargin=True, zeroline=False).update_yaxes(automargin=True, zeroline=False)
        figure.update_layout(legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
        drawn.append(PlotlyFigure(f"search-{number}", caption, figure.to_json()))
    return drawn
