"""Opens trained models: runs, exported folders, Hugging Face models and GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sansgpu.config import ConfigError, RunPaths
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import contains_run, local_path
from sansgpu.config.schema import Config
from sansgpu.config.training import Precision
from sansgpu.events.progress import ReportProgress, Warn, ignore_progress
from sansgpu.kernels.library import load_kernels_and_allocators
from sansgpu.kernels.matmul import INTEGERS
from sansgpu.kernels.roofline import resolve_precision
from sansgpu.machine.probe import limit_tokenizer_threads, resolve_threads
from sansgpu.models.formats.folders import DECODER_CLASSES
from sansgpu.models.formats.gguf_source import is_gguf
from sansgpu.models.huggingface.sentence_embedding import MODULES, scores_by_logits
from sansgpu.models.huggingface.source import pretrained_config
from sansgpu.tasks.capabilities import can
from sansgpu.tasks.configuration import SCHEMA, task_class
from sansgpu.tasks.inference import load_for_use
from sansgpu.tasks.registry import TASKS, task_of
from sansgpu.tasks.task import ModelSource, TaskClass, TrainedModel, Verb
from sansgpu.train.run_folders import open_run, with_objective
from sansgpu.train.schedule import ends_with_best
from sansgpu.train.snapshots import Progress, Snapshot, best_snapshot, find_snapshot, snapshots

FINAL = "final"  # names the snapshot whose model is in final/; see `require_snapshot`
_GENERATORS = (*DECODER_CLASSES, "ForConditionalGeneration")  # ends of the names of classes that generate text
_REFUSALS: dict[Verb, str] = {
    "generate": "which cannot generate text; this command",
    "complete": "which cannot generate text; this command",
    "gguf": "but --format gguf",
}


@dataclass(frozen=True)
class ModelRequest:
    """A run, a model's folder or file, or a Hub name, and the Python code that the user allows to run.

    `remote_code` allows the model's own code. `objective` allows a class outside the package: the one that implements
    the run's task or, if the task is built in, one that only prepares the data of an evaluation.
    """

    target: str
    snapshot: str = FINAL
    remote_code: bool = False
    objective: str | None = None
    precision: Precision = "auto"  # auto: the precision of the run; for other models, each command chooses


def open_model(
    request: ModelRequest, verb: Verb, warn: Warn, progress: ReportProgress = ignore_progress, computes: bool = True
) -> TrainedModel:
    """Loads the model of a run, or any other model that a task can use for `verb`. Raises ConfigError if none can.

    Without `computes`, the model is only for reading its weights.
    """
    target, objective = request.target, request.objective
    folder = local_path(target)
    if contains_run(folder):
        config, paths = open_run(folder)
        task = class_of_run(folder, config, verb, objective)
        if config.outside_class is not None:
            config, paths = open_run(folder)  # again, because the class is imported now and may declare defaults
        snapshot = require_snapshot(folder, config, paths, request.snapshot, warn)
        source = ModelSource(target, request.remote_code, config, snapshot, paths.tokenizer, computes)
    else:
        if objective is not None:
            raise ConfigError(f"{target} is not a run; remove --objective.")
        task = class_of_model(target, verb)
        if request.snapshot != FINAL:
            raise ConfigError(f"{target} is not a run, so it has no snapshots; remove --snapshot.")
        source = ModelSource(target, request.remote_code, computes=computes)
    device, precision = torch.device("cpu"), "fp32"
    if verb not in task.verbs_without_kernels:
        device, precision = _set_up(source, request.precision, warn)
    progress(f"loading {target}", 0, 0)
    return load_for_use(task, source, device, precision, request.precision != "auto")


def class_of_run(folder: Path, config: Config, verb: Verb, objective: str | None) -> TaskClass:
    """Returns the task of a run. Raises ConfigError if it cannot do `verb`, or needs a class that was not named."""
    if config.outside_class is not None:
        with_objective(config, folder, objective)  # raises if `objective` does not name it
        task_class(config.outside_class)
    elif objective is not None and verb != "evaluate":
        raise ConfigError(f"{folder} is a run of the built-in task {config.task}; remove --objective.")
    task = task_of(config)
    if not can(task, verb):
        raise _refusal(str(folder), config, verb)
    return task


def require_snapshot(folder: Path, config: Config, paths: RunPaths, name: str, warn: Warn) -> Snapshot:
    """Returns the snapshot of a run that is called `name`. Raises ConfigError if there is none.

    `final` is the best one if the run stopped early or has `training.load_best_model_at_end`, otherwise the latest.
    """
    snapshot = find_snapshot(paths.snapshots, "latest" if name == FINAL else name, warn)
    if snapshot is None:
        raise ConfigError(f"{folder} has no snapshot yet; train it first.")
    if name == FINAL and ends_with_best(config.training, Progress(**snapshot.state()["progress"])):
        best = best_snapshot(snapshots(paths.snapshots))
        return snapshot if best is None else find_snapshot(paths.snapshots, best.folder.name, warn) or snapshot
    return snapshot


def class_of_model(target: str, verb: Verb) -> TaskClass:
    """Returns the task that recognizes a model, or else the one that accepts any Hugging Face model for this verb."""
    able = [task for task in TASKS.values() if can(task, verb)]
    found = next((task for task in able if task.recognizes(target)), None)
    if found is None and verb == "predict" and scores_by_logits(local_path(target) / MODULES):
        raise ConfigError(
            f"{target} scores pairs of texts by the logits of two tokens, which sansgpu does not support; use a "
            "version of the model for sequence classification, or train task classify, which gives it a head for "
            "scores."
        )
    found = found or next((task for task in able if verb in task.verbs_for_any_model), None)
    if found is None:
        raise ConfigError(
            f"{target} is neither a run of task {_tasks_with(verb)} nor a folder exported from one; pass one of these."
        )
    return found


def only_embeds(request: ModelRequest) -> bool:
    """Returns whether a model computes embeddings of texts, and does not generate texts."""
    target, folder = request.target, local_path(request.target)
    if contains_run(folder):
        config, _ = open_run(folder)
        return config.outside_class is None and can(task_of(config), "embed")
    recognizing = [task for task in TASKS.values() if task.recognizes(target)]
    if recognizing or is_gguf(target):
        return any(can(task, "embed") for task in recognizing)
    model = ModelConfig(name_or_path=target, trust_remote_code=request.remote_code)
    names = pretrained_config(model).architectures or []
    return bool(names) and not any(name.endswith(_GENERATORS) for name in names)


def _refusal(target: str, config: Config, verb: Verb) -> ConfigError:
    if verb == "chat" and can(task_of(config), "generate"):
        return ConfigError(f"{target} was not trained on conversations; use `sansgpu generate` instead.")
    clause = _REFUSALS.get(verb, "but this command")
    takes_its_model = verb == "embed" or (verb != "predict" and can(task_of(config), "generate"))
    is_accepted = takes_its_model and _takes_any_model(verb)
    advice = f"; pass its folder {RunPaths(Path(target)).final}" if is_accepted else ""
    needed = f"needs one of task {_tasks_with(verb)}{advice}"
    return ConfigError(f"{target} is a run of task {config.task}, {clause} {needed}.")


def _takes_any_model(verb: Verb) -> bool:
    return any(verb in task.verbs_for_any_model for task in TASKS.values())


def _tasks_with(verb: Verb) -> str:
    return " or ".join(dict.fromkeys(task.settings.task for task in TASKS.values() if can(task, verb)))


def _set_up(source: ModelSource, wanted: Precision, warn: Warn) -> tuple[torch.device, str]:
    """Sets the threads, loads the kernels, and returns the device and the precision of matrix products.

    Raises ConfigError if they cannot be computed in the wanted precision.
    """
    config = source.config or SCHEMA()
    training, device = config.training, config.training.get_effective_device()
    torch.set_num_threads(resolve_threads(training))
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    kernels = load_kernels_and_allocators(training.kernels, device, True, warn)
    if wanted in INTEGERS and kernels == "torch":
        raise ConfigError(
            f"{wanted} requires sansgpu's kernels, which are not loaded; set --precision to auto or fp32."
        )
    if wanted != "auto":
        return device, wanted
    precision = str(source.snapshot.state()["environment"]["precision"]) if source.snapshot else "fp32"
    if device.type != "cpu" or precision == "bf16":
        precision = resolve_precision(training, device)
    if precision in INTEGERS and kernels == "torch":
        precision = "fp32"
    return device, precision
