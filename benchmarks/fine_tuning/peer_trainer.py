"""The settings of Hugging Face's Trainer, and a callback that times it, for comparisons of fine-tuning."""

from __future__ import annotations

import json
import time
from typing import Any

from transformers import TrainerCallback

from sansgpu.config import Config


class Watch(TrainerCallback):
    """Records seconds and losses of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)

    def on_log(self, *_: Any, **given: Any) -> None:
        if "loss" in given["logs"]:
            self.losses.append(float(given["logs"]["loss"]))


def trainer_arguments(config: Config, steps: int) -> dict[str, Any]:
    """Returns the arguments that all Trainers of the benchmarks have in common, except `output_dir`."""
    training = config.training
    return {
        "max_steps": steps,
        "use_cpu": True,
        "bf16": training.precision == "bf16",
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "adam_beta1": training.beta1,
        "adam_beta2": training.beta2,
        "adam_epsilon": 1e-8,
        "max_grad_norm": training.max_grad_norm,
        "seed": training.seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)
