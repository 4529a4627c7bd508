"""Models of transformers on examples of unequal length, one behind the other, without padding where that works.

B examples, N tokens in all, T tokens of the longest, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sansgpu.kernels.attention import bidirectional_ranges, causal_ranges
from sansgpu.kernels.cross_entropy import PLAIN, LossShape, linear_cross_entropy
from sansgpu.models.attention_interface import NAME, ranges_mask
from sansgpu.models.generate import reading

PROBE_LENGTHS = (5, 7)  # of the examples that are tried together and apart
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the largest output

Flat = Callable[[torch.Tensor], torch.Tensor]  # a model's output by row -> (N, ...)


class UnpaddedModel:
    """`packs` says whether examples are read in one row, not seeing each other; else each has a padded row."""

    def __init__(self, model: PreTrainedModel, pack: bool) -> None:
        self.model = model
        self._text: Any = model.config.get_text_config()
        self._by_ranges = model.config._attn_implementation == NAME and not _has_windows(self._text)
        attending = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
        self._causal = any(attending)
        self._offset = _position_offset(model)
        self._softcap = getattr(self._text, "final_logit_softcapping", None) or 0.0
        with reading(model), torch.no_grad(), autocast_of(model):
            self.packs = pack and self._packs_well()
            self.fused = head_is_plain(model, self._softcap)

    def inputs(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None = None
    ) -> tuple[dict[str, torch.Tensor], Flat]:
        """What the model is called with, and how its outputs become one row a token; tokens and types (N,)."""
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        places = torch.arange(len(tokens), device=tokens.device) - (lengths.cumsum(0) - lengths)[ids]
        if self.packs:
            given = {"input_ids": tokens[None], "position_ids": places[None] + self._offset}
            if self._by_ranges:
                given["attention_mask"] = ranges_mask(
                    (causal_ranges if self._causal else bidirectional_ranges)(ids[None])
                )
            if types is not None:
                given["token_type_ids"] = types[None]
            return given, lambda output: output[0]
        shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)

        def padded(value: torch.Tensor, filler: int) -> torch.Tensor:
            out = value.new_full(shape, filler)
            out[ids, places] = value
            return out

        given = {"input_ids": padded(tokens, self._filler), "attention_mask": padded(torch.ones_like(tokens), 0)}
        if types is not None:
            given["token_type_ids"] = padded(types, 0)
        return given, lambda output: output[ids, places]

    def summed_loss(
        self, tokens: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, shape: LossShape = PLAIN
    ) -> torch.Tensor:
        """Of a causal model, cross-entropy summed over the targets (N,), -100 where nothing is predicted: ()."""
        given, flat = self.inputs(tokens, lengths)
        shape = LossShape(shape.label_smoothing, shape.z_loss, self._softcap)
        head: Any = self.model.get_output_embeddings()
        if self.fused and isinstance(head, nn.Linear):  # none that has got an adapter
            hidden = flat(self.model.base_model(**given, use_cache=False).last_hidden_state)
            return linear_cross_entropy(hidden, head.weight, targets, shape)
        logits = flat(self.model(**given, use_cache=False).logits)
        kept = targets != -100
        logits, targets = logits[kept].float(), targets[kept]
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=shape.label_smoothing)
        return loss + shape.z_loss * torch.logsumexp(logits, dim=-1).square().sum() if shape.z_loss else loss

    def spans(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a model for questions, how likely each token is to begin and to end the answer: (N,) and (N,), fp32."""
        given, flat = self.inputs(tokens, lengths, types)
        output = self.model(**given)
        return flat(output.start_logits).float(), flat(output.end_logits).float()

    def gap_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """Of a model that fills gaps, the logits of the tokens at `gaps` (N,) bool alone: (M, V)."""
        given, flat = self.inputs(tokens, lengths)
        base: Any = self.model.base_model

        def pick(module: nn.Module, args: Any, output: Any) -> Any:
            output.last_hidden_state = flat(output.last_hidden_state)[gaps][None]
            return output

        hook = base.register_forward_hook(pick)
        try:
            logits: torch.Tensor = self.model(**given).logits[0]
        finally:
            hook.remove()
        return logits

    @property
    def _filler(self) -> int:
        return int(self._text.pad_token_id or 0)

    def _packs_well(self) -> bool:
        """Whether two examples in one row come out as they do apart; models with states of their own mix them."""
        lengths = torch.tensor(PROBE_LENGTHS)
        tokens = torch.arange(int(lengths.sum())) * 7 % self._text.vocab_size
        self.packs = True
        try:
            together = self._output(tokens, lengths)
            apart = [self._output(part, torch.tensor([len(part)])) for part in tokens.split(PROBE_LENGTHS)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        error = (together - torch.cat(apart)).abs().max() / together.abs().max()
        return bool(error <= PROBE_TOLERANCE.get(_matrix_dtype(self.model), min(PROBE_TOLERANCE.values())))

    def _output(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given, flat = self.inputs(tokens, lengths)
        output = self.model(**given)
        return flat(output.logits if "logits" in output else output.start_logits).float()


def autocast_of(model: PreTrainedModel) -> torch.autocast:
    """What a model whose matrices are in bf16 is run under, where no training step has set it."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=_matrix_dtype(model) == torch.bfloat16)


def _matrix_dtype(model: PreTrainedModel) -> torch.dtype:
    embedding: Any = model.get_input_embeddings()
    dtype: torch.dtype = embedding.weight.dtype
    return dtype


def head_is_plain(model: PreTrainedModel, softcap: float) -> bool:
    """Whether logits are the last states times the output embedding, capped: some models scale or shift them."""
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        return False
    probe = torch.arange(4)[None] % head.out_features
    logits = F.linear(model.base_model(probe).last_hidden_state, head.weight)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.allclose(logits, model(probe).logits, rtol=1e-4, atol=1e-5)


def _has_windows(config: Any) -> bool:
    """Whether some layer attends within a window only."""
    types = getattr(config, "layer_types", None)
    if types:
        return any(kind != "full_attention" for kind in types)
    return any(getattr(config, name, None) for name in ("sliding_window", "local_attention", "attention_chunk_size"))


def _position_offset(model: PreTrainedModel) -> int:
    """RoBERTa counts positions from behind the padding token's id."""
    modules: Iterator[Any] = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
    return next((int(module.padding_idx) + 1 for module in modules), 0)
