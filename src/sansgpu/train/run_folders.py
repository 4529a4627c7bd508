"""Run folders: choosing one for a new run, opening one, and checking that folders and records belong to the run."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from sansgpu.config import (
    ABANDONED_FOLDER,
    BUILT_IN_NAMES,
    ConfigError,
    Override,
    RunPaths,
    identity,
    overridden_key,
    require_identity,
    setting,
)
from sansgpu.config.parse import read_values
from sansgpu.config.paths import RUNS, contains_run, local_path, not_a_run
from sansgpu.config.schema import Config
from sansgpu.config.section import declared_keys
from sansgpu.config.tasks import is_outside
from sansgpu.events.escape import printable_line
from sansgpu.files.atomic import cleanup_of, make_folder, write_failures_as
from sansgpu.files.marks import MARK, read_mark
from sansgpu.files.ownership import LOCK, OutputFolder, lock_run, require_no_links
from sansgpu.tasks.configuration import load_config
from sansgpu.train.branches import finish_pending_moves
from sansgpu.train.snapshots import clear_leftovers, snapshots


def run_paths(folder: Path, config: Config) -> RunPaths:
    return RunPaths.of(folder, config.training.checkpoint_dir, config.training.logging_dir)


def choose_output(output_dir: Path | None, config_file: Path | None, resume: str | None, dry_run: bool) -> Path:
    """Returns the folder of the run to start or resume. Default: runs/NAME, from the configuration file's name.

    Raises ConfigError if the folder contains anything but this run.
    """
    if output_dir is None and resume and Path(resume).name.startswith("step-") and Path(resume).is_dir():
        folder = Path(resume).absolute().parent
        output_dir = (folder.parent if folder.name.startswith(ABANDONED_FOLDER) else folder).parent
    if output_dir is None:
        name = config_file.stem if config_file else "default"
        if resume:
            existing = [p for p in takewhile(Path.exists, _numbered(name)) if holds_run(p)]
            output_dir = existing[-1] if existing else RUNS / name
        else:
            output_dir = next(filter(_is_free, _numbered(name)))
    OutputFolder(output_dir, "run").require()
    if not resume and not dry_run and holds_run(output_dir):
        raise ConfigError(
            f"{output_dir} already contains a run; continue it with --resume, or choose another --output-dir."
        )
    return output_dir


def _numbered(name: str) -> Iterator[Path]:
    """Yields runs/NAME, runs/NAME-2, runs/NAME-3, ..."""
    yield RUNS / name
    yield from (RUNS / f"{name}-{number}" for number in count(2))


def _is_free(folder: Path) -> bool:
    try:
        OutputFolder(folder, "run").require()
    except ConfigError:
        return False
    return not holds_run(folder)


def holds_run(folder: Path) -> bool:
    """Returns whether the folder has a snapshot or a final model."""
    return bool(snapshots(folder / "snapshots")) or (folder / "final").exists()


def require_plain_name(folder: Path) -> None:
    """Raises ConfigError if a folder that scripts will refer to has control characters in its name."""
    if printable_line(str(folder)) != str(folder):
        raise ConfigError(f"the name {folder} contains control characters; choose another --output-dir.")


def require_run(run: Path) -> None:
    """Raises ConfigError unless `run` is a run folder that may be written to."""
    if not contains_run(run):
        raise not_a_run(run)
    OutputFolder(run.resolve(), "run", "--output").require()


def open_run(folder: Path) -> tuple[Config, RunPaths]:
    """Returns the configuration and the paths of an existing run. Raises ConfigError if there is none.

    The configuration allows no Python code from outside sansgpu: a run may come from anybody, so `objective` and
    `model.trust_remote_code` take effect only if the command line repeats them.
    """
    config = recorded_config(folder)
    require_own_configuration(run_paths(folder, config))
    model = config.model.model_copy(update={"trust_remote_code": False})
    return config.model_copy(update={"objective": None, "model": model}), run_paths(folder, config)


def with_objective(config: Config, folder: Path, requested: str | None) -> Config:
    """Returns `config` with the run's objective class, which the command line must name explicitly.

    Raises ConfigError if `requested` is not the run's `objective`.
    """
    recorded = recorded_config(folder).outside_class
    if recorded and requested is None:
        instead = "" if is_outside(config.task) else ", or pass a dataset with --data"
        raise ConfigError(
            f"{folder} was trained with objective {recorded}, which is Python code: add --objective {recorded} to "
            f"import it{instead}."
        )
    if requested != recorded:
        raise ConfigError(
            f"{folder} was not trained with objective {requested}, but with {recorded or 'a built-in one'}; correct "
            "or remove --objective."
        )
    return config.model_copy(update={"objective": requested})


def require_allowed(config: Config, file: Path, overrides: Sequence[Override]) -> None:
    """Raises ConfigError if a run's recorded configuration `file` needs code that the command line does not name."""
    requested = {overridden_key(override) for override in overrides}
    named = config.outside_class
    if named and not requested & {"objective", "task"}:
        raise ConfigError(
            f"{file} names objective {named}, which is Python code: add --objective {named} to "
            "import it, or pass the configuration that you started the run with."
        )
    for key, noun in declared_keys(type(config), "runs_code").items():
        if is_outside(function := setting(config, key)) and key not in requested:
            raise ConfigError(
                f"{file} names the {noun} {function}, which is Python code: add --set {key}={function} to run it, or "
                "pass the configuration that you started the run with."
            )
    if config.model.trust_remote_code and "model.trust_remote_code" not in requested:
        raise ConfigError(
            f"{file} sets model.trust_remote_code, which runs the model's own Python code: add --trust-remote-code to "
            "allow it, or pass the configuration that you started the run with."
        )


