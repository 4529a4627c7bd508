"""Evaluation of fine-tuning runs (sft and qa)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from sansgpu.config import Config, ConfigError, DataConfig
from sansgpu.config.by_task import QA
from sansgpu.data.shards import ReportProgress
from sansgpu.data.sources import open_single
from sansgpu.jobs.fine_tuned import HEADS, FineTuned, load_fine_tuned
from sansgpu.jobs.runs import require_run
from sansgpu.machine.probe import cache_dir, resolve_device
from sansgpu.tasks import Evaluator, task_of
from sansgpu.tasks import qa as asking
from sansgpu.tasks import sft as talking
from sansgpu.train.evaluate import evaluate
from sansgpu.train.run_folders import open_run, with_objective
from sansgpu.train.step import StepPlan

EXAMPLES = 8  # per micro-batch


def evaluate_fine_tuned(
    run: Path,
    data: str | None,
    snapshot: str,
    progress: ReportProgress,
    warn: Callable[[str], None],
    remote_code: bool,
    objective: str | None,
) -> dict[str, Any]:
    """Returns the eval event of a run on `data`, or on its own validation split. Task qa also writes the answers."""
    config, _ = open_run(run)
    if config.kind == QA:
        require_run(run)
    loaded = load_fine_tuned(str(run), HEADS[config.kind], snapshot, warn, remote_code)
    own = with_objective(loaded.config, run, objective) if data is None else loaded.config
    measured = _measured(loaded, own, data, progress, warn)
    assert loaded.snapshot is not None
    precision = loaded.snapshot.state()["environment"]["precision"]
    device = resolve_device(config.training)
    measured.model.to(device)
    metrics = evaluate(measured, StepPlan(EXAMPLES, device, precision))
    assert metrics is not None
    if isinstance(measured, asking.QAEvaluator):
        metrics |= measured.detailed()
        measured.save(run)
    return {"event": "eval", "step": loaded.snapshot.step, **metrics}


def _measured(
    loaded: FineTuned, config: Config, data: str | None, progress: ReportProgress, warn: Callable[[str], None]
) -> Evaluator:
    objective, part = cast(Any, loaded.objective), cast(Any, None)
    notes: list[str] = []
    if data is None:
        _, corpus = task_of(config).prepare(config, cache_dir(config.data.cache_dir), progress)
        part = corpus.validation
    else:
        source = open_single(data, DataConfig(dataset_name=data, dataset_config=config.data.dataset_config))
        part = (
            asking.whole_source(source, config, loaded.tokenizer, notes)
            if config.task == "qa"
            else talking.whole_source(source, config, loaded.tokenizer, progress, notes)
        )
        for note in notes:
            warn(note)
        if not len(part):
            raise ConfigError(f"{data} has no examples to evaluate on.")
    if config.task == "qa":
        return asking.QAEvaluator(objective, part, config.data)
    return talking.SFTEvaluator(objective, part)
