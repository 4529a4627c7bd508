"""One rank of an engine of engines.py. Reads commands as JSON lines from stdin and answers each with one line.

A batch is a pure function of the step. Every engine divides the summed loss by the targets of the global batch, clips
the gradient and applies AdamW, so that all of them compute the same step up to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.distributed.torch_engines import (
    TRAINING,
    FixedBuckets,
    FullyShard,
    State,
    Summing,
    SummingOurUpdate,
    Torchs,
    Zero,
    autocast,
)
from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.machine.distributed.group import Group
from sansgpu.machine.distributed.rendezvous import join
from sansgpu.machine.distributed.world import World, find_world
from sansgpu.machine.execution import Execution
from sansgpu.models import TransformerLM
from sansgpu.train.state import TrainState

SIZES: dict[str, dict[str, Any]] = {
    "7M": {"model": {"vocab_size": 8192, "d_model": 256, "n_heads": 4, "n_layers": 6, "d_ff": 768}, "length": 128},
    "tiny": {"model": {"vocab_size": 320, "d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 64}, "length": 16},
}
ROWS, MICRO_BATCH = 8, 2


class Engine(Protocol):
    """A way to train with several processes. A state holds unsharded weights and moments, named as in a snapshot of
    sansgpu."""

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        """Runs forward and backward on a micro-batch and returns its summed loss."""

    def update(self, loss: torch.Tensor, step: int) -> tuple[float, float]:
        """Finishes step number `step` (from 1); returns the loss summed over ranks and the gradient's norm."""

    def whole_state(self) -> State:
        """Returns the whole state on rank 0; all ranks must call it."""

    def load(self, state: State, step: int) -> None:
        """Loads a whole state, saved after `step` steps."""


class Ours:
    """sansgpu's engine with the given value of `training.sharding`."""

    def __init__(self, model: TransformerLM, sharding: str, dtype: torch.dtype, group: Group) -> None:
        self._training = TrainingConfig.model_validate({**TRAINING, "sharding": sharding})
        precision = "bf16" if dtype == torch.bfloat16 else "fp32"
        execution = Execution(precision=precision, world_size=group.size, group=group)
        self._state = TrainState.create(model, self._training, execution)
        self._optimizer, self._model, self._group, self._dtype = self._state.optimizer, model, group, dtype
        self._accumulates = False

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        accumulates = self._accumulates = self._accumulates or not last
        with autocast(self._dtype):
            loss = self._model.summed_loss(batch.inputs, batch.targets)
        with self._optimizer.backward_pass(accumulates, is_last=last):
            (loss / targets).backward()
        return loss.detach()

    def update(self, loss: torch.Tensor, step: int) -> tuple[float, float]:
        self._accumulates = False
        self._optimizer.reduce()
        total = self._group.all_reduce_sums({"loss": float(loss)})["loss"]
        norm, limit = self._optimizer.grad_norm(), self._training.max_grad_norm
        assert limit is not None
        self._optimizer.step(self._training.learning_rate, step, min(1.0, limit / (norm + 1e-6)))
        return total, norm

    def whole_state(self) -> State:
        names = [*self._optimizer.parameter_copies(), *sorted(self._optimizer.state_names())]
        return {name: self._optimizer.gather_tensor(name) for name in names}

    def load(self, state: State, step: int) -> None:
        for name, whole in state.items():
            self._state.load(name, whole)


ENGINES: dict[str, Any] = {
    "ours": "none",
    "ours, ZeRO-1": "optimizer",
    "ours, full": "full",
    "DDP": Torchs,
    "DDP, summing hook": Summing,
    "DDP, summing hook, fixed buckets": FixedBuckets,
    "DDP, summing hook, our AdamW": SummingOurUpdate,
    "DDP, ZeroRedundancyOptimizer": Zero,
    "fully_shard": FullyShard,
}


def make_engine(name: str, model: TransformerLM, dtype: torch.dtype, world: World, timeout: float) -> Engine:
    kind = ENGINES[name]
    if isinstance(kind, str):
        return Ours(model, kind, dtype, join(world, "gloo", timeout, None))
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return cast("Engine", kind(model, dtype))


def make_batch(step: int, vocabulary: int, length: int) -> Batch:
    """Returns a random global batch whose rows have different numbers of targets."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocabulary, (ROWS, length + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    for row, kept in enumerate(torch.randint(length // 2, length + 1, (ROWS,), generator=draw)):
        targets[row, kept:] = IGNORE
    return Batch(tokens[:, :-1], targets)


class Worker:
    """Trains with an engine and answers commands."""

    def __init__(self, engine: Engine, model: ModelConfig, length: int, world: World) -> None:
        self._engine, self._world = engine, world
        self._vocabulary, self._length = model.vocab_size or 0, length
        self._step = 0

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "steps":
            return self.steps(command["count"], uneven=command.get("uneven", False))
        if command["do"] == "load":
            self._step = command["step"]
            self._engine.load(load_file(command["file"]), self._step)
            return {}
        state = {name: tensor.detach().clone().contiguous() for name, tensor in self._engine.whole_state().items()}
        if self._world.rank:
            return {}
        save_file(state, command["file"])
        return {"sha256": hashlib.sha256(Path(command["file"]).read_bytes()).hexdigest()}

    def steps(self, count: int, uneven: bool) -> dict[str, Any]:
        """Trains some steps. With `uneven` the last rank halves its micro-batches, as it does when memory is short."""
        seconds, losses, norms, cpu = [], [], [], time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            loss, norm = self._one_step(uneven and self._world.rank == self._world.size - 1)
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
            norms.append(norm)
        return {
            "seconds": seconds,
            "cpu_seconds": (time.process_time() - cpu) / max(1, count),
            "losses": losses,
            "norms": norms,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _one_step(self, halved: bool) -> tuple[float, float]:
        batch = make_batch(self._step, self._vocabulary, self._length)
        targets = batch.target_count()
        pieces = list(batch.micro_batches(MICRO_BATCH, self._world.rank, self._world.size))
        if halved:
            half = MICRO_BATCH // 2
            pieces = [part for p in pieces for part in (p.rows(0, half), p.rows(half, MICRO_BATCH))]
        loss = torch.zeros((), dtype=torch.float64)
        for number, piece in enumerate(pieces):
            loss += self._engine.accumulate(piece, targets, last=number == len(pieces) - 1)
        self._step += 1
        total, norm = self._engine.update(loss, self._step)
        return total / targets, norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--size", choices=SIZES, default="7M")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for a collective")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    size, world = SIZES[args.size], find_world()
    config = ModelConfig(**size["model"], max_seq_len=size["length"])
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    engine = make_engine(args.engine, TransformerLM(config), dtype, world, args.timeout)
    worker = Worker(engine, config, size["length"], world)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
