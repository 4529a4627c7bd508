"""Writes HTML reports and plots of runs, and a run's model card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sansgpu.config import ConfigError, RunPaths, SansGPUError
from sansgpu.events.progress import Warn
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.files.ownership import HTML_SIGNATURE, README, OutputFolder, is_locked, require_file
from sansgpu.models.formats.folders import ADAPTER_CONFIG
from sansgpu.train.run_folders import require_run
from sansgpu.views.model_card import model_card
from sansgpu.views.plots import write_plots
from sansgpu.views.record import RunRecord
from sansgpu.views.run_report import default_file, run_plots, run_report

FORMS = ("html", "png", "svg")


def report(runs: Sequence[Path], output: Path | None, form: str, warn: Warn) -> list[Path]:
    """Writes one html page, or one png or svg image per plot, and returns the paths.

    Skips unusable lines of a run's record with a warning. Raises ConfigError if a folder is not a run, and
    SansGPUError if nothing can be written.
    """
    if form not in FORMS:
        raise ConfigError(f"--format is {form}, but must be one of {', '.join(FORMS)}.")
    records = [RunRecord.open(folder) for folder in dict.fromkeys(runs)]
    for problem in (record.problem for record in records if record.problem):
        warn(problem)
    target = output or default_file(records, form)
    if output is None and len(records) == 1:
        require_run(records[0].paths.root)
    if form == "html":
        require_file(target, HTML_SIGNATURE)
    else:
        OutputFolder(target, "plots", "--output").require()
    with write_failures_as(SansGPUError, target, "--output"):
        if form != "html":
            drawn = [plot for _, plots in run_plots(records) for plot in plots]
            if not drawn:
                raise ConfigError(f"{' '.join(map(str, runs))} has no steps to plot yet; train first.")
            with OutputFolder(target, "plots", "--output").replace() as new:
                names = [path.name for path in write_plots(drawn, new, form)]
            return [target / name for name in names]
        write_text(target, run_report(records, [is_locked(record.paths) for record in records]))
    return [target]


def write_run_report(paths: RunPaths, warn: Warn) -> None:
    """Writes report.html and the model card at the end of a run. Failures become warnings."""
    with errors_as_warnings(f"the report of {paths.root}", warn):
        record = RunRecord.read(paths)
        if record.end_reason != "interrupted":
            write_model_card(paths.root, paths.final, record.final_step, warn)
        require_file(paths.report, HTML_SIGNATURE)
        write_text(paths.report, run_report([record], [False]))


def write_model_card(run: Path, folder: Path, step: int | None, warn: Warn, gguf: str | None = None) -> None:
    """Writes the model card of a run's final model, or of the snapshot at `step`. Failures become warnings.

    `gguf` is the name of a GGUF file in the folder. Does not overwrite a card that was edited.
    """
    with errors_as_warnings(f"the model card of {folder}", warn):
        adapter = (folder / ADAPTER_CONFIG).is_file()
        if not OutputFolder(folder, "model").write(README, model_card(RunRecord.open(run), step, adapter, gguf)):
            warn(f"{folder / README} was edited, so it is kept and may describe an earlier model.")


@contextmanager
def errors_as_warnings(what: str, warn: Warn) -> Iterator[None]:
    """Turns any exception into a warning, because the trained model matters more than its report."""
    try:
        yield
    except Exception as error:
        warn(f"{what} could not be written: {' '.join(str(error).split()).rstrip('.')}.")
