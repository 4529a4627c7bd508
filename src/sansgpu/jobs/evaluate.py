"""Evaluation of runs, Hugging Face models and GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sansgpu.config import Config, ConfigError, DataConfig
from sansgpu.data.pack import PackedWindows, TextWindows, Windows
from sansgpu.data.shards import ReportProgress, build_store
from sansgpu.data.sources import open_single
from sansgpu.data.split import all_documents
from sansgpu.jobs.loading import LoadedModel, is_filling, is_fine_tuning, load_model
from sansgpu.machine.compiled import compiled_cache
from sansgpu.machine.probe import cache_dir, limit_tokenizer_threads, resolve_device, resolve_precision, resolve_threads
from sansgpu.models import TransformerLM
from sansgpu.planning.kernels import load_kernels
from sansgpu.tasks import task_of
from sansgpu.tasks.language_modeling import LanguageModeling
from sansgpu.train.evaluate import evaluate
from sansgpu.train.run_folders import with_objective
from sansgpu.train.step import StepPlan

EVALUATION_TOKENS = 4096  # per micro-batch


def evaluate_model(
    target: str,
    data: str | None,
    snapshot: str,
    window: int | None,
    progress: ReportProgress,
    warn: Callable[[str], None],
    remote_code: bool = False,
    objective: str | None = None,
) -> dict[str, Any]:
    """Returns the eval event of a model on `data`, or of a run on its own validation split.

    `remote_code` allows the model's own Python code to run. `objective` names the Python class that prepares the run's
    data. Raises ConfigError if the target or the data cannot be used.
    """
    if objective and data is not None:
        raise ConfigError("--objective prepares the run's own data and has no effect with --data; leave one out.")
    if is_filling(target):
        from sansgpu.jobs.evaluate_graph import evaluate_graph

        _without_window(window)
        if objective:
            raise ConfigError("--objective has no effect on a run of task graph; leave it out.")
        return evaluate_graph(target, data, snapshot, progress, warn, remote_code)
    if is_fine_tuning(target):
        from sansgpu.jobs.evaluate_fine_tuned import evaluate_fine_tuned  # imports transformers

        _without_window(window)
        return evaluate_fine_tuned(Path(target).expanduser(), data, snapshot, progress, warn, remote_code, objective)
    loaded = load_model(target, snapshot, warn, remote_code)
    config = loaded.config or Config()
    torch.set_num_threads(resolve_threads(config.training))
    limit_tokenizer_threads(config.data.preprocessing_num_workers)
    device = resolve_device(config.training)
    load_kernels(config.training.kernels, compiled_cache(warn), device, warn)
    micro_batch = max(1, EVALUATION_TOKENS // config.window)
    if data is None:
        measured = _own_validation(loaded, Path(target).expanduser(), objective, progress)
    else:
        measured = _on_data(loaded, config, data, window, progress)
    precision = loaded.snapshot.state()["environment"]["precision"] if loaded.snapshot else "fp32"
    if device.type != "cpu" or precision == "bf16":
        precision = resolve_precision(config.training, device)
    measured.model.to(device)
    metrics = evaluate(measured, StepPlan(micro_batch, device, precision))
    assert metrics is not None
    return {"event": "eval", "step": loaded.snapshot.step if loaded.snapshot else None, **metrics}


def _without_window(window: int | None) -> None:
    if window is not None:
        raise ConfigError("--window works with decoders only; other models use the length that they were trained with.")


def _own_validation(
    loaded: LoadedModel, folder: Path, objective: str | None, progress: ReportProgress
) -> LanguageModeling:
    if loaded.config is None:
        raise ConfigError(f"{folder} is not a run, so it has no validation split; name a dataset with --data.")
    config = with_objective(loaded.config, folder, objective)
    _, corpus = task_of(config).prepare(config, cache_dir(config.data.cache_dir), progress)
    return LanguageModeling(loaded.model, corpus.validation)


def _on_data(
    loaded: LoadedModel, config: Config, name: str, window: int | None, progress: ReportProgress
) -> LanguageModeling:
    window = window or min(config.window if loaded.config else 1024, loaded.context)
    if window > loaded.context:
        raise ConfigError(f"--window {window} is longer than the model's context of {loaded.context} tokens.")
    settings = DataConfig(dataset_name=name, text_column=config.data.text_column)
    store = build_store(open_single(name, settings), loaded.tokenizer, cache_dir(config.data.cache_dir), progress)
    tokenizer, documents = loaded.tokenizer, all_documents(store)
    # As in pretraining, the last token of a document predicts the first token of the next document.
    continuous = isinstance(loaded.model, TransformerLM) and (tokenizer.prefix_ids, tokenizer.suffix_ids) == (
        (tokenizer.end_id,), ()
    )  # fmt: skip
    if continuous:
        windows: Windows = PackedWindows(documents, window, tokenizer.end_id)
    else:
        windows = TextWindows(documents, window, len(tokenizer.prefix_ids), tokenizer.end_id)
    return LanguageModeling(loaded.model, windows)
