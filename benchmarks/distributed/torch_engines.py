"""torch's data-parallel engines, which `benchmarks.distributed.engines` compares with sansgpu's.

Imports that only one engine needs are inside its functions, because they count toward its memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sansgpu.config import TrainingConfig
from sansgpu.data.batch import Batch
from sansgpu.kernels.update import AdamWStep, WeightUpdate, adamw
from sansgpu.models import TransformerLM
from sansgpu.train.optim import parameter_groups
from sansgpu.train.update_rules import ADAM_EPS

if TYPE_CHECKING:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor

TRAINING: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0}
MOMENTS = ("exp_avg", "exp_avg_sq")
State = dict[str, torch.Tensor]


class SummedLoss(nn.Module):
    """A module whose forward pass returns the model's summed loss, for torch's engines to wrap."""

    def __init__(self, model: TransformerLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.model.summed_loss(inputs, targets)


class Torchs:
    """DistributedDataParallel with torch's fused AdamW. Autocast casts the fp32 weights at every use."""

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
        """Returns a context in which gradients accumulate without communication."""
        return cast("DistributedDataParallel", self._module).no_sync()

    def accumulate(self, batch: Batch, targets: int, last: bool) -> torch.Tensor:
        factor = dist.get_world_size() if self.averages else 1
        with nullcontext() if last else self.accumulating():
            with autocast(self._dtype):
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
        """Returns the moments by parameter number. Only rank 0 needs to return those of all parameters."""
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
    """DistributedDataParallel with a communication hook that sums gradients instead of averaging them."""

    averages = False

    def wrap(self, module: SummedLoss) -> nn.Module:
        wrapped = cast("DistributedDataParallel", super().wrap(module))
        wrapped.register_comm_hook(None, _sum_bucket)
        return wrapped


class FixedBuckets(Summing):
    """DDP with `find_unused_parameters`, which keeps its first buckets; by default DDP makes new ones after a step."""

    ddp_settings = MappingProxyType({"find_unused_parameters": True})


class SummingOurUpdate(Summing):
    """Summing with sansgpu's AdamW kernel, so that only the reduction differs from sansgpu's engine."""

    def apply(self, step: int) -> float:
        parameters, limit = [p for _, p in self._named], self._training.max_grad_norm
        norm = float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        scale = min(1.0, (limit or 0.0) / (norm + 1e-6))
        updates = []
        for parameter, decay in zip(parameters, self._decays, strict=True):
            state = self._optimizer.state[parameter]
            if not state:
                state |= {"step": torch.zeros(()), **{kind: torch.zeros_like(parameter) for kind in MOMENTS}}
            assert parameter.grad is not None
            moments = [state[kind] for kind in MOMENTS]
            updates.append(WeightUpdate(parameter.detach(), moments, parameter.grad, weight_decay=decay))
        adamw(updates, AdamWStep(**self.adamw_settings(), number=step, scale=scale))
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
    """fully_shard, applied to every block and to the whole model."""

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
        return nullcontext()  # summing unsharded gradients would need the memory that sharding saves


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Returns a context that computes in `dtype`, fp32 or bf16."""
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)


def _sum_bucket(_: object, bucket):  # type: ignore[no-untyped-def]  # torch accepts no annotation as a string
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return cast("DTensor", tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _like(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of an unsharded tensor, sharded like `parameter`."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded = cast("DTensor", parameter)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements)