def recorded_config(folder: Path) -> Config:
    """Returns a run's recorded configuration, which may name untrusted code. Raises ConfigError if it is unreadable."""
    if not contains_run(folder):
        raise not_a_run(folder)
    return load_config(folder / "config.yaml", trusted=False)[0]


def recorded_file(folder: Path, resume: str) -> Path | None:
    """Returns the config.yaml that the snapshot `resume` was trained with, or None if the run has none yet."""
    own = RunPaths(folder).config
    if not own.is_file():
        return None
    places = (open_run(folder)[1].snapshots / resume, Path(resume))
    of_branch = [place.with_name(own.name) for place in places if place.parent.name.startswith(ABANDONED_FOLDER)]
    return next((file for file in of_branch if file.is_file()), own)


def no_run_to_resume(folder: Path) -> ConfigError:
    """Returns the error for `--resume` without a configuration file, in a folder that has none either."""
    runs = [path.parent.name for path in folder.parent.glob(f"*/{RunPaths(folder).config.name}")]
    near = get_close_matches(folder.name, sorted(runs), n=1)
    hint = f" (did you mean {folder.parent / near[0]}?)" if near else ""
    return ConfigError(
        f"{folder} contains no run to resume{hint}; set --output-dir to a run folder, or pass the configuration of a "
        "new run."
    )


def with_absolute_paths(config: Config) -> Config:
    """Makes local paths in the configuration absolute, so that its file works from any folder."""
    for path in declared_keys(type(config), "input_path"):
        section, _, key = path.rpartition(".")
        name = setting(config, path)
        if name and name not in BUILT_IN_NAMES and (local := local_path(name)).exists():
            config = config.with_values(section, **{key: os.path.abspath(local)})
    return config


def require_unclaimed_folders(paths: RunPaths) -> None:
    """Raises ConfigError unless a run may write to the folders in its own folder, and to those elsewhere."""
    require_no_links(paths.written)
    OutputFolder(paths.final, "model").require()
    OutputFolder(paths.tokenizer, "tokenizer").require()
    _require_other_folders(paths)


