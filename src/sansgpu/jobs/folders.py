"""Run folders: where a new run goes, and how an old one is opened."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sansgpu.config import ABANDONED, BUILT_IN_NAMES, Config, ConfigError, RunPaths, SansGPUError, load_config
from sansgpu.jobs.claims import require_own_configuration
from sansgpu.jobs.runs import RUNS
from sansgpu.train.checkpoint import snapshots
from sansgpu.watch.escape import printable_line
from sansgpu.watch.files import make_folder, scratch, write_text
from sansgpu.watch.outputs import require_folder

LOCAL = {"data": ("dataset_name", "validation_name", "tokenizer", "chat_template"), "model": ("name_or_path",)}
LOOKING = 0.5  # seconds that one who looks whether a run is held may hold it


def run_paths(folder: Path, config: Config | None = None) -> RunPaths:
    """The files of the run in `folder`."""
    if config is None:
        return RunPaths(folder)
    return RunPaths.of(folder, config.training.checkpoint_dir, config.training.logging_dir)


def open_output(asked: Path | None, config_file: Path | None, resume: str | None, dry_run: bool) -> Path:
    """The folder of the run to start or resume; by default runs/NAME of the configuration's name.

    Raises ConfigError if the folder holds anything else than this run, or cannot be written.
    """
    if asked is None and resume and Path(resume).name.startswith("step-") and Path(resume).is_dir():
        folder = Path(resume).absolute().parent
        asked = (folder.parent if folder.name.startswith(ABANDONED) else folder).parent
    if asked is None:
        name = config_file.stem if config_file else "default"
        taken = [p for p in _numbered(name) if holds_run(p)]
        asked = (taken or [RUNS / name])[-1] if resume else next(p for p in _numbered(name, True) if _is_free(p))
    require_folder(asked, "run")
    if not resume and not dry_run and holds_run(asked):
        raise ConfigError(f"{asked} holds a run already; go on with it by --resume, or choose another --output-dir.")
    if not dry_run:
        require_writable(asked)
    return asked


def _numbered(name: str, endless: bool = False) -> list[Path]:
    found = [RUNS / name]
    while found[-1].exists():
        found.append(RUNS / f"{name}-{len(found) + 1}")
    return found if endless else found[:-1]


def _is_free(folder: Path) -> bool:
    """Whether a new run may go there."""
    try:
        require_folder(folder, "run")
    except ConfigError:
        return False
    return not holds_run(folder)


def holds_run(folder: Path) -> bool:
    """Whether something was trained into it."""
    return bool(snapshots(folder / "snapshots")) or (folder / "final").exists()


def require_writable(folder: Path) -> None:
    """Make a folder. Raises ConfigError if nothing can be written there."""
    try:
        make_folder(folder)
        with scratch(folder, is_folder=False) as probe:
            probe.write_bytes(b"x")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another --output-dir.") from None


def require_plain_name(folder: Path) -> None:
    """Raises ConfigError if a folder that files will name has line ends or other control characters in its own name."""
    if printable_line(str(folder)) != str(folder):
        raise ConfigError(f"{folder} holds control characters, which no script can name; choose another --output-dir.")


@contextmanager
def held_run(folder: Path) -> Iterator[None]:
    """Keep other processes from training into `folder`; a process that is killed lets go.

    Raises ConfigError where one does already.
    """
    try:
        with FileLock(RunPaths(folder).lock, timeout=LOOKING):
            yield
    except Timeout:
        raise ConfigError(f"{folder} is being trained by another process; wait for it, or stop it first.") from None


def open_run(folder: Path) -> tuple[Config, RunPaths]:
    """The configuration and the files of an existing run. Raises ConfigError if there is none.

    The configuration allows no Python code from outside sansgpu, whatever the folder says: a run may come from anybody,
    so `objective` and `model.trust_remote_code` are honored only where the command line repeats them.
    """
    config = recorded_config(folder)
    require_own_configuration(run_paths(folder, config))
    model = config.model.model_copy(update={"trust_remote_code": False})
    return config.model_copy(update={"objective": None, "model": model}), run_paths(folder, config)


def with_objective(config: Config, folder: Path, asked: str | None) -> Config:
    """`config` of the run in `folder` with the class that prepared its data, which the command line has to name.

    Raises ConfigError if `asked` is not the run's `objective`.
    """
    recorded = recorded_config(folder).objective
    if recorded and asked is None:
        raise ConfigError(
            f"{folder} was trained with objective {recorded}, which is Python code: add --objective {recorded} to "
            "import it, or name other data with --data."
        )
    if asked != recorded:
        raise ConfigError(
            f"{folder} was not trained with objective {asked}; its objective is {recorded or 'built in'}."
        )
    return config.model_copy(update={"objective": asked})


def require_allowed(config: Config, file: Path, overrides: Sequence[str]) -> None:
    """Raises ConfigError if a run's own configuration `file` asks for Python code and the command line does not."""
    asked = {override.partition("=")[0].strip() for override in overrides}
    if config.objective and "objective" not in asked:
        raise ConfigError(
            f"{file} names objective {config.objective}, which is Python code: add --objective {config.objective} to "
            "import it, or give the configuration that you started the run with."
        )
    if config.model.trust_remote_code and "model.trust_remote_code" not in asked:
        raise ConfigError(
            f"{file} sets model.trust_remote_code, which runs the model's own Python code: add --trust-remote-code to "
            "allow that, or give the configuration that you started the run with."
        )


def recorded_config(folder: Path) -> Config:
    """The configuration of a run as its folder has it, which may name code of others. Raises ConfigError."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is no run: it has no config.yaml.")
    return load_config(folder / "config.yaml")[0]


def recorded_file(folder: Path, resume: str) -> Path | None:
    """The config.yaml that the snapshot called `resume` was trained with; None if the run has none yet."""
    own = run_paths(folder).config
    if not own.is_file():
        return None
    places = (open_run(folder)[1].snapshots / resume, Path(resume))
    of_branch = [place.with_name(own.name) for place in places if place.parent.name.startswith(ABANDONED)]
    return next((file for file in of_branch if file.is_file()), own)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object. Raises SansGPUError where the disk refuses."""
    try:
        write_text(path, json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise SansGPUError(f"{path} cannot be written: {error.strerror}.") from None


def anywhere(config: Config) -> Config:
    """Local data and models by their absolute paths, so that the file runs from any folder."""
    for section, keys in LOCAL.items():
        values = getattr(config, section)
        paths = {
            key: Path(name).expanduser()
            for key in keys
            if (name := getattr(values, key)) and name not in BUILT_IN_NAMES
        }
        local = {key: os.path.abspath(path) for key, path in paths.items() if path.exists()}
        config = config.model_copy(update={section: values.model_copy(update=local)})
    return config
