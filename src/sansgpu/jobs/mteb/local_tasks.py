"""Tasks of mteb whose data are in a local folder, described by its file task.yaml. Runs no code from the folder."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from mteb import abstasks
from mteb.abstasks import AbsTask
from mteb.abstasks.task_metadata import TaskMetadata
from pydantic import ValidationError

from sansgpu.config import ConfigError
from sansgpu.config.parse import read_values
from sansgpu.config.wording import shown

DESCRIPTION = "task.yaml"
REVISION = "local"


class TaskType(NamedTuple):
    """A type of task: its class in mteb, and its main score."""

    task_class: type[AbsTask]
    main_score: str


TYPES = {
    "STS": TaskType(abstasks.AbsTaskSTS, "cosine_spearman"),
    "Classification": TaskType(abstasks.AbsTaskClassification, "accuracy"),
    "PairClassification": TaskType(abstasks.AbsTaskPairClassification, "max_ap"),
    "Clustering": TaskType(abstasks.AbsTaskClusteringLegacy, "v_measure"),
    "Retrieval": TaskType(abstasks.AbsTaskRetrieval, "ndcg_at_10"),
}
# Keys of task.yaml beside `type`, which are those of mteb's TaskMetadata, with their defaults.
KEYS: dict[str, Any] = {
    "name": None, "description": "A local task.", "main_score": None, "eval_splits": ["test"],
    "eval_langs": ["eng-Latn"], "prompt": None,
}  # fmt: skip


def local_task(folder: Path) -> AbsTask:
    """Returns the task in a folder of data files that `datasets.load_dataset` reads. Raises ConfigError."""
    file = folder / DESCRIPTION
    if not file.is_file():
        raise ConfigError(f"--mteb {folder} has no {DESCRIPTION}; add one with `type: STS` or another type of task.")
    given = read_values(file)
    if unknown := next((key for key in given if key not in ("type", *KEYS)), None):
        near = get_close_matches(str(unknown), ["type", *KEYS], n=1)
        raise ConfigError(
            f"{file}: unknown key {shown(unknown)}"
            + (f" (did you mean {near[0]}?)" if near else "")
            + f"; use only type, {', '.join(KEYS)}."
        )
    kind = TYPES.get(str(given.get("type")))
    if kind is None:
        raise ConfigError(f"{file}: type is {shown(given.get('type'))}, but must be one of {', '.join(TYPES)}.")
    values = {**KEYS, **given}
    values["name"] = values["name"] or folder.resolve().name
    values["main_score"] = values["main_score"] or kind.main_score
    source = {"path": str(folder.resolve()), "revision": REVISION}
    try:
        metadata = TaskMetadata(dataset=source, **values)
        metadata._validate_metadata()
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"{file}: {_problem(error)}; correct it.") from None
    made: AbsTask = type("LocalTask", (kind.task_class,), {"metadata": metadata})()
    return made


def _problem(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split()).rstrip(".")
    first = error.errors()[0]
    key, problem = ".".join(map(str, first["loc"])), first["msg"]
    return f"{key} is {shown(first['input'])}, but {problem[:1].lower()}{problem[1:]}"
