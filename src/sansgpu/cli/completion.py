"""Completes values in a shell. Looks at files only, because importing the schema would take longer than a key press.

Without a match, bash, zsh and fish complete file names.
"""

from __future__ import annotations

from pathlib import Path

import typer

PRESETS = Path(__file__).parents[1] / "config/presets"
SUFFIXES = {".yaml", ".yml", ".toml", ".json"}
MAX_RUNS = 200


def configuration_names(incomplete: str) -> list[str]:
    """Returns the presets, and the files in ./configs by name."""
    files = [file for folder in (PRESETS, Path("configs")) if folder.is_dir() for file in sorted(folder.iterdir())]
    names = dict.fromkeys(file.stem for file in files if file.suffix in SUFFIXES)
    return [name for name in names if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    """Returns the run folders in ./runs, the most recently changed first."""
    records = sorted(Path("runs").glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [str(file.parent) for file in records[:MAX_RUNS] if str(file.parent).startswith(incomplete)]


def snapshot_names(context: typer.Context, incomplete: str) -> list[str]:
    """Returns latest, best, and the snapshots of the run that the command line names, the newest first."""
    named = (context.params.get("run"), context.params.get("output_dir"), *context.args)  # args: not parsed yet
    run = next(filter(None, named), None)
    steps = sorted(Path(run).glob("snapshots/step-*"), reverse=True) if run else []
    return [name for name in ("latest", "best", *(step.name for step in steps)) if name.startswith(incomplete)]