def require_own_snapshots(paths: RunPaths) -> None:
    """Raises ConfigError unless the run's snapshots, which a command will move or delete, belong to this run."""
    OutputFolder(paths.root.resolve(), "run", "run").require()
    require_no_links([paths.snapshots])
    _require_other_folders(paths)


def _require_other_folders(paths: RunPaths) -> None:
    """Raises ConfigError if a snapshot or log folder outside of the run's folder belongs to something else."""
    for folder in _elsewhere(paths):
        if folder.owner not in (None, OutputFolder(paths.root, "run").owner) and folder.is_used:
            raise ConfigError(f"{folder.path} contains another run's {folder.kind}; choose another {folder.option}.")
        folder.require()


def claim_run(paths: RunPaths, resumes: bool, until_end: ExitStack) -> None:
    """Creates, locks and marks the folders of a run, and completes what a killed process left unfinished there.

    When `until_end` closes, the run is unlocked, and what was created is removed if the run has not used it. Raises
    ConfigError if a folder cannot be written, or has snapshots that the run does not resume.
    """
    clean_up = cleanup_of(paths.root, LOCK, MARK)
    OutputFolder(paths.root, "run").make()
    until_end.enter_context(lock_run(paths.root))
    until_end.callback(clean_up)  # while the folder is locked
    finish_pending_moves(paths)
    clear_leftovers(paths.snapshots)
    if not resumes and snapshots(paths.snapshots):
        raise ConfigError(f"{paths.snapshots} contains another run's snapshots; choose another checkpoint_dir.")
    root, others = OutputFolder(paths.root, "run"), _elsewhere(paths)
    run = _identity_of(root)
    for folder in others:
        until_end.callback(cleanup_of(folder.path, MARK))
        # The run's folder first: a process killed in between must not leave folders that belong to no run.
        with write_failures_as(ConfigError, root.path, root.option):
            root.record(run=run)
        with write_failures_as(ConfigError, folder.path, folder.option):
            make_folder(folder.path)
            folder.record(run=run)


def mark_run(paths: RunPaths, config: Config) -> None:
    """Marks the run's folder with the configuration that is about to be written. Raises OSError."""
    root = OutputFolder(paths.root, "run")
    root.record(run=_identity_of(root), configuration=identity(config))


def require_own_configuration(paths: RunPaths) -> None:
    """Raises ConfigError if config.yaml is truncated, or altered so that it describes a different model or data order.

    It must match the folder's mark or the newest snapshot: a run that is resumed with different values records them
    only in the mark until its next snapshot.
    """
    require_identity(paths.config, read_values(paths.config), list(_recorded(paths)))


def _recorded(paths: RunPaths) -> Iterator[dict[str, Any]]:
    """Yields the configurations recorded in the run's mark and newest readable snapshot."""
    mark = read_mark(paths.root)
    if mark and mark.configuration:
        yield mark.configuration
    for snapshot in reversed(snapshots(paths.snapshots)):
        try:
            recorded = snapshot.state().get("configuration")
        except (OSError, ValueError, ConfigError):
            continue  # incomplete; resuming skips it, too
        if isinstance(recorded, dict):
            yield recorded
        return


def _elsewhere(paths: RunPaths) -> list[OutputFolder]:
    """Returns the snapshot and log folders outside of the run's folder."""
    found: dict[Path, OutputFolder] = {}
    named = (paths.checkpoint_dir, "snapshots", "checkpoint_dir"), (paths.logging_dir, "logs", "logging_dir")
    for path, kind, key in named:
        if path is not None and path.resolve() != paths.root.resolve():
            found.setdefault(path.resolve(), OutputFolder(path, kind, f"training.{key}"))
    return [*found.values()]


def _identity_of(root: OutputFolder) -> str:
    """Returns the identity in the mark of a run's folder, or a new one."""
    return (root.mark and root.mark.run) or uuid.uuid4().hex
