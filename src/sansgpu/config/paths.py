"""Where things lie in a run's folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ABANDONED = "abandoned-from-step-"  # begins the names of folders in `snapshots/` that hold an abandoned branch


@dataclass(frozen=True)
class RunPaths:
    """The files of one run, all below `root` unless the configuration places snapshots or logs elsewhere."""

    root: Path
    checkpoint_dir: Path | None = None
    logging_dir: Path | None = None

    @classmethod
    def of(cls, root: Path, checkpoint_dir: str | None, logging_dir: str | None) -> RunPaths:
        """As a run's `training` section places snapshots and logs."""
        snapshots, logs = (Path(folder).expanduser() if folder else None for folder in (checkpoint_dir, logging_dir))
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
        """One event a line."""
        return self.root / "metrics.jsonl"

    @property
    def snapshots(self) -> Path:
        """One folder a snapshot."""
        return self.checkpoint_dir or self.root / "snapshots"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.logging_dir or self.root / "tensorboard"

    @property
    def final(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.root / "final"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer the run was trained with."""
        return self.root / "tokenizer"

    @property
    def report(self) -> Path:
        """One page of all that happened."""
        return self.root / "report.html"

    @property
    def written(self) -> tuple[Path, ...]:
        """The files and folders that training writes, but for the mark of the folder."""
        files = self.config, self.environment, self.metrics, self.report, self.lock
        return (*files, self.snapshots, self.tensorboard, self.final, self.tokenizer)

    @property
    def lock(self) -> Path:
        """Held by the process that trains the run."""
        return self.root / ".lock"
