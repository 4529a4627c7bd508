"""Evaluates embedding models on tasks of MTEB, the Massive Text Embedding Benchmark, with its library."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sansgpu.config import ConfigError
from sansgpu.config.errors import require
from sansgpu.config.paths import contains_run, local_path
from sansgpu.config.wording import first_line
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.jobs.embed import open_encoder
from sansgpu.machine.hub import failure, reading_hub
from sansgpu.train.loading import ModelRequest
from sansgpu.train.run_folders import require_run

if TYPE_CHECKING:  # mteb is optional
    from mteb import AbsTask, ModelResult

BATCH = 1024  # texts that mteb passes to its data loader at a time; the engine makes its own batches
RESULTS = "mteb"  # folder of a run for mteb's files


def evaluate_mteb(model: ModelRequest, tasks: str, progress: ReportProgress, warn: Warn) -> dict[str, Any]:
    """Returns the scores of an embedding model on tasks, which are separated by commas.

    A task is the name of one in the library, whose data are downloaded or read from the Hub's cache, or a folder; see
    `local_tasks`. The scores of a run are also written to its folder as mteb writes them. Raises ConfigError if a task
    does not exist, or its data cannot be used.
    """
    require("--mteb", "mteb")
    from mteb import evaluate
    from mteb.cache import ResultCache

    from sansgpu.jobs.mteb.encoder import BenchmarkedModel

    run = local_path(model.target)
    is_run = contains_run(run)
    if is_run:
        require_run(run)
    with quiet():
        found = open_tasks(tasks)
        encoder = BenchmarkedModel(open_encoder(model, warn, progress), progress)
        results = []
        for task in found:
            encoder.task = name = task.metadata.name
            progress(f"reading {name}", 0, 0)
            try:
                with reading_hub():
                    task.load_data()
            except Exception as error:  # datasets raises errors of all kinds
                raise ConfigError(
                    f"--mteb {name}: its data cannot be read ({failure(error)}); run the command once with access to "
                    "the Hub, or pass a folder with the task's data."
                ) from None
            try:
                cache = ResultCache(run / RESULTS) if is_run else None
                options = {"batch_size": BATCH}
                result = evaluate(
                    encoder,
                    task,
                    cache=cache,
                    overwrite_strategy="always",
                    encode_kwargs=options,
                    show_progress_bar=False,
                    co2_tracker=False,
                )
            except (KeyError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"--mteb {name}: its data do not fit the task ({first_line(error)}); correct the columns or the "
                    "type of the task."
                ) from None
            results.append(_scores(task, result))
    mean = sum(result["main_score"] for result in results) / len(results)
    step = encoder.loaded.source.step
    return {"event": "mteb", "step": step, "mean_main_score": mean, "tasks": results}


def open_tasks(names: str) -> list[AbsTask]:
    """Returns the tasks with these names, or in these folders. Raises ConfigError."""
    from mteb import get_task

    from sansgpu.jobs.mteb.local_tasks import local_task

    found = []
    for name in dict.fromkeys(filter(None, (part.strip() for part in names.split(",")))):
        if (folder := local_path(name)).is_dir():
            found.append(local_task(folder))
            continue
        if folder.is_absolute() or name.startswith((".", "~")):
            raise ConfigError(f"--mteb {name} does not exist; pass the name of a task or a folder with its data.")
        try:
            task = get_task(name)
        except KeyError as error:
            raise ConfigError(f"--mteb {name} is not a task of mteb ({error.args[0]}); correct its name.") from None
        if task.metadata.modalities != ["text"]:
            raise ConfigError(f"--mteb {name} is not a task for texts; choose another one.")
        found.append(task)
    if not found:
        raise ConfigError("--mteb names no task; pass names of tasks or folders, separated by commas.")
    return found


def _scores(task: AbsTask, result: ModelResult) -> dict[str, Any]:
    (found,) = result.task_results
    return {
        "name": task.metadata.name,
        "type": task.metadata.type,
        "metric": task.metadata.main_score,
        "main_score": float(found.get_score()),
        "seconds": found.evaluation_time,
        "scores": found.scores,
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Context without the log messages, warnings and progress bars of mteb and datasets."""
    import datasets

    logger = logging.getLogger("mteb")
    before, had_no_bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
        if not had_no_bars:
            datasets.enable_progress_bars()
