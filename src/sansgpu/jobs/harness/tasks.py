"""Loads tasks of lm-evaluation-harness: by name, or from local YAML files, whose code runs only if that is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from lm_eval.tasks._yaml_loader import load_yaml

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.parse import read_values
from sansgpu.config.paths import local_path
from sansgpu.config.wording import first_line, truncate
from sansgpu.jobs.harness.safety import ALLOW, require_no_code
from sansgpu.jobs.harness.templates import TemplateError
from sansgpu.machine.hub import is_unreachable, reading_hub, why_unread

FEWSHOT_SEED = 1234  # the library's default
SUFFIXES = (".yaml", ".yml")
_DEFINING = ("task", "group", "class")  # a file without these keys is only included by others


def load_tasks(names: Sequence[str], fewshot: int | None, trusts: bool) -> dict[str, Any]:
    """Returns tasks and groups as `lm_eval.evaluate` takes them. Raises ConfigError if one cannot be loaded.

    Names with a slash or ending in .yaml are local files or folders of tasks; others are names in the library, in which
    `*` matches anything. `fewshot` replaces the number of examples in prompts; `trusts` allows code of local tasks.
    """
    datasets.disable_progress_bars()
    local = [name for name in names if _is_local(name)]
    manager = TaskManager(include_defaults=len(local) < len(names))
    chosen: list[str] = []
    for name in names:
        chosen += _add_local(manager, local_path(name), trusts) if name in local else _known(manager, name)
    with reading_hub():
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
        for name in dict.fromkeys(chosen):
            with task_errors(name):
                found = manager.load([name])
            for part in loaded:
                loaded[part].update(found.get(part, {}))
    for name, task in loaded["tasks"].items():
        _prepare(name, task, fewshot)
    return loaded


@contextmanager
def task_errors(name: str) -> Iterator[None]:
    """Converts the exceptions of a task's code, data or templates to a ConfigError."""
    try:
        yield
    except (SansGPUError, MemoryError):
        raise
    except TemplateError as error:
        raise ConfigError(f"task {name} cannot be used: {error}.") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"task {name} needs the package {error.name}, which is not installed; install it.") from error
    except OSError as error:
        if isinstance(error, (FileNotFoundError, datasets.exceptions.DatasetsError)) or not is_unreachable(error):
            raise ConfigError(
                f"the data of task {name} cannot be loaded ({first_line(error)}); correct its dataset_path."
            ) from error
        raise ConfigError(
            f"the dataset of task {name} is not in the cache of `datasets`, and {why_unread(first_line(error))}; run "
            "the command once with access to the Hub."
        ) from error
    except Exception as error:  # tasks are foreign code and data, which may raise anything
        raise ConfigError(
            f"task {name} cannot be used ({type(error).__name__}: {first_line(error)}); correct its YAML file, or "
            "choose a different task."
        ) from error


def _is_local(name: str) -> bool:
    return "/" in name or "\\" in name or name.endswith(SUFFIXES)


def _known(manager: TaskManager, name: str) -> list[str]:
    """Returns the library's tasks, groups and tags that match a name. Raises ConfigError if there are none."""
    found: list[str] = manager.match_tasks([name])
    if found:
        return found
    near = get_close_matches(name, manager.all_tasks, n=1)
    advice = f"; did you mean {near[0]}?" if near else "; see `lm_eval ls tasks` for all tasks."
    here = f", and for the folder here write ./{name}" if local_path(name).is_dir() else ""
    raise ConfigError(f"lm-evaluation-harness has no task {truncate(name)}{here}{advice}")


def _add_local(manager: TaskManager, path: Path, trusts: bool) -> list[str]:
    """Adds the tasks of a file or folder to the index; returns the names of those that belong to no group of it."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; pass a task's YAML file, a folder of such files, or a task's name.")
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES) if path.is_dir() else [path]
    index: dict[str, Any] = {}
    for file in files:
        values = _read(file, trusts, ())
        if not any(key in values for key in _DEFINING):
            if path.is_dir():
                continue
            raise ConfigError(f"{file} defines no task, because it has no key `task`; add one with its name.")
        _name_of(file, values)
        _find_data_beside(values, file.parent)
        TaskIndex.process_cfg(values, file, index)
    if not index:
        raise ConfigError(f"{path} has no YAML file that defines a task; pass a folder with one.")
    for name, entry in index.items():
        if entry.kind.name != "TAG" and manager.task_index.get(name) is not None:
            raise ConfigError(f"{entry.yaml_path}: lm-evaluation-harness has a task {name}, too; choose a new name.")
        entry.yaml_path = None  # so that the library does not read the file again, with code
    manager.task_index.update(index)
    members = {name for entry in index.values() if entry.kind.name == "GROUP" for name in _members(entry.cfg)}
    return [
        name
        for name, entry in index.items()
        if entry.kind.name != "TAG" and name not in members and members.isdisjoint(entry.tags)
    ]


def _members(group: dict[str, Any]) -> Iterator[str]:
    for member in group.get("task") or ():
        yield str(member.get("task", member.get("group"))) if isinstance(member, dict) else str(member)


def _name_of(file: Path, values: dict[str, Any]) -> str:
    """Returns the name of a task or group. Raises ConfigError if it is missing or not a string."""
    name = values.get("group", values.get("task"))
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{file}: the key `task` or `group` must be the name of the task or group.")
    return name


def _read(file: Path, trusts: bool, including: tuple[Path, ...]) -> dict[str, Any]:
    """Reads a YAML file and those that it includes. Raises ConfigError if they would run code that is not allowed."""
    if trusts:
        with task_errors(str(file)):
            return dict(load_yaml(file))
    if file.resolve() in including:
        raise ConfigError(f"{file} includes itself; remove the line.")
    try:
        values = read_values(file)
    except ConfigError as error:
        if "'!function'" in str(error):
            raise ConfigError(f"{file} imports Python code with !function; {ALLOW}.") from None
        raise
    included = values.pop("include", None) or []
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        more = _read(file.parent / str(name), trusts, (*including, file.resolve()))
        merged.update({key: value for key, value in more.items() if key != "task_list"})
    merged.update(values)
    require_no_code(file, merged)
    return merged


def _find_data_beside(values: dict[str, Any], folder: Path) -> None:
    """Completes the paths of data files that are not in the current folder but beside the task's file."""

    def find(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: find(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [find(inner) for inner in value]
        beside = folder / value if isinstance(value, str) else folder
        return str(beside) if isinstance(value, str) and not Path(value).exists() and beside.exists() else value

    options = values.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        options["data_files"] = find(options["data_files"])


def _prepare(name: str, task: Any, fewshot: int | None) -> None:
    """Sets a task's number of examples as `lm_eval.simple_evaluate` does. Raises ConfigError if it cannot run here."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(f"task {name} runs Python code that the model writes, which sansgpu does not; remove it.")
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(f"task {name} needs a model of images or sounds; remove it.")
    known = task.get_config("num_fewshot")
    if fewshot is not None and known != 0:  # 0 in a task's file means that it must have none
        task.set_config(key="num_fewshot", value=fewshot)
    elif known is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
