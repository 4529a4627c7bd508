"""The peers of peers.py. `python -m benchmarks.speed.contestants JOB` runs one of them and prints a JSON line.

Each trains transformers' GPT-2 of the job's size on the same windows, with as many threads as sansgpu would use.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.corpus import Reader
from benchmarks.sizes import LEARNING_RATE, WEIGHT_DECAY, Job
from benchmarks.speed.plain import SEED, build_model, run_minutes, run_steps, take_threads

Result = dict[str, Any]


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of T tokens with transformers' column names; the model shifts the labels itself."""

    def __init__(self, job: Job) -> None:
        self._reader = Reader(job.tokens, job.size.window, SEED)
        self._rows = job.steps * job.size.windows_a_step

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self._reader.windows(index, 1)[0, :-1])
        return {"input_ids": tokens, "labels": tokens}


class Clock:
    """Measures the duration of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def start(self) -> None:
        self._last = time.perf_counter()

    def tick(self) -> None:
        """Records the duration of a step."""
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def hugging_face(job: Job, **precision: Any) -> Result:
    """Trains with transformers.Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock()
    losses: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

        def on_log(self, *_: Any, **given: Any) -> None:
            if "loss" in given["logs"]:
                losses.append(float(given["logs"]["loss"]))

    arguments = TrainingArguments(
        output_dir=str(job.output),
        use_cpu=True,
        max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.accumulation,
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=SEED,
        **precision,
    )
    Trainer(model=build_model(job.size), args=arguments, train_dataset=Windows(job), callbacks=[Watch()]).train()
    return {"step_seconds": clock.seconds, "loss": losses[-1]}


def lightning(job: Job) -> Result:
    """Trains with a plain LightningModule."""
    import lightning as pl

    clock = Clock()
    losses: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model(job.size).train()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    class Watch(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            clock.start()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > len(clock.seconds):  # after the last micro-batch of a step
                clock.tick()

    trainer = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=job.steps,
        accumulate_grad_batches=job.accumulation,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(job.output),
        callbacks=[Watch()],
    )
    trainer.fit(Module(), DataLoader(Windows(job), batch_size=job.micro_batch))
    return {"step_seconds": clock.seconds, "loss": sum(losses[-job.accumulation :]) / job.accumulation}


KINDS: dict[str, Callable[[Job], Result]] = {
    "hf-fp32": lambda job: hugging_face(job, optim="adamw_torch"),
    "hf-bf16": lambda job: hugging_face(job, optim="adamw_torch", bf16=True),
    "hf-bf16-compile": lambda job: hugging_face(
        job, optim="adamw_torch_fused", bf16=True, torch_compile=job.size.compile
    ),
    "plain": run_steps,
    "lightning": lightning,
}


def say(result: Result) -> None:
    print(json.dumps(result), flush=True)


def main() -> None:
    job = Job.read(Path(sys.argv[1]))
    take_threads()
    if job.minutes:
        run_minutes(job, say)
    else:
        say(KINDS[job.kind](job))


if __name__ == "__main__":
    main()
