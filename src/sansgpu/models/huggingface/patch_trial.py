"""Applies patches to a transformers model, except for those that change its outputs or raise an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel

from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.probes import (
    autocast_of,
    block_weights,
    body_of,
    first_blocks_of,
    matrix_dtype,
    position_offset,
)

EXAMPLES, TOKENS = 2, 24  # with more rows in all than `MIN_ROWS`, so that the same matmuls run as in training
TRIAL_FLOPS = 2e10  # less than a second in all; a larger model is tried by its first blocks
TOLERANCE = 1e-3  # relative to the largest output or gradient
# For bf16 and quantized weights, relative to the norm of the outputs, of which rounding alone changes up to 0.06.
# Gradients are not compared, because rounding can change all of them in a model that amplifies it.
NARROW_TOLERANCE = 0.2

Patch = Callable[[PreTrainedModel], object]  # changes a model in place


def apply_patches(model: PreTrainedModel, patches: Sequence[Patch]) -> list[Patch]:
    """Applies patches in order, except those that change a model's outputs or raise an error; returns the exceptions.

    On the meta device, where nothing can be computed, only errors count.
    """
    trial = _Trial(model)
    if not trial.runs:
        return list(patches)
    if trial.succeeds(patches):
        return []
    return [patch for patch in patches if not trial.succeeds([patch])]


class _Trial:
    """The outputs of a model before it is patched."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._is_meta = model, any(parameter.is_meta for parameter in model.parameters())
        self.runs = self._is_meta
        if self._is_meta:
            return
        for self._differentiated, self._whole in product((True, False), (False, True)):
            try:  # some models do not run with fewer blocks
                self._expected, self.runs = self._outputs(), True
                return
            except Exception:  # anything that the code of a model may raise
                self.runs = False

    def succeeds(self, patches: Sequence[Patch]) -> bool:
        """Applies patches, and undoes them again if the outputs differ or there is an error."""
        before = _State(self._model)
        try:
            for patch in patches:
                patch(self._model)
            if self._is_meta or self._agrees(self._outputs()):
                return True
        except Exception:  # anything that a patched layer may raise
            pass
        before.restore()
        return False

    def _agrees(self, outputs: list[torch.Tensor]) -> bool:
        both = list(zip(outputs, self._expected, strict=True))
        if any(found.shape != expected.shape for found, expected in both):
            return False
        pairs = [(found.double().nan_to_num(), expected.double().nan_to_num()) for found, expected in both]
        if matrix_dtype(self._model) == torch.float32:
            return all((found - expected).abs().max() <= TOLERANCE * expected.abs().max() for found, expected in pairs)
        found, expected = pairs[0]
        return bool((found - expected).norm() <= NARROW_TOLERANCE * expected.norm())

    def _outputs(self) -> list[torch.Tensor]:
        """Returns the outputs for examples of different lengths, and the gradients of all biases and norms."""
        model, device = self._model, self._model.device
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0)
        tokens = min(TOKENS, positions - position_offset(model)) if positions > 0 else TOKENS
        mask = torch.ones(EXAMPLES, tokens, dtype=torch.long, device=device)
        mask[1, tokens // 2 + 1 :] = 0
        ids = torch.arange(mask.numel(), device=device).view_as(mask) * 7 % model.config.get_text_config().vocab_size
        inputs = {"input_ids": ids, "attention_mask": mask}
        with self._blocks(mask.numel()), reading(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # some models draw random numbers even for inference
            with torch.set_grad_enabled(self._differentiated), autocast_of(model):
                try:
                    output: Any = body_of(model)(**inputs)[0]
                except Exception:  # e.g. an encoder with a decoder, whose inputs only the head's code makes
                    output = model(**inputs)[0]
            output = output[mask.bool()] if output.shape[:2] == mask.shape else output
            return [output.detach(), *self._gradients(output)]

    def _gradients(self, output: torch.Tensor) -> list[torch.Tensor]:
        small = [p for p in self._model.parameters() if p.ndim < 2 and p.requires_grad]
        if not (small and output.requires_grad):
            return []
        weights = torch.arange(output.numel(), device=output.device).view_as(output).sin()
        found = torch.autograd.grad((output.float() * weights).sum(), small, allow_unused=True)
        given = zip(found, small, strict=True)
        return [torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for g, p in given])]

    def _blocks(self, tokens: int) -> AbstractContextManager[None]:
        """Context in which a large model consists of its first blocks."""
        flops = 2.0 * tokens * block_weights(self._model)
        return nullcontext() if self._whole or flops < TRIAL_FLOPS else first_blocks_of(self._model)


class _State:
    """The classes and attributes of all parts of a model, to undo patches."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules: list[tuple[Any, type, dict[str, Any]]] = [(m, type(m), dict(vars(m))) for m in model.modules()]
        configs = {id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None}
        self._configs: list[tuple[Any, dict[str, Any]]] = [(config, dict(vars(config))) for config in configs.values()]

    def restore(self) -> None:
        for module, original, attributes in self._modules:
            module.__class__ = original
            vars(module).clear()
            vars(module).update(attributes)
        for config, attributes in self._configs:
            vars(config).clear()
            vars(config).update(attributes)
