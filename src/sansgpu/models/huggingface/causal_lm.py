"""Computes losses, scores and distillation with transformers' causal language models.

B sequences, T tokens, N tokens in total, M tokens after which the next token is predicted.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from sansgpu.config.model import ModelConfig
from sansgpu.kernels.cross_entropy import LossOptions, linear_cross_entropy
from sansgpu.kernels.mixed_loss import SoftTargets, linear_mixed_loss, mixed_loss_of_logits
from sansgpu.models.decoder import IGNORED_LABEL
from sansgpu.models.huggingface.adapters import load_model
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.pretrained import Head
from sansgpu.models.huggingface.probes import head_is_plain
from sansgpu.models.huggingface.rotary_attention import LengthDependentRotary
from sansgpu.models.modules import integer_of_model
from sansgpu.models.quantized_layers import matrix_of
from sansgpu.models.scoring import Scorer
from sansgpu.models.shared_prefixes import SharedPrefixes
from sansgpu.models.teacher import Teacher, head_product


class HuggingFaceLM(torch.nn.Module):
    """Wraps any causal model of transformers in the interface that evaluation uses."""

    def __init__(self, name: str, remote_code: bool = False) -> None:
        super().__init__()
        from sansgpu.models.huggingface.patches import patch_model  # imports transformers, which takes seconds

        settings = ModelConfig(name_or_path=name, trust_remote_code=remote_code)
        self.model = load_model(settings, Head("causal"), seed=0, frozen=True)
        patch_model(self.model)
        self.model.eval()
        self._rotary = LengthDependentRotary(self.model)
        self._loss_options = LossOptions(softcap=getattr(self.model.config, "final_logit_softcapping", None) or 0.0)
        with torch.no_grad():
            self._fused = head_is_plain(self.model, self._loss_options.softcap)

    def unpadded(self) -> UnpaddedModel:
        """Returns the model in a wrapper that packs sequences without padding if the model supports it."""
        return UnpaddedModel(self.model, pack=True)

    @property
    def rows(self) -> int:
        """The number of rows of the embedding."""
        return int(cast(Any, self.model.get_input_embeddings()).num_embeddings)

    @property
    def context(self) -> int | None:
        """The maximum number of tokens, or None if the config has no max_position_embeddings."""
        length: Any = getattr(self.model.config, "max_position_embeddings", None)
        return int(length) if length else None

    def summed_loss(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the cross-entropy summed over targets (B, T). Each row must be one document."""
        if positions is not None or document_ids is not None:
            raise ValueError("packed documents are not supported; pass windows with one document each")
        if not self._rotary:
            return self._loss(inputs, targets)
        valid = targets != -100
        lengths = (valid * torch.arange(1, targets.shape[1] + 1, device=valid.device)).amax(dim=1).tolist()
        losses = []
        for rows in self._rotary.groups(lengths):  # some RoPE variants depend on the length, without padding
            self._rotary.reset()
            stop = max(1, max(lengths[row] for row in rows))
            losses.append(self._loss(inputs[rows, :stop], targets[rows, :stop]))
        return torch.stack(losses).sum()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._fused:
            hidden = self.model.base_model(inputs).last_hidden_state.flatten(0, 1)
            weight = matrix_of(self.model.get_output_embeddings())
            return linear_cross_entropy(hidden, weight, targets.flatten(), self._loss_options)
        logits = self.model(inputs).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def transformers_scorer(model: UnpaddedModel, context: int | None) -> Scorer:
    def states(tokens: torch.Tensor, row: SharedPrefixes) -> torch.Tensor:
        return model.shared_head_inputs(tokens, row) if model.shares else model.head_inputs(tokens, row.lengths)

    head = None if model.head is None else matrix_of(model.head)
    return Scorer(model.model, states, head, context, model.shares, model.softcap)


def transformers_teacher(model: UnpaddedModel, context: int | None, before: tuple[int, ...] = ()) -> Teacher:
    def logits(rows: torch.Tensor) -> torch.Tensor:
        if model.head is None:
            return rows.float()
        found = head_product(rows, matrix_of(model.head))
        return model.softcap * torch.tanh(found / model.softcap) if model.softcap else found

    return Teacher(model.model, model.head_inputs, logits, context, before)


def student_loss(
    model: UnpaddedModel,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    targets: torch.Tensor,
    soft: SoftTargets,
    z_loss: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `linear_mixed_loss` of a transformers model, and returns the same: () and (2,)."""
    states, head = model.head_inputs(tokens, lengths), model.head
    if head is not None:
        options = LossOptions(z_loss=z_loss, softcap=model.softcap, integer=integer_of_model(model.model))
        return linear_mixed_loss(states, matrix_of(head), targets, soft, options)
    valid = targets != IGNORED_LABEL
    return mixed_loss_of_logits(states[valid], targets[valid], soft.rows(valid), z_loss)
