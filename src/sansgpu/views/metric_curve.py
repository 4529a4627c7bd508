"""Draws the curves of a metric with the characters of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

import plotille
from rich.ansi import AnsiDecoder
from rich.text import Text

from sansgpu.config.tasks import Metric
from sansgpu.events.event import Event

TRAINING, VALIDATION = "cyan", "magenta"

Point = tuple[int, float]  # (step, value)


def metric_points(events: Iterable[Event], metric: Metric) -> list[Point]:
    """Returns the points of step or eval events, without those whose value was not finite."""
    name = metric.name
    return [(event["step"], event[name]) for event in events if metric.number(event.get(name)) is not None]


def best_point(metric: Metric, points: Sequence[Point]) -> Point:
    return (max if metric.better == "higher" else min)(points, key=lambda point: point[1])


def metric_curve(
    metric: Metric, training: Sequence[Point], validation: Sequence[Point], last_step: int | None, width: int, rows: int
) -> Text:
    """Draws both curves up to `last_step`, by default the last point; `training` has at least two points.

    The initial drop of a loss is left out, because it would flatten the rest.
    """
    training, validation = _downsample(training, 2 * width), _downsample(validation, 2 * width)
    every = (*training, *validation)
    high = max(value for _, value in (every if metric.better == "higher" else training[len(training) // 10 :]))
    low = min(value for _, value in every)
    margin = 0.03 * (high - low) or 0.01 * abs(high) or 1.0
    labels = [f"{high:.2f}", f"{low:.2f}"]
    first, last = training[0][0], last_step or training[-1][0]
    figure = plotille.Figure()
    figure.width, figure.height = width - max(map(len, labels)) - 1, rows - 1
    figure.color_mode, figure.with_colors, figure.origin = "names", True, False
    figure.with_x_axis = figure.with_y_axis = False
    figure.set_x_limits(first, max(last, first + 1))
    figure.set_y_limits(low - margin, high + margin)
    for points, color in ((training, TRAINING), (validation, VALIDATION)):
        if shows := [point for point in points if point[1] <= high + margin]:
            figure.plot(*zip(*shows, strict=True), lc=color)
    lines, label_width = list(AnsiDecoder().decode(figure.show())), max(map(len, labels))
    ends = f"step {first:,}", f"{last:,}"
    axis = ends[0] + ends[1].rjust(max(1, figure.width - len(ends[0])))
    drawn = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        label = labels[0] if number == 0 else labels[1] if number == len(lines) - 1 else ""
        drawn.append(f"{label:>{label_width}} ", "dim").append_text(line).append("\n")
    return drawn.append(" " * (label_width + 1) + axis, "dim")


def _downsample(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Averages neighboring points to at most `most` points."""
    size = -(-len(points) // most)
    if size <= 1:
        return points
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [(group[-1][0], mean(value for _, value in group)) for group in groups]
