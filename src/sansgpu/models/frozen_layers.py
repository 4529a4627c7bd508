"""Freezes the lower blocks of a model, and skips them where the activations that they would compute are known.

B batch, T tokens per row, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class _ReachedError(Exception):
    """Ends a forward pass at the first trained block."""


class FrozenLayers:
    """The part of a model that is frozen, or will be: everything that runs before the last `trained` of its `blocks`.

    Once it is frozen, its weights get no gradient, and it runs without dropout, so its output depends only on the
    model's input.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], trained: int, run: Callable[[], object]) -> None:
        """`run` calls the model on some input, to find out what runs before the blocks."""
        self.blocks, self._first = list(blocks[: len(blocks) - trained]), blocks[len(blocks) - trained]
        self._returned = 0  # length of the tuples that frozen blocks return; 0: they return tensors
        table = getattr(model, "get_input_embeddings", lambda: None)()
        parts = [*self.blocks, *([] if table is None else [table])]
        hooks = [m.register_forward_hook(lambda module, *_: parts.append(module)) for m in model.modules()]
        try:
            entering = self._run_below(run)
        except Exception:  # anything that the code of a model may raise, e.g. one that needs other inputs
            entering = []
            parts += [module for module in model.modules() if isinstance(module, nn.Embedding)]
        finally:
            for hook in hooks:
                hook.remove()
        found = {p for part in parts for p in part.parameters()} | _weights_behind(entering)
        self._weights = [parameter for parameter in model.parameters() if parameter in found]
        self._learned: list[nn.Parameter] = []  # weights that were trained before they were frozen
        self._modules = list(dict.fromkeys(module for part in parts for module in part.modules()))

    def freeze(self, learned: bool) -> None:
        """Freezes the weights. `learned` says whether training has changed them."""
        self._learned = [parameter for parameter in self._weights if learned and parameter.requires_grad]
        for parameter in self._weights:
            parameter.requires_grad_(False)

    def learned_digest(self) -> str:
        """Returns a hash of the frozen weights that the run has trained, as the model computes with them.

        It is empty if the run has trained none of them: they are then the weights of the model's files.
        """
        digest = hashlib.sha256()
        for parameter in self._learned:
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest() if self._learned else ""

    def _run_below(self, run: Callable[[], object]) -> list[torch.Tensor]:
        """Calls the model up to the first trained block, and returns the tensors that are passed to that."""
        entering = list[torch.Tensor]()

        def reached(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            entering.extend(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            raise _ReachedError

        hook = self._first.register_forward_pre_hook(reached, with_kwargs=True)
        try:
            run()
        except _ReachedError:
            pass
        finally:
            hook.remove()
        return entering

    def without_dropout(self) -> None:
        """Puts the frozen part into evaluation mode, which `model.train()` has ended."""
        for module in self._modules:
            module.training = False

    def output(self, run: Callable[[], object]) -> torch.Tensor:
        """Returns what the last frozen block computes when `run` calls the model, (B, T, D)."""
        found: list[Any] = []
        hook = self.blocks[-1].register_forward_hook(lambda module, args, output: found.append(output))
        try:
            self._run_below(run)
        finally:
            hook.remove()
        output = found[-1]
        self._returned = len(output) if isinstance(output, tuple) else 0
        states: torch.Tensor = output[0] if self._returned else output
        return states

    @contextmanager
    def skipped(self, output: torch.Tensor | None) -> Iterator[None]:
        """Context in which the frozen blocks return `output` (B, T, D). If it is None, they run."""
        if output is None:
            yield
            return
        result = (output, *[None] * (self._returned - 1)) if self._returned else output
        before = [vars(block).get("forward") for block in self.blocks]
        for block in self.blocks:
            block.forward = lambda *args, **kwargs: result
        try:
            yield
        finally:
            for block, forward in zip(self.blocks, before, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward


def _weights_behind(tensors: Sequence[torch.Tensor]) -> set[nn.Parameter]:
    """Returns the weights from which tensors were computed, according to their autograd graphs."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(pending), set[nn.Parameter]()
    while pending:
        node = pending.pop()
        if isinstance(variable := getattr(node, "variable", None), nn.Parameter):
            found.add(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found
