"""The rows that a run held out for validation, with its predictions and the confusion matrix that counts them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from sansgpu.config import ConfigError
from sansgpu.data.preview.example import TextSegment, marked
from sansgpu.files.atomic import make_folder, write_failures_as
from sansgpu.studio.pages import Handler, Studio, address, query_of
from sansgpu.studio.project import Project
from sansgpu.studio.runs import finished_record
from sansgpu.views.record import RunRecord
from sansgpu.views.run_plots import Confusion

MAX_ROWS = 200
MAX_ANSWERED = 40  # conversations, whose answers are generated


@dataclass(frozen=True)
class HeldOutRow:
    """A row: its text with what it should be, and what is predicted."""

    pieces: list[TextSegment]
    label: str
    predicted: str
    predicted_pieces: list[TextSegment]
    reward: float | None = None
    where: str = ""  # its place in its file

    @property
    def is_right(self) -> bool:
        return self.label == self.predicted and self.pieces == self.predicted_pieces


def routes(studio: Studio) -> list[tuple[str, str, Handler]]:
    """Returns the path, method and handler of each page and form."""
    pages = _HeldOut(studio)
    return [("/try/held-out", "POST", pages.predict), ("/try/rows", "GET", pages.rows)]


def predict_held_out(project: Project, run: str, record: RunRecord) -> None:
    """Starts the command that predicts the rows that a run held out, unless it was started before."""
    if project.commands.known(_slot(run)) is not None:
        return
    file = project.process_file(f"held-out-{run}").with_suffix(".jsonl")
    with write_failures_as(ConfigError, file):
        make_folder(file.parent)
        file.unlink(missing_ok=True)
    shown = str(file.relative_to(project.root))
    limit = ["--limit", str(MAX_ANSWERED)] if _are_conversations(record) else []
    project.commands.run(_slot(run), ["eval", run, "--predictions", shown, *limit, "--json"], shown)


def held_out_values(
    project: Project, run: str, record: RunRecord, label: str = "", predicted: str = ""
) -> dict[str, Any]:
    """Returns the command that predicts the rows of a run, and the rows with a label and a prediction.

    Without them, the wrong ones come first.
    """
    command = project.commands.known(_slot(run))
    rows: list[HeldOutRow] = []
    number = 0
    if command is not None and command.code == 0:
        try:
            lines = (project.root / str(command.fresh)).read_text(encoding="utf-8").splitlines()
            every = [_row_of(json.loads(line)) for line in lines]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError("the rows cannot be read; show them again.") from None
        number = len(every)
        chosen = (row for row in every if label in ("", row.label) and predicted in ("", row.predicted))
        rows = sorted(chosen, key=lambda row: (row.is_right, row.reward or 0.0))[:MAX_ROWS]
    return {
        "asked": command, "rows": rows, "number_of_rows": number, "label": label, "predicted": predicted,
        "confusion": Confusion.of(record), "are_conversations": _are_conversations(record),
    }  # fmt: skip


def _are_conversations(record: RunRecord) -> bool:
    return record.settings.rows == "conversations"


def _slot(run: str) -> str:
    return f"{run}/held-out"


def _row_of(found: dict[str, Any]) -> HeldOutRow:
    pair = f"\n{found['text_pair']}" if "text_pair" in found else ""
    text, label, predicted = f"{found['text']}{pair}", found.get("label", ""), found.get("predicted", "")
    where = str(found.get("where", "")).rpartition(", ")[2]
    if isinstance(predicted, list) and all(isinstance(one, dict) for one in (*predicted, *label)):
        return HeldOutRow(with_spans(text, label), "", "", with_spans(text, predicted), where=where)
    pieces = [TextSegment(text)]
    return HeldOutRow(pieces, _words(label), _words(predicted), pieces, found.get("reward"), where)


def with_spans(text: str, spans: list[dict[str, Any]]) -> list[TextSegment]:
    """Returns a text in pieces, of which those in a predicted or given span have its label."""
    return [*marked(text, ((int(one["start"]), int(one["end"]), str(one["label"])) for one in spans))]


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class _HeldOut:
    """The form and the part of the page."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self._project = studio, studio.project

    async def predict(self, request: Request) -> Response:
        run = await self._studio.run_in(request)
        self._project.commands.forget(_slot(run))
        predict_held_out(self._project, run, finished_record(self._project, run))
        return self._studio.back(address("/try", run=run) + "#held-out")

    async def rows(self, request: Request) -> Response:
        run = query_of(request, "run")
        record = finished_record(self._project, run)
        given = (request.query_params.get(name, "") for name in ("label", "predicted"))
        values = held_out_values(self._project, run, record, *given)
        return self._studio.page(request, "held_out_part.html", run=run, **values)
