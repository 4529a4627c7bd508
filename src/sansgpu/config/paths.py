"""Paths and names of built-in data that users write, and the paths in a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from sansgpu.config.errors import ConfigError
from sansgpu.config.wording import truncate

RUNS = Path("runs")  # default parent folder of runs
ABANDONED_FOLDER = "abandoned-from-step-"  # prefix of folders in `snapshots/` with snapshots that a resume discarded

# Built-in datasets, made from Python's standard library: documents, triples, conversations.
PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT = (
    "python-stdlib", "python-stdlib-graph", "python-stdlib-chat",
)  # fmt: skip
ARITHMETIC = "arithmetic"  # built-in dataset: sums of two numbers, with their answers
SIMPLE_TEMPLATE = "simple"  # a built-in chat template for any model
NATIVE_TEMPLATE = "native"  # the built-in chat template that writes the special tokens of a model's family
TRAINED_TOKENIZERS = "bpe", "char"  # values of data.tokenizer for which a run trains its own tokenizer
# Values with a meaning of their own, for keys that otherwise take a path.
BUILT_IN_NAMES = (
    PYTHON_STDLIB, PYTHON_STDLIB_GRAPH, PYTHON_STDLIB_CHAT, ARITHMETIC, SIMPLE_TEMPLATE, NATIVE_TEMPLATE,
    *TRAINED_TOKENIZERS,
)  # fmt: skip


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


class RunPaths:
    """The files of one run. All are below `root` unless the configuration moves snapshots or logs."""

    def __init__(self, root: Path, checkpoint_dir: Path | None = None, logging_dir: Path | None = None) -> None:
        self.root, self.checkpoint_dir, self.logging_dir = root, checkpoint_dir, logging_dir
        self.config = root / "config.yaml"  # the resolved configuration
        self.environment = root / "environment.json"  # machine, instruction set, threads and versions of the run
        self.metrics = root / "metrics.jsonl"  # one JSON event per line
        self.snapshots = checkpoint_dir or root / "snapshots"  # one folder per snapshot
        self.tensorboard = logging_dir or root / "tensorboard"
        self.final = root / "final"  # the trained model as a Hugging Face folder
        self.tokenizer = root / "tokenizer"
        self.report = root / "report.html"
        self.lock = root / ".lock"  # locked by the process that trains the run

    @classmethod
    def of(cls, root: Path, checkpoint_dir: str | None, logging_dir: str | None) -> RunPaths:
        """Builds the paths from `checkpoint_dir` and `logging_dir` of the section `training`."""
        snapshots, logs = (local_path(folder) if folder else None for folder in (checkpoint_dir, logging_dir))
        return cls(root, snapshots, logs)

    @property
    def written(self) -> tuple[Path, ...]:
        """The files and folders that training writes, except the folder's mark."""
        files = self.config, self.environment, self.metrics, self.report, self.lock
        return (*files, self.snapshots, self.tensorboard, self.final, self.tokenizer)


def not_a_run(folder: Path) -> ConfigError:
    """Returns the error for a folder that no training run wrote."""
    return ConfigError(f"{folder} is not a run: it has no config.yaml; pass the --output-dir of a training run.")


def contains_run(folder: Path) -> bool:
    """Returns whether a training run has recorded its configuration in a folder."""
    return RunPaths(folder).config.is_file()
