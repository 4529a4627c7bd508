"""Training from Python, in scripts and notebooks."""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sansgpu.config import ConfigError, change_config, note_of, require_batch_size, with_own_names
from sansgpu.config.schema import Config
from sansgpu.events.event import Event, Sink
from sansgpu.events.history import LogHistory
from sansgpu.events.loggers import Callback, CallbackSink
from sansgpu.files.ownership import is_locked
from sansgpu.jobs.generate import generate_text
from sansgpu.jobs.train import TrainRequest
from sansgpu.jobs.train import train as train_job
from sansgpu.machine.distributed.world import find_world, is_forwarded
from sansgpu.machine.launch import make_cublas_deterministic
from sansgpu.machine.untrusted.user_code import no_silent_exit, preserved_state
from sansgpu.models.generation.sampling import Sampling
from sansgpu.tasks.configuration import as_config
from sansgpu.train.loading import ModelRequest
from sansgpu.train.loop import TrainingResult
from sansgpu.views.page import NotebookView
from sansgpu.views.record import RunRecord
from sansgpu.views.results import describe_results, summarize
from sansgpu.views.terminal import PreparationBar, RunConsole, Terminal, Warnings

__all__ = ["Callback", "Config", "ConfigError", "Run", "fit"]


_REPR_FACTS = ("state", "steps", "training loss, last", "validation loss, best")


class Run:
    """A training run on disk: reads its recorded events and generates text with its model."""

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if `folder` is not a run."""
        self.folder = Path(folder)
        RunRecord.open(self.folder)

    @property
    def record(self) -> RunRecord:
        """The run's recorded events, read from disk on every access."""
        return RunRecord.open(self.folder)

    def events(self, kind: str) -> list[Event]:
        """Returns the events of one kind: start, step, eval, snapshot, warning or end.

        Example: `pandas.DataFrame(run.events("step"))`.
        """
        return self.record.events_named(kind)

    @property
    def state(self) -> LogHistory:
        """The recorded events with the names of transformers: `run.state.log_history` and `global_step`."""
        record = self.record
        sizes = (record.start.get(key) or 1 for key in ("micro_batch", "gradient_accumulation_steps", "world_size"))
        return LogHistory(math.prod(sizes), record.events)

    def generate(
        self, prompt: str = "", max_new_tokens: int = 200, *, trust_remote_code: bool = False, **sampling: Any
    ) -> str:
        """Continues `prompt` with the latest snapshot. `sampling` takes temperature, top_k, top_p and seed."""
        chosen = Sampling(**sampling)
        model = ModelRequest(str(self.folder), remote_code=trust_remote_code)
        pieces = generate_text(model, prompt, max_new_tokens, chosen, lambda message: None)
        return "".join(pieces)

    def __repr__(self) -> str:
        facts = self._facts()
        shown = (f"{name} {facts[name]}" for name in _REPR_FACTS if name in facts)
        return f"Run({str(self.folder)!r}: {', '.join(shown)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
            for name, value in self._facts().items()
        )
        return f"<b>{html.escape(str(self.folder))}</b><table>{rows}</table>"

    def _facts(self) -> dict[str, str]:
        record = self.record
        return dict(describe_results(summarize(record, is_locked(record.paths))))


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
    """Trains like `sansgpu train`, with the same files and results.

    `config` is a Config, a dict, a file, a preset's name, or None for the built-in default. `overrides` are strings
    like `key.path=value`. `resume` is "latest" or a snapshot. On Ctrl-C or a notebook's stop button, saves a snapshot
    and returns. With several processes (torchrun), only rank 0 prints and calls the callbacks.
    Raises ConfigError before any work is done, and SansGPUError if training fails.
    """
    if output_dir is not None and not str(output_dir):
        raise ConfigError("output_dir is empty; set it to a folder.")
    values, notes = config, []
    if isinstance(config, dict):
        own, replaced = with_own_names(config)
        values, notes = as_config(own), note_of(replaced)
        require_batch_size(values.training, replaced, find_world().size)
    if not make_cublas_deterministic():
        notes.append(
            "CUDA was used before training started, so results may differ between runs on a GPU; set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts."
        )
    request = TrainRequest(
        config_file=Path(values) if isinstance(values, (str, Path)) else None,
        config=change_config(values, ()) if isinstance(values, Config) else None,
        overrides=tuple(overrides),
        output_dir=None if output_dir is None else Path(output_dir),
        resume=resume,
        strict=strict,
        world=find_world(),
        notes=tuple(notes),
    )
    console, rank = RunConsole(forwarded=is_forwarded(sys.stdout)), request.world.rank
    bar = PreparationBar(RunConsole(stderr=True), silent=quiet or console.is_jupyter or rank > 0)
    sinks: list[Sink] = [Warnings(RunConsole(stderr=True), rank)]
    if not rank:
        sinks = [CallbackSink(callback, request.controls, preserved_state) for callback in callbacks]
        sinks += [] if quiet else [bar, NotebookView() if console.is_jupyter else Terminal(console)]
    try:
        with no_silent_exit():
            outcome = train_job(request, sinks, bar)
    finally:
        bar.close()
    assert isinstance(outcome, TrainingResult)
    return Run(outcome.folder)
