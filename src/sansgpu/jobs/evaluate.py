"""Evaluation of runs, Hugging Face models and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sansgpu.config import ConfigError, TaskSettings
from sansgpu.config.paths import contains_run, local_path
from sansgpu.config.schema import Config
from sansgpu.config.section import declared_keys
from sansgpu.data.forms.files import file_notes
from sansgpu.data.sources import has_conversations
from sansgpu.events.progress import ReportProgress, Warn
from sansgpu.machine.cache_folder import cache_dir
from sansgpu.machine.execution import Execution
from sansgpu.planning.resolve import prepare_data
from sansgpu.tasks.evaluation import RowPredictor
from sansgpu.tasks.registry import TASKS
from sansgpu.tasks.task import Corpus, DetailedEvaluator, EvaluationRequest, PredictionWriter, Verb
from sansgpu.train.evaluate import evaluate
from sansgpu.train.loading import ModelRequest, class_of_model, open_model
from sansgpu.train.run_folders import require_run, with_objective


def evaluate_model(
    model: ModelRequest,
    data: str | None,
    window: int | None,
    progress: ReportProgress,
    warn: Warn,
    reward: str | None = None,
    write_rows: Callable[[Iterable[dict[str, Any]]], None] | None = None,
) -> tuple[dict[str, Any], TaskSettings]:
    """Returns the eval event of a model on `data`, or of a run on its own validation split, and its task's settings.

    `reward` replaces the reward that a run was trained with; it may be Python code. `write_rows` is called with
    the rows and their predictions. Raises ConfigError if the model or the data cannot be used.
    """
    target, objective = model.target, model.objective
    verb: Verb = "chat" if data is not None and _reads_conversations(target, data) else "evaluate"
    loaded = open_model(model, verb, warn, progress)
    task_class, config, source = loaded.task_class, loaded.config, loaded.source
    if objective not in (None, config.task) and data is not None:
        raise ConfigError("--objective has no effect with --data; remove one of them.")
    if window is not None and not task_class.has_windows:
        raise ConfigError("--window is only for decoders; remove it to use the length that the model was trained with.")
    if window is not None and data is None:
        raise ConfigError("--window requires --data; remove --window, or add --data.")
    if reward is not None:
        _require_reward(config, target)
    if data is None and source.snapshot is None:
        raise ConfigError(f"{target} is not a run, so it has no validation split; pass a dataset with --data.")
    cache = cache_dir(config.data.cache_dir)

    def own_corpus() -> Corpus:
        allowed = with_objective(config, source.path, objective)
        return prepare_data(allowed, cache, progress, source.tokenizer)[1]

    if data is not None:
        for note in file_notes(config.data.for_dataset(data), config.settings.rows):
            warn(note)
    request = EvaluationRequest(data, window, objective, reward, own_corpus, cache, progress, warn)
    evaluator = task_class.evaluator_for(loaded, request)
    if isinstance(evaluator, PredictionWriter):
        require_run(source.path)
    if write_rows is not None and not isinstance(evaluator, RowPredictor):
        raise ConfigError(f"models of task {config.task} make no predictions for rows; remove --predictions.")
    execution = Execution(task_class.evaluation_batch(config), precision=loaded.precision, device=loaded.device)
    metrics = evaluate(evaluator, execution, progress=progress)
    assert metrics is not None
    if isinstance(evaluator, DetailedEvaluator):
        metrics = evaluator.detailed(metrics)
    if isinstance(evaluator, PredictionWriter):
        evaluator.save(source.path)
    if write_rows is not None and isinstance(evaluator, RowPredictor):
        write_rows(evaluator.predicted_rows(loaded.tokenizer))
    return {"event": "eval", "step": source.step, **metrics}, task_class.settings


def _require_reward(config: Config, target: str) -> None:
    """Raises ConfigError if --reward is passed for a run that is not trained with a reward."""
    keys = [key for key, noun in declared_keys(type(config), "runs_code").items() if noun == "reward"]
    if not any(config.acts(key) for key in keys):
        tasks = dict.fromkeys(settings.task for key in keys for settings in config.tasks.with_key(key))
        raise ConfigError(
            f"--reward is only for runs of task {' or '.join(tasks)}, but {target} is of task {config.task}; remove it."
        )


def _reads_conversations(target: str, data: str) -> bool:
    """Returns whether a causal language model that is not a run is to be evaluated on conversations."""
    is_run = contains_run(local_path(target))
    return not is_run and class_of_model(target, "evaluate") is TASKS["pretrain"] and has_conversations(data)


def link_prediction(
    model: ModelRequest, data: str | None, limit: int | None, progress: ReportProgress, warn: Warn
) -> dict[str, Any]:
    """Returns `tail` metrics of held-out triples, and `head` metrics if the model was trained with inverse relations.

    Queries the test split of `data`, or else its validation split, or else all of it. Without `data`, queries the run's
    own held-out triples that do not occur in training. All other triples of `data` and of the run are known facts,
    which filtered ranking excludes. `limit` is the maximum number of triples per side. Raises ConfigError if there is
    nothing to query.
    """
    loaded = open_model(model, "rank", warn, progress)
    report = loaded.task_class.rank_entities(loaded, data, limit, progress, warn)
    return {"event": "link_prediction", "step": loaded.source.step, **report}
