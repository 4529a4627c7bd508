"""A hand-written training loop: transformers' GPT-2, torch.compile, bf16 autocast, fused AdamW, gradient clipping.

B windows, T time, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.corpus import Reader, bits_per_byte
from benchmarks.sizes import LEARNING_RATE, WEIGHT_DECAY, Job, Size
from sansgpu.machine.probe import available_cores, has_native_bf16
from sansgpu.machine.torch_compile import missing_compiler

SEED = 0
WARM_UP_STEPS = 200  # `run_minutes` warms the learning rate up over these steps
EVALUATION_WINDOWS = 8  # batch size of evaluation


def build_model(size: Size) -> Any:
    """Returns transformers' GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    return GPT2LMHeadModel(GPT2Config(**size.gpt2()))


def take_threads() -> None:
    """Sets the number of threads that sansgpu would use."""
    torch.set_num_threads(available_cores())


class PlainLoop:
    """GPT-2 with its optimizer and its training and evaluation steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = build_model(job.size)
        compiled = job.size.compile and missing_compiler() is None
        self._loss = torch.compile(self._mean_loss, dynamic=False) if compiled else self._mean_loss
        self._reader = Reader(job.tokens, job.size.window)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
        )
        self._step = 0

    def _mean_loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, lr: float = LEARNING_RATE) -> float:
        """Runs one training step and returns its mean loss."""
        size, micro_batch = self.job.size, self.job.micro_batch
        windows = torch.from_numpy(self._reader.windows(self._step * size.windows_a_step, size.windows_a_step))
        total = 0.0
        for batch in windows.split(micro_batch):
            with autocast():
                loss = self._loss(batch[:, :-1], batch[:, 1:]) * (len(batch) / len(windows))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return total

    @torch.no_grad()
    def validate(self, reader: Reader, size_bytes: int) -> dict[str, float]:
        """Returns the loss and bits per byte of a text. Assumes the mean loss for tokens after the last full window."""
        self.model.eval()
        total, tokens = 0.0, 0
        for start in range(0, len(reader), EVALUATION_WINDOWS):
            windows = torch.from_numpy(reader.in_order(start, EVALUATION_WINDOWS))
            with autocast():
                logits = self.model(windows[:, :-1]).logits
            targets = windows[:, 1:].flatten()
            total += float(F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum"))
            tokens += len(targets)
        self.model.train()
        return {"loss": total / tokens, "bits_per_byte": bits_per_byte(total / tokens * reader.targets, size_bytes)}


def autocast() -> AbstractContextManager[Any]:
    """Returns a bf16 autocast context if the processor supports bf16."""
    return torch.autocast("cpu", torch.bfloat16) if has_native_bf16() else nullcontext()


def run_steps(job: Job) -> dict[str, Any]:
    """Trains for the steps of the job and returns their durations and the last loss."""
    loop, seconds, loss = PlainLoop(job), [], 0.0
    for _ in range(job.steps):
        start = time.perf_counter()
        loss = loop.step()
        seconds.append(time.perf_counter() - start)
    return {"step_seconds": seconds, "loss": loss}


def run_minutes(job: Job, say: Callable[[dict[str, Any]], None]) -> None:
    """Trains for the job's minutes, with a cosine schedule over that time. The minutes start after the first step,
    which compiles."""
    loop = PlainLoop(job)
    loop.step(LEARNING_RATE / WARM_UP_STEPS)
    start, steps = time.perf_counter(), 1
    while (share := (time.perf_counter() - start) / (60 * job.minutes)) < 1:
        warm = min(1.0, (steps + 1) / WARM_UP_STEPS)
        loss = loop.step(LEARNING_RATE * warm * (1 + math.cos(math.pi * share)) / 2)
        steps += 1
        if steps % 20 == 0:
            say({"event": "step", "step": steps, "loss": loss})
    seconds = time.perf_counter() - start
    say({"event": "trained", "steps": steps, "seconds": seconds, "tokens": steps * job.size.tokens_a_step})
    facts = loop.validate(Reader(job.tokens.with_name("valid.npy"), job.size.window), job.valid_bytes)
    say({"event": "eval", "step": steps, **facts})
