"""Run folders: choosing one for a new run, opening one, and checking that folders and records belong to the run."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sansgpu.config import (
    ABANDONED_FOLDER,
    BUILT_IN_NAMES,
    Config,
    ConfigError,
    Override,
    RunPaths,
    SansGPUError,
    identity,
    overridden_key,
    require_identity,
    setting,
)
from sansgpu.config.parse import read_values
from sansgpu.config.paths import RUNS, local_path, not_a_run
from sansgpu.config.section import declared_keys
from sansgpu.config.tasks import TRAINED_TOKENIZERS, is_outside
from sansgpu.events.escape import printable_line
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import cleanup_of, make_folder, scratch_folder, write_failures_as, write_text
from sansgpu.files.marks import MARK, FolderMark, is_output, read_mark, write_mark
from sansgpu.files.ownership import require_folder, require_no_links
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import task_of
from sansgpu.tasks.task import Corpus
from sansgpu.train.snapshots import snapshots

PROBE_SECONDS = 0.5  # how long to wait for the lock, because `is_locked` in another process holds it for a moment


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
    require_folder(output_dir, "run")
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
        require_folder(folder, "run")
    except ConfigError:
        return False
    return not holds_run(folder)


def holds_run(folder: Path) -> bool:
    """Returns whether the folder has a snapshot or a final model."""
    return bool(snapshots(folder / "snapshots")) or (folder / "final").exists()


def require_writable(folder: Path) -> None:
    """Creates a folder. Raises ConfigError if nothing can be written there."""
    with write_failures_as(ConfigError, folder, "--output-dir"):
        make_folder(folder)
        with scratch_folder(folder, is_folder=False) as probe:
            probe.write_bytes(b"x")


def require_plain_name(folder: Path) -> None:
    """Raises ConfigError if a folder that scripts will refer to has control characters in its name."""
    if printable_line(str(folder)) != str(folder):
        raise ConfigError(f"the name {folder} contains control characters; choose another --output-dir.")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Locks `folder` for training; the lock is released when the process dies.

    Raises ConfigError if another process holds it.
    """
    try:
        with FileLock(RunPaths(folder).lock, timeout=PROBE_SECONDS):
            yield
    except Timeout:
        raise ConfigError(f"{folder} is being trained by another process; wait for it, or stop it first.") from None


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
    if not (folder / "config.yaml").is_file():
        raise not_a_run(folder)
    return load_config(folder / "config.yaml", own=False)[0]


def recorded_file(folder: Path, resume: str) -> Path | None:
    """Returns the config.yaml that the snapshot `resume` was trained with, or None if the run has none yet."""
    own = RunPaths(folder).config
    if not own.is_file():
        return None
    places = (open_run(folder)[1].snapshots / resume, Path(resume))
    of_branch = [place.with_name(own.name) for place in places if place.parent.name.startswith(ABANDONED_FOLDER)]
    return next((file for file in of_branch if file.is_file()), own)


def prepare_data(
    config: Config, cache: Path, progress: ReportProgress, tokenizer: Path | None = None
) -> tuple[Config, Corpus]:
    """Reads and tokenizes the data, and fills in the settings that depend on it. Raises ConfigError.

    `tokenizer` is the folder of the tokenizer that the run trained earlier. It is used instead of training one again,
    because a dataset that has changed since then would give tokens that the model did not learn.
    """
    progress(f"reading {config.data.dataset_name}", 0, 0)  # the Hub may let it wait
    task = task_of(config)
    trains = config.data.tokenizer in TRAINED_TOKENIZERS and config.acts("data.tokenizer")
    if tokenizer is None or not trains or not (tokenizer / "tokenizer.json").is_file():
        return task.prepare(config, cache, progress)
    kept = _with_values(config, ["data"], {"tokenizer": str(tokenizer.absolute())})
    prepared, corpus = task.prepare(kept, cache, progress)
    return _with_values(prepared, ["data"], {"tokenizer": config.data.tokenizer}), corpus


