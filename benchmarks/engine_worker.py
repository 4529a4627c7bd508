"""One rank of an engine of `benchmarks.engines`. Reads commands as JSON lines on stdin and answers each with one line.

A batch is a pure function of the step. Every engine divides the summed loss by the targets of the global batch, clips
the gradient and applies AdamW, so that all of them compute the same step up to rounding. Imports that only one engine
needs are inside its functions, because they count towards its memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sansgpu.config import ModelConfig, TrainingConfig
from sansgpu.data.batch import IGNORE, Batch
from sansgpu.kernels.update import adamw
from sansgpu.machine.allocator import keep_freed_memory
from sansgpu.machine.group import Group
from sansgpu.machine.joining import join
from sansgpu.machine.world import World, find_world
from sansgpu.models import TransformerLM
from sansgpu.train.parameter_groups import parameter_groups
from sansgpu.train.state import TrainState
from sansgpu.train.update_rules import ADAM_EPS

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor

SIZES: dict[str, dict[str, Any]] = {
    "7M": {"model": {"vocab_size": 8192, "d_model": 256, "n_heads": 4, "n_layers": 6, "d_ff": 768}, "length": 128},
    "tiny": {"model": {"vocab_size": 320, "d_model": 32, "n_heads": 2, "n_layers": 2, "d_ff": 64}, "length": 16},
}
ROWS, MICRO_BATCH = 8, 2
TRAINING: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]


class Engine(Protocol):
    """A way to train over processes. A state holds whole weights and moments, named as in a snapshot of sansgpu."""

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        """Runs forward and backward on a micro-batch and returns its summed loss."""

    def update(self, loss: torch.Tensor, step: int) -> tuple[float, float]:
        """Finishes step number `step` (from 1); returns the loss summed over ranks and the gradient's norm."""

    def whole_state(self) -> State:
        """Returns the whole state on rank 0; all ranks must call it."""

    def load(self, state: State, step: int) -> None:
        """Loads a whole state, saved after `step` steps."""


class Ours:
    """Our own engine with a value of `training.sharding`."""

    def __init__(self, model: TransformerLM, sharding: str, dtype: torch.dtype, group: Group) -> None:
        self._training = TrainingConfig.model_validate({**TRAINING, "sharding": sharding})
        self._state = TrainState.create(model, self._training, torch.device("cpu"), dtype, group)
        self._optimizer, self._model, self._group, self._dtype = self._state.optimizer, model, group, dtype
        self._first = True

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        if self._first:
            self._optimizer.set_accumulation(not last)
        if last:
            self._optimizer.mark_last_backward()
        self._first = last
        with _autocast(self._dtype):
            loss = self._model.summed_loss(batch.inputs, batch.targets)
        (loss / targets).backward()
        return loss.detach()

    def update(self, loss: torch.Tensor, step: int) -> tuple[float, float]:
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


