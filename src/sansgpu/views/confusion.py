"""The confusion matrix of a run that classifies texts, and the scores of each label or entity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import escape

from sansgpu.events.record import RunRecord
from sansgpu.views.page import PlotlyFigure

MIN_HEIGHT, LABEL_HEIGHT = 220, 28  # pixels


@dataclass(frozen=True)
class Confusion:
    """`counts[i][j]` is the number of validation rows with label i for which label j was predicted."""

    step: int
    labels: list[str]
    counts: list[list[int]]

    @classmethod
    def of(cls, record: RunRecord) -> Confusion | None:
        """Returns the matrix of the last evaluation, or None if the run has none."""
        last = record.evaluations[-1] if record.evaluations else {}
        labels = record.section("data").get("labels")
        counts: Any = last.get("confusion")
        if not isinstance(labels, list) or not _is_square(counts, len(labels)):
            return None
        return cls(last["step"], [str(label) for label in labels], counts)

    def scores(self) -> list[tuple[str, list[str]]]:
        """Returns each label with its rows, precision, recall and F1 as text; "" where nothing can be divided."""
        found = []
        for number, label in enumerate(self.labels):
            right, given = self.counts[number][number], sum(self.counts[number])
            predicted = sum(row[number] for row in self.counts)
            shares = ((right, predicted), (right, given), (2 * right, predicted + given))
            found.append((label, [f"{given:,}", *(f"{part / whole:.1%}" if whole else "" for part, whole in shares)]))
        return found

    def figure(self, number: int, of: str) -> PlotlyFigure:
        """Returns the matrix as a heat map. `number` is the index of the run and `of` its name if there are several."""
        names = [str(escape(label)) for label in self.labels]
        trace = {
            "type": "heatmap",
            "x": names,
            "y": names,
            "z": self.counts,
            "text": [[f"{count:,}" for count in row] for row in self.counts],
            "texttemplate": "%{text}",
            "colorscale": "Blues",
            "reversescale": False,
            "showscale": False,
            "hovertemplate": "label %{y}, predicted %{x}: %{z:,}<extra></extra>",
            "meta": {"run": number},
        }
        axis = {"type": "category", "automargin": True}
        layout = {
            "xaxis": {**axis, "title": {"text": "predicted label", "standoff": 8}},
            "yaxis": {**axis, "title": {"text": "label", "standoff": 8}, "autorange": "reversed"},
            "height": max(MIN_HEIGHT, LABEL_HEIGHT * (len(names) + 4)),
            "margin": {"l": 10, "r": 16, "t": 8, "b": 10},
        }
        title = f"Confusion matrix{f' of {of}' if of else ''}, validation rows at step {self.step:,}"
        text = json.dumps(
            {"data": [trace], "layout": layout}, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        return PlotlyFigure(f"confusion_{number}", title, text, wide=len(names) > 8)


def _is_square(counts: Any, size: int) -> bool:
    """Returns whether an event's value is a matrix of counts; metrics.jsonl may come from anybody."""
    rows: Sequence[Any] = counts if isinstance(counts, list) else []
    return len(rows) == size > 0 and all(
        isinstance(row, list) and len(row) == size and all(type(value) is int and value >= 0 for value in row)
        for row in rows
    )


def entity_scores(record: RunRecord) -> list[tuple[str, list[str]]]:
    """Returns each entity label in the last evaluation with its count, precision, recall and F1 as text."""
    by_label: Any = (record.evaluations[-1] if record.evaluations else {}).get("by_label")
    found = []
    for label, values in by_label.items() if isinstance(by_label, dict) else ():
        names = ("count", "precision", "recall", "f1")
        numbers: list[Any] = [values.get(name) if isinstance(values, dict) else None for name in names]
        if all(type(number) in (int, float) for number in numbers):
            found.append((str(label), [f"{numbers[0]:,.0f}", *(f"{number:.1%}" for number in numbers[1:])]))
    return found