def no_run_to_resume(folder: Path) -> ConfigError:
    """Returns the error for `--resume` without a configuration file, in a folder that has none either."""
    runs = [path.parent.name for path in folder.parent.glob(f"*/{RunPaths(folder).config.name}")]
    near = get_close_matches(folder.name, sorted(runs), n=1)
    hint = f" (did you mean {folder.parent / near[0]}?)" if near else ""
    return ConfigError(
        f"{folder} contains no run to resume{hint}; set --output-dir to a run folder, or pass the configuration of a "
        "new run."
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes one JSON object. Raises SansGPUError if the file cannot be written."""
    with write_failures_as(SansGPUError, path):
        write_text(path, json.dumps(value, indent=2) + "\n")


def open_any(config: Config) -> Config:
    """Makes local paths in the configuration absolute, so that its file works from any folder."""
    for path in declared_keys(type(config), "input_path"):
        *section, key = path.split(".")
        name = setting(config, path)
        if name and name not in BUILT_IN_NAMES and (local := local_path(name)).exists():
            config = _with_values(config, section, {key: os.path.abspath(local)})
    return config


def _with_values(values: Any, section: Sequence[str], changes: dict[str, Any]) -> Any:
    """Returns a copy of `values` with changes in a nested section."""
    if not section:
        return values.model_copy(update=changes)
    first, *inner = section
    return values.model_copy(update={first: _with_values(getattr(values, first), inner, changes)})


def require_unclaimed_folders(paths: RunPaths) -> None:
    """Raises ConfigError unless a run may write to its folder and to its snapshot and log folders."""
    require_folder(paths.root, "run")
    require_no_links(paths.written)
    for folder, kind in ((paths.final, "model"), (paths.tokenizer, "tokenizer")):
        require_folder(folder, kind)
    _require_other_folders(paths)


def require_own_snapshots(paths: RunPaths) -> None:
    """Raises ConfigError unless the run's snapshots, which a command will move or delete, belong to this run."""
    require_folder(paths.root.resolve(), "run", "run")
    require_no_links([paths.snapshots])
    _require_other_folders(paths)


def _require_other_folders(paths: RunPaths) -> None:
    """Raises ConfigError if a snapshot or log folder outside of the run's folder belongs to something else."""
    for folder, kind, key in _elsewhere(paths):
        owner = _owner_of(folder)
        if owner and owner != _owner_of(paths.root) and _is_used(folder):
            raise ConfigError(f"{folder} contains another run's {kind}; choose another {key}.")
        require_folder(folder, kind, key)


def mark_other_folders(paths: RunPaths, until_end: ExitStack) -> None:
    """Marks snapshot and log folders outside of the run's folder. Raises ConfigError if one cannot be written.

    The run's folder is marked first: a process killed in between must not leave folders that belong to no run.
    When `until_end` closes, the marks are removed from folders that the run has not used.
    """
    mark = _mark_of(paths.root)
    for folder, kind, key in _elsewhere(paths):
        until_end.callback(cleanup_of(folder, MARK))
        with write_failures_as(ConfigError, paths.root, "--output-dir"):
            write_mark(paths.root, mark)
        with write_failures_as(ConfigError, folder, key):
            make_folder(folder)
            write_mark(folder, FolderMark(kind, run=mark.run))


def mark_run(paths: RunPaths, config: Config) -> None:
    """Marks the run's folder with the configuration that is about to be written. Raises OSError."""
    write_mark(paths.root, replace(_mark_of(paths.root), configuration=identity(config)))


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


def _elsewhere(paths: RunPaths) -> Iterator[tuple[Path, str, str]]:
    """Yields (path, kind, configuration key) of snapshot and log folders outside of the run's folder."""
    seen = {paths.root.resolve()}
    named = (paths.checkpoint_dir, "snapshots", "checkpoint_dir"), (paths.logging_dir, "logs", "logging_dir")
    for folder, kind, key in named:
        if folder is not None and folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield folder, kind, f"training.{key}"


def _mark_of(root: Path) -> FolderMark:
    """Returns the mark of a run's folder, with a new identity if it has none."""
    mark = read_mark(root) or FolderMark("run")
    return replace(mark, run=mark.run or uuid.uuid4().hex)


def _run_of(folder: Path) -> str | None:
    """Returns the identity of the run in a folder's mark, or None."""
    mark = read_mark(folder)
    return mark.run if mark else None


def _owner_of(folder: Path) -> str | None:
    """Returns the identity of the run that a folder belongs to, by its mark or the run folder around it, or None.

    A run without an identity is identified by its path.
    """
    if run := _run_of(folder):
        return run
    for place in (resolved := folder.resolve(), *resolved.parents):
        if is_output(place, "run"):
            return _run_of(place) or str(place)
    return None


def _is_used(folder: Path) -> bool:
    return folder.exists() and any(path.name != MARK for path in folder.iterdir())
