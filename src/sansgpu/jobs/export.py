"""`sansgpu export`: a snapshot as a model others load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.jobs.folders import open_run
from sansgpu.jobs.graph_model import is_graph, load_graph
from sansgpu.jobs.loading import is_fine_tuning, load_model
from sansgpu.jobs.report import leave_card
from sansgpu.models.graph_folder import export_graph_model
from sansgpu.models.huggingface import export_model
from sansgpu.tasks.graph import how_learned

KNOWN = ("config.json", "adapter_config.json")


def export_run(run: Path, snapshot: str, output: Path | None, merge: bool | None, warn: Callable[[str], None]) -> Path:
    """Write a Hugging Face folder of a run's snapshot; by default RUN/export. Returns the folder.

    `merge` says whether an adapter becomes part of the model; by default as the run's configuration does.
    """
    folder = output or run / "export"
    if output is not None and output.exists() and not any((output / n).is_file() for n in KNOWN):
        raise ConfigError(f"{output} exists and is no exported model; choose another --output.")
    if is_fine_tuning(str(run)):
        _export_fine_tuned(run, snapshot, folder, merge, warn)
        return folder
    if is_graph(str(run)):
        _export_graph(run, snapshot, folder, merge, warn)
        return folder
    if merge is not None:
        raise ConfigError(f"{run} has no adapter to merge or to leave apart; drop --merge and --no-merge.")
    loaded = load_model(str(run), snapshot, warn)
    if loaded.snapshot is None:
        raise ConfigError(f"{run} is a Hugging Face folder already; export takes a run.")
    export_model(loaded.decoder, loaded.tokenizer, folder)
    leave_card(run, folder, loaded.snapshot.step, warn)
    return folder


def _export_graph(run: Path, snapshot: str, folder: Path, merge: bool | None, warn: Callable[[str], None]) -> None:
    encoder = load_graph(str(run), snapshot, warn)
    if encoder.snapshot is None:
        raise ConfigError(f"{run} is an exported folder already; export takes a run.")
    if merge is not None:
        raise ConfigError(f"{run} has no adapter to merge or to leave apart; drop --merge and --no-merge.")
    export_graph_model(encoder.objective.model, encoder.codec, folder, how_learned(encoder.config))
    leave_card(run, folder, encoder.snapshot.step, warn)


def _export_fine_tuned(run: Path, snapshot: str, folder: Path, merge: bool | None, warn: Callable[[str], None]) -> None:
    from sansgpu.jobs.fine_tuned import HEADS, load_fine_tuned  # imports transformers

    loaded = load_fine_tuned(str(run), HEADS[open_run(run)[0].kind], snapshot, warn)
    if merge is not None and loaded.config.model.adapter == "none":
        raise ConfigError(f"{run} has no adapter to merge or to leave apart; drop --merge and --no-merge.")
    loaded.objective.export_to(loaded.tokenizer, folder, merge)
    if loaded.snapshot is not None:
        leave_card(run, folder, loaded.snapshot.step, warn)
