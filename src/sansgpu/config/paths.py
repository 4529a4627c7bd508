"""Paths that users write, and those in a run's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sansgpu.config.errors import ConfigError
from sansgpu.config.wording import truncate

RUNS = Path("runs")  # default parent folder of runs
ABANDONED_FOLDER = "abandoned-from-step-"  # prefix of folders in `snapshots/` with snapshots that a resume discarded


def local_path(name: str | Path) -> Path:
    """Returns the path that a user wrote, with a leading `~` or `~USER` replaced by that home folder.

    Raises ConfigError if there is no such home folder, unless a file or folder has this name.
    """
    path = Path(os.path.expanduser(name))
    first = path.parts[0] if path.parts else ""
    if first.startswith("~") and not os.path.lexists(first):
        raise ConfigError(
            f"{truncate(str(path))} does not exist, because {truncate(first)} is not the home folder of a user of this "
            "machine; write the full path."
        )
    return path


@dataclass(frozen=True)
class RunPaths:
    """The files of one run. All are below `root` unless the configuration moves snapshots or logs."""

    root: Path
    checkpoint_dir: Path | None = None
    logging_dir: Path | None = None

    @classmethod
    def of(cls, root: Path, checkpoint_dir: str | None, logging_dir: str | None) -> RunPaths:
        """Builds the paths from `checkpoint_dir` and `logging_dir` of the section `training`."""
        snapshots, logs = (local_path(folder) if folder else None for folder in (checkpoint_dir, logging_dir))
        return cls(root, snapshots, logs)

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.yaml"

    @property
    def environment(self) -> Path:
        """Machine, instruction set, threads and versions of the run."""
        return self.root / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON event per line."""
        return self.root / "metrics.jsonl"

    @property
    def snapshots(self) -> Path:
        """One folder per snapshot."""
        return self.checkpoint_dir or self.root / "snapshots"

    @property
    def tensorboard(self) -> Path:
        return self.logging_dir or self.root / "tensorboard"

    @property
    def final(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.root / "final"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def written(self) -> tuple[Path, ...]:
        """The files and folders that training writes, except the folder's mark."""
        files = self.config, self.environment, self.metrics, self.report, self.lock
        return (*files, self.snapshots, self.tensorboard, self.final, self.tokenizer)

    @property
    def lock(self) -> Path:
        """Locked by the process that trains the run."""
        return self.root / ".lock"


def not_a_run(folder: Path) -> ConfigError:
    """Returns the error for a folder that no training run wrote."""
    return ConfigError(f"{folder} is not a run: it has no config.yaml; pass the --output-dir of a training run.")


def contains_run(folder: Path) -> bool:
    """Returns whether a training run has recorded its configuration in a folder."""
    return RunPaths(folder).config.is_file()
