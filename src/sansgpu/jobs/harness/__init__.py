"""Evaluates models on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from sansgpu.config import ConfigError, RunPaths, SansGPUError
from sansgpu.config.errors import require
from sansgpu.config.plain_data import InvalidDataError
from sansgpu.events.event import finite
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.files.atomic import write_failures_as, write_text
from sansgpu.files.reading import read_object
from sansgpu.jobs.generate import open_generator
from sansgpu.machine.distributed.world import require_one_process
from sansgpu.train.loading import ModelRequest, only_embeds
from sansgpu.train.run_folders import require_run

RESULTS_FILE = "harness.json"  # in the run's folder
BOOTSTRAP_SAMPLES = 1000  # for the standard errors of metrics that are not means


@dataclass(frozen=True)
class HarnessRequest:
    """The options of `sansgpu eval --harness`. `limit` is the maximum number of examples per task."""

    model: ModelRequest
    tasks: Sequence[str]
    fewshot: int | None = None
    limit: int | None = None
    chat: bool = False  # whether to put prompts into the model's chat template


def evaluate_on_harness(request: HarnessRequest, warn: Warn, progress: ReportProgress) -> dict[str, Any]:
    """Returns the metrics of each task, and adds them to harness.json in the folder of a run.

    Raises ConfigError if the model or a task cannot be used.
    """
    require("--harness", "lm_eval")
    require_one_process("eval --harness")
    target = request.model.target
    if only_embeds(request.model):
        raise ConfigError(f"{target} computes embeddings; --harness needs a model that generates text.")
    started = time.monotonic()
    with contained(request.model.remote_code):
        from sansgpu.jobs.harness.model import HarnessModel
        from sansgpu.jobs.harness.tasks import load_tasks, task_errors

        progress("loading tasks", 0, 0)
        tasks = load_tasks(request.tasks, request.fewshot, request.model.remote_code)
        loaded = open_generator(request.model, warn, progress)
        if request.chat and getattr(loaded.tokenizer, "chat_template", None) is None:
            raise ConfigError(f"{target} has no chat template; remove --apply-chat-template.")
        if loaded.source.snapshot is not None:
            require_run(loaded.source.path)
        import lm_eval

        with task_errors(" or ".join(tasks["tasks"])):
            found: Any = lm_eval.evaluate(
                HarnessModel(loaded, warn, progress),
                tasks,
                limit=request.limit,
                bootstrap_iters=BOOTSTRAP_SAMPLES,
                log_samples=False,
                apply_chat_template=request.chat,
                fewshot_as_multiturn=request.chat,
            )
    settings = {
        "step": loaded.source.step,
        "precision": loaded.precision,
        "limit": request.limit,
        "chat_template": request.chat,
    }
    results = {name: _result(name, found) for name in found["results"]}
    if loaded.source.snapshot is not None:
        _record(RunPaths(loaded.source.path), {name: {**settings, **result} for name, result in results.items()})
    return {"event": "harness", **settings, "tasks": results, "seconds": time.monotonic() - started}


def _result(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the version, the number of examples, and the metrics of a task or a group of tasks."""
    values: dict[str, Any] = found["results"][name]
    metrics = {
        key.removesuffix(",none"): value
        for key, value in values.items()
        if "," in key and isinstance(value, (int, float))  # others are "N/A"
    }
    result = {"examples": values.get("sample_len"), "fewshot": found["n-shot"].get(name)}
    return {**result, "version": found["versions"].get(name), "metrics": finite(metrics)}


def _record(paths: RunPaths, results: dict[str, Any]) -> None:
    """Adds results to the run's file, replacing earlier ones of the same tasks."""
    file = paths.root / RESULTS_FILE
    try:
        known = read_object(file) if file.exists() else {}
    except (ConfigError, InvalidDataError):
        raise ConfigError(f"{file} is damaged; delete it, and evaluate again.") from None
    with write_failures_as(SansGPUError, file):
        write_text(file, json.dumps({**known, **results}, indent=2) + "\n")


@contextmanager
def contained(trusts: bool) -> Iterator[None]:
    """Context in which the library prints nothing, starts no processes, and renders templates in Jinja's sandbox.

    Unless `trusts`, this happens in a child process, which can be given only text and numbers.
    """
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))
        import logging

        import lm_eval.api.metrics
        import lm_eval.api.task
        import lm_eval.utils

        from sansgpu.jobs.harness.templates import render, sandboxed_environment

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        replaced: list[tuple[Any, str, Any]] = [
            (lm_eval.utils, "env", sandboxed_environment()) if trusts else (lm_eval.utils, "apply_template", render),
            (lm_eval.api.task, "tqdm", lambda items, **options: items),
            (lm_eval.api.metrics, "bootstrap_stderr", _bootstrap_error),
        ]
        for module, name, value in replaced:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _bootstrap_error(metric: Callable[[Sequence[Any]], float], values: Sequence[Any], iters: int) -> float:
    """Estimates the standard error of a metric from random samples, like the library but in this process."""
    from lm_eval.api.metrics import sample_stddev

    draws = random.Random(0)
    return float(sample_stddev([metric(draws.choices(values, k=len(values))) for _ in range(iters)]))
