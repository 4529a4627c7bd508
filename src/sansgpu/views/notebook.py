"""Shows a run in a notebook cell."""

from __future__ import annotations

import time
from typing import Any

from sansgpu.events.event import Event
from sansgpu.views.page import templates
from sansgpu.views.terminal import duration

REDRAW_SECONDS = 1.0


class NotebookView:
    """A sink for Jupyter: a progress bar, current figures and the last evaluations, updated in place."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._page, self._html = templates().get_template("notebook.html"), HTML
        self._events: dict[str, Any] = {"evaluations": [], "warnings": [], "step": {}, "end": {}, "start": {}}
        self._redrawn = 0.0
        self._handle = display(HTML("starting"), display_id=True)

    def emit(self, event: Event) -> None:
        kind, known = event["event"], self._events
        if kind in ("start", "step", "end"):
            known[kind] = event
        elif kind in ("eval", "warning"):
            known["evaluations" if kind == "eval" else "warnings"].append(event)
        if kind != "step" or time.monotonic() - self._redrawn >= REDRAW_SECONDS:
            self._redrawn = time.monotonic()
            self._handle.update(self._html(self._page.render(**known, duration=duration)))

    def close(self) -> None:
        pass
