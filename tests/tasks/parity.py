"""Settings and losses of short runs, to compare them with those of other trainers."""

from __future__ import annotations

from pathlib import Path

import torch

from sansgpu.machine.execution import Execution
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import TASKS
from sansgpu.train.state import TrainState
from sansgpu.train.step import train_step

STEPS, ROWS = 20, 4


def our_losses(overrides: list[str], micro_batch: int) -> list[float]:
    config, _ = load_config(None, overrides)
    task_class = TASKS[config.kind]
    config, corpus = task_class.prepare(config, Path("unused"), lambda *_: None)
    task = task_class(config, corpus, ROWS)
    device = torch.device("cpu")
    state = TrainState.create(task.model, config.training, Execution(micro_batch, device=device))
    losses = []
    for step in range(STEPS):
        result = train_step(state, task, task.batch(step), config.training.learning_rate)
        state.progress.step += 1
        losses.append(result.loss_sum / result.targets)
    return losses


def settings(task: str, model: Path, data: Path, pack: bool) -> list[str]:
    return [
        f"task={task}", f"model.name_or_path={model}", f"data.pack_sequences={pack}",
        f"data.dataset_name={data}", f"data.validation_name={data}",
        f"training.batch_size={ROWS}", "training.gradient_accumulation_steps=1", "training.precision=fp32",
        "training.learning_rate=0.001", "training.weight_decay=0", "data.max_length=96",
        "training.lr_scheduler=constant", "training.warmup_steps=0",
        *(["data.doc_stride=16"] if task == "qa" else []),
    ]  # fmt: skip