class SummedLoss(nn.Module):
    """The summed loss as a forward pass, which torch's engines wrap."""

    def __init__(self, model: TransformerLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.summed_loss(inputs, targets)


class Torchs:
    """An engine of torch with its fused AdamW. fp32 weights are cast by autocast at every use."""

    averages = True  # divides the gradient by the number of ranks
    keeps_gradients = True  # gradients are views of the buckets, which saves a copy
    ddp_settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, model: TransformerLM, dtype: torch.dtype) -> None:
        self._training = TrainingConfig.model_validate(TRAINING)
        self._dtype = dtype
        self._module = self.wrap(SummedLoss(model))
        groups, decay = parameter_groups(model), self._training.weight_decay
        self._named = [*groups.matrices, *groups.filters, *groups.others]
        decayed = len(groups.matrices) + len(groups.filters)
        self._decays = [decay if number < decayed else 0.0 for number in range(len(self._named))]
        self._optimizer = self.make_optimizer(
            [
                {"params": [p for _, p in self._named[:decayed]], "weight_decay": decay},
                {"params": [p for _, p in self._named[decayed:]], "weight_decay": 0.0},
            ]
        )

    def wrap(self, module: SummedLoss) -> nn.Module:
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, broadcast_buffers=False, **self.ddp_settings
        )

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **self.adamw_settings(), fused=True)

    def adamw_settings(self) -> dict[str, Any]:
        training = self._training
        return {"lr": training.learning_rate, "betas": (training.beta1, training.beta2), "eps": ADAM_EPS}

    def accumulating(self) -> AbstractContextManager[Any]:
        """Returns a context without a reduction of gradients."""
        return cast("DistributedDataParallel", self._module).no_sync()

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        factor = dist.get_world_size() if self.averages else 1
        with nullcontext() if last else self.accumulating():
            with _autocast(self._dtype):
                loss = self._module(batch.inputs, batch.targets)
            (loss * (factor / targets)).backward()
        return cast("torch.Tensor", loss).detach()

    def update(self, loss: torch.Tensor, step: int) -> tuple[float, float]:
        total = loss.double()
        dist.all_reduce(total)
        norm = self.apply(step)
        self._optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return float(total), norm

    def apply(self, step: int) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping."""
        norm = nn.utils.clip_grad_norm_([p for _, p in self._named], self._training.max_grad_norm or 0.0)
        self._optimizer.step()
        return float(_whole(norm))

    def moments(self) -> dict[int, dict[str, torch.Tensor]]:
        """Returns the whole moments by parameter number, on rank 0."""
        return {number: self._optimizer.state[p] for number, (_, p) in enumerate(self._named)}

    def whole_state(self) -> State:
        moments = self.moments()
        state = {name: _whole(p) for name, p in self._named}
        for number, values in sorted(moments.items()):
            state |= {f"{kind}.{self._named[number][0]}": _whole(values[kind]) for kind in MOMENTS}
        return state

    @torch.no_grad()
    def load(self, state: State, step: int) -> None:
        saved = self._optimizer.state_dict()
        for number, (name, parameter) in enumerate(self._named):
            parameter.copy_(_like(state[name], parameter))
            moments = {kind: _like(state[f"{kind}.{name}"], parameter) for kind in MOMENTS}
            saved["state"][number] = {"step": torch.tensor(float(step)), **moments}
        self._optimizer.load_state_dict(saved)


class Summing(Torchs):
    """DistributedDataParallel with a communication hook that sums."""

    averages = False

    def wrap(self, module: SummedLoss) -> nn.Module:
        wrapped = cast("DistributedDataParallel", super().wrap(module))
        wrapped.register_comm_hook(None, _sum_bucket)
        return wrapped


class FixedBuckets(Summing):
    """DDP with `find_unused_parameters`, which keeps its first buckets; by default DDP makes new ones after a step."""

    ddp_settings = MappingProxyType({"find_unused_parameters": True})


class SummingOurUpdate(Summing):
    """Summing with our AdamW kernel, so that only the reduction differs from our engine."""

    def apply(self, step: int) -> float:
        parameters, limit = [p for _, p in self._named], self._training.max_grad_norm
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        scale = min(1.0, (limit or 0.0) / (norm + 1e-6))
        for parameter, decay in zip(parameters, self._decays, strict=True):
            state = self._optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), **{kind: torch.zeros_like(parameter) for kind in MOMENTS}}
            assert parameter.grad is not None
            first, second = (state[kind] for kind in MOMENTS)
            settings = {**self.adamw_settings(), "weight_decay": decay, "step": step, "scale": scale}
            adamw(parameter.detach(), first, second, parameter.grad, None, **settings)
        return norm


class Zero(Summing):
    """DistributedDataParallel with a summing hook and ZeroRedundancyOptimizer."""

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            groups,
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **self.adamw_settings(),
            fused=True,
        )

    def moments(self) -> dict[int, dict[str, torch.Tensor]]:
        optimizer = cast("ZeroRedundancyOptimizer", self._optimizer)
        optimizer.consolidate_state_dict(to=0)
        whole: dict[int, dict[str, torch.Tensor]] = {} if dist.get_rank() else optimizer.state_dict()["state"]
        return whole

    @torch.no_grad()
    def load(self, state: State, step: int) -> None:
        moments = {
            number: {"step": torch.tensor(float(step)), **{kind: state[f"{kind}.{name}"] for kind in MOMENTS}}
            for number, (name, _) in enumerate(self._named)
        }
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": []}
            for group in self._optimizer.param_groups
        ]
        start = 0
        for group, live in zip(groups, self._optimizer.param_groups, strict=True):
            group["params"] = list(range(start, start + len(live["params"])))
            start += len(live["params"])
        for name, parameter in self._named:
            parameter.copy_(state[name])
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


class FullyShard(Torchs):
    """fully_shard on every block and on the rest."""

    averages = keeps_gradients = False

    def wrap(self, module: SummedLoss) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        for part in [*module.model.blocks, module]:
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=part is not module)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
        return module

    def accumulating(self) -> AbstractContextManager[Any]:
        return nullcontext()  # unsharded sums would need the memory that sharding saves


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


def _autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


def _sum_bucket(_: object, bucket):  # type: ignore[no-untyped-def]  # torch accepts no annotation as a string
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return cast("DTensor", tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a whole tensor, split as `parameter`."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("DTensor", parameter)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements)


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
