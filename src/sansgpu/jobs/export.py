"""`sansgpu export`: a snapshot as a model others load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sansgpu.config import ConfigError
from sansgpu.jobs.loading import load_model
from sansgpu.models.huggingface import export_model


def export_run(run: Path, snapshot: str, output: Path | None, warn: Callable[[str], None]) -> Path:
    """Write a Hugging Face folder of a run's snapshot; by default RUN/export. Returns the folder."""
    loaded = load_model(str(run), snapshot, warn)
    if loaded.snapshot is None:
        raise ConfigError(f"{run} is a Hugging Face folder already; export takes a run.")
    folder = output or run / "export"
    if output is not None and output.exists() and not (output / "config.json").is_file():
        raise ConfigError(f"{output} exists and is no exported model; choose another --output.")
    export_model(loaded.decoder, loaded.tokenizer, folder)
    return folder
