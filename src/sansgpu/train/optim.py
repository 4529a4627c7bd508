"""Parameter groups and the two optimizers."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import nn

from sansgpu.config import TrainingConfig
from sansgpu.kernels.newton_schulz import orthogonalise

MUON_MOMENTUM = 0.95
MUON_UPDATE_RMS = 0.2  # AdamW's typical update size, so that both share one learning rate (arXiv 2502.16982)
ADAM_EPS = 1e-8

Named = list[tuple[str, nn.Parameter]]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), on matrices; equal shapes are orthogonalised together.

    torch.optim.Muon computes in bf16 everywhere, which is slow where bf16 is emulated, and one matrix at a time.
    """

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.0, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: the loop has the loss
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for shape, same in groupby(sorted(trained, key=lambda p: p.shape), key=lambda p: p.shape):
                self._update(list(same), shape, group["lr"], group["weight_decay"])

    def _update(self, parameters: list[nn.Parameter], shape: torch.Size, lr: float, weight_decay: float) -> None:
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - MUON_MOMENTUM)
            updates.append(parameter.grad.lerp(state["momentum"], MUON_MOMENTUM))  # Nesterov
        scale = MUON_UPDATE_RMS * max(shape) ** 0.5
        for parameter, update in zip(parameters, orthogonalise(torch.stack(updates), self._dtype), strict=True):
            parameter.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * scale)


class Optimizer:
    """The optimizers of one model behind one learning rate, with their state as named tensors."""

    def __init__(self, model: nn.Module, training: TrainingConfig, muon_dtype: torch.dtype) -> None:
        hidden, rest = split_parameters(model)
        self._named = hidden + rest
        self._optimizers: list[torch.optim.Optimizer] = []
        adam_groups = [{"params": [p for _, p in rest], "weight_decay": 0.0}]
        if training.optimizer == "muon" and hidden:
            self._optimizers.append(Muon([p for _, p in hidden], training.weight_decay, muon_dtype))
        elif hidden:
            adam_groups.append({"params": [p for _, p in hidden], "weight_decay": training.weight_decay})
        betas = (training.beta1, training.beta2)
        self._optimizers.append(torch.optim.AdamW(adam_groups, lr=0.0, betas=betas, eps=ADAM_EPS, fused=True))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every trained parameter, once."""
        return [p for _, p in self._named]

    def step(self, lr: float) -> None:
        """Update all parameters, and drop their gradients."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_names(self) -> set[str]:
        """The names `state_tensors` has once every parameter was updated."""
        kinds = {Muon: ("momentum",), torch.optim.AdamW: ("exp_avg", "exp_avg_sq")}
        names = {id(parameter): name for name, parameter in self._named}
        return {
            f"{kind}.{names[id(parameter)]}"
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for kind in kinds[type(optimizer)]
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments as `KIND.PARAMETER`; AdamW's step count is the run's own."""
        return {
            f"{kind}.{name}": value
            for name, parameter in self._named
            for kind, value in self._state_of(parameter).items()
            if kind != "step"
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], step: int) -> None:
        """Take up the moments of a snapshot after `step` updates."""
        parameters = dict(self._named)
        for key, value in tensors.items():
            kind, _, name = key.partition(".")
            parameter = parameters[name]
            state = self._state_of(parameter)
            state[kind] = value.to(parameter.device)
            if kind == "exp_avg":
                state["step"] = torch.tensor(float(step), device=parameter.device)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        for optimizer in self._optimizers:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                state: dict[str, torch.Tensor] = optimizer.state[parameter]
                return state
        raise KeyError("the parameter belongs to no optimizer")


def split_parameters(model: nn.Module) -> tuple[Named, Named]:
    """(matrices of linear layers inside the model, everything else): what Muon and weight decay are for, and not.

    Embeddings, the output head, norms and biases are in the second list. A tied parameter stands once.
    """
    inner = {id(m.weight) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "head"}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [(n, p) for n, p in trained if id(p) in inner], [(n, p) for n, p in trained if id(p) not in inner]


def clip_by_global_norm(parameters: list[nn.Parameter], limit: float) -> float:
    """Scale gradients so that the norm over all of them is at most `limit` (0: leave them); returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if limit:
        torch.nn.utils.clip_grads_with_norm_([p for p in parameters if p.grad is not None], limit, norm)
    return float(norm)
