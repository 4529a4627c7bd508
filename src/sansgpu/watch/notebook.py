"""What a notebook shows while training: one cell's output, drawn anew."""

from __future__ import annotations

import time
from typing import Any

from sansgpu.watch.events import Event
from sansgpu.watch.page import templates
from sansgpu.watch.terminal import duration

SECONDS = 1.0  # between two pictures


class Notebook:
    """A sink for Jupyter: a bar, the last figures and the last evaluations, in place of lines that pile up."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._page, self._html = templates().get_template("notebook.html"), HTML
        self._known: dict[str, Any] = {"evaluations": [], "warnings": [], "step": {}, "end": {}, "start": {}}
        self._shown = 0.0
        self._handle = display(HTML("sansgpu begins"), display_id=True)

    def emit(self, event: Event) -> None:
        """Note one event; the picture follows, at most once a second but for the last."""
        kind, known = event["event"], self._known
        if kind in ("start", "step", "end"):
            known[kind] = event
        elif kind in ("eval", "warning"):
            known["evaluations" if kind == "eval" else "warnings"].append(event)
        if kind != "step" or time.monotonic() - self._shown >= SECONDS:
            self._shown = time.monotonic()
            self._handle.update(self._html(self._page.render(**known, duration=duration)))

    def close(self) -> None:
        """Nothing is held."""
