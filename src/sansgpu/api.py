"""Training from Python, in scripts and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sansgpu.config import Config, ConfigError, as_config
from sansgpu.jobs.generate import generate_text
from sansgpu.jobs.runs import is_held
from sansgpu.jobs.train import TrainRequest
from sansgpu.jobs.train import train as train_job
from sansgpu.machine.world import find_world
from sansgpu.models.generate import Sampling
from sansgpu.train.loop import End
from sansgpu.watch.callbacks import Callback, Callbacks
from sansgpu.watch.events import Event, Sink
from sansgpu.watch.notebook import Notebook
from sansgpu.watch.record import Record
from sansgpu.watch.results import numbers, told
from sansgpu.watch.terminal import PreparationBar, RunConsole, Terminal, Warnings

__all__ = ["Callback", "Config", "ConfigError", "Run", "fit"]


_IN_A_LINE = ("state", "steps", "training loss, last", "validation loss, best")


class Run:
    """A run's folder, to look at and to use."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where there is no run."""
        self.folder = Path(folder)
        Record.open(self.folder)

    @property
    def record(self) -> Record:
        """All that it has told so far, read anew."""
        return Record.open(self.folder)

    def events(self, kind: str) -> list[Event]:
        """Events of a kind: start, step, eval, snapshot, warning or end. `pandas.DataFrame(run.events("step"))`."""
        return self.record.of(kind)

    def generate(
        self, prompt: str = "", max_new_tokens: int = 200, *, trust_remote_code: bool = False, **sampling: Any
    ) -> str:
        """The last snapshot's continuation of `prompt`; `sampling` is temperature, top_k, top_p and seed."""
        chosen = Sampling(**sampling)
        pieces = generate_text(
            str(self.folder), prompt, max_new_tokens, chosen, "latest", lambda message: None, trust_remote_code
        )
        return "".join(pieces)

    def __repr__(self) -> str:
        """One line."""
        facts = self._facts()
        said = (f"{name} {facts[name]}" for name in _IN_A_LINE if name in facts)
        return f"Run({str(self.folder)!r}: {', '.join(said)})"

    def _repr_html_(self) -> str:
        """A small table."""
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<b>{html.escape(str(self.folder))}</b><table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        record = self.record
        return dict(told(numbers(record, is_held(record.paths))))


def fit(
    config: Config | dict[str, Any] | str | Path | None = None,
    output_dir: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    callbacks: Sequence[Callback] = (),
    quiet: bool = False,
    strict: bool = False,
) -> Run:
    """Train as `sansgpu train` does: the same folder, the same numbers.

    `config` is a Config, its values, a file, a preset's name, or None for the built-in default; `overrides` are
    `key.path=value`; `resume` is "latest" or a snapshot. Ctrl-C, or a notebook's stop button, saves and returns. Of
    several processes (torchrun) rank 0 alone speaks, and has the callbacks.
    Raises ConfigError before any work is done, and SansGPUError where the work fails.
    """
    if output_dir is not None and not str(output_dir):
        raise ConfigError("output_dir is empty; give a folder.")
    values = as_config(config) if isinstance(config, dict) else config
    request = TrainRequest(
        config_file=Path(values) if isinstance(values, (str, Path)) else None,
        config=values if isinstance(values, Config) else None,
        overrides=tuple(overrides),
        output_dir=None if output_dir is None else Path(output_dir),
        resume=resume,
        strict=strict,
        world=find_world(),
    )
    console, rank = RunConsole(), request.world.rank
    bar = PreparationBar(RunConsole(stderr=True), silent=quiet or console.is_jupyter or rank > 0)
    sinks: list[Sink] = [Warnings(RunConsole(stderr=True), rank)]
    if not rank:
        sinks = [Callbacks(callback, request.controls) for callback in callbacks]
        sinks += [] if quiet else [bar, Notebook() if console.is_jupyter else Terminal(console)]
    try:
        outcome = train_job(request, sinks, bar)
    finally:
        bar.close()
    assert isinstance(outcome, End)
    return Run(outcome.folder)
