"""Models of transformers on examples of unequal length, one behind the other, without padding where that works.

B examples, N tokens in all, T tokens of the longest, D width.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sansgpu.kernels.attention import bidirectional_ranges, causal_ranges
from sansgpu.kernels.cross_entropy import PLAIN, LossShape, linear_cross_entropy
from sansgpu.models.attention_interface import NAME, ranges_mask
from sansgpu.models.generate import reading
from sansgpu.models.modules import blocks_of
from sansgpu.models.rotary import LengthDependentRotary

PROBE_SHORT = 5  # tokens of the first example that is tried; the second one begins in the middle of any block
PROBE_LONG = 65  # tokens of the second one at least: more than the blocks of 32 and 64 that no configuration names
PROBE_LONGEST = 1024  # and at most, where the length of the examples is not known
PROBE_FLOPS = 2e12  # some seconds: a model that would take more is tried by its first blocks
OTHER_SIZES = re.compile(r"_ids?$|vocab|hidden|intermediate|ffn|mlp|dim$|embd|d_model|^n_|^num_|max_position|head|rank")
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the largest output

Flat = Callable[[torch.Tensor], torch.Tensor]  # a model's output by row -> (N, ...)


class UnpaddedModel:
    """`packs` says whether examples are read in one row, not seeing each other; else each has a padded row.

    Examples of at most `longest` tokens. Those whose rotary frequencies differ by their length are read apart.
    """

    def __init__(self, model: PreTrainedModel, pack: bool, longest: int = PROBE_LONGEST) -> None:
        self.model, self._rotary = model, LengthDependentRotary(model)
        self._text: Any = model.config.get_text_config()
        self._by_ranges = model.config._attn_implementation == NAME and not _has_windows(self._text)
        attending = [m.is_causal for m in model.modules() if hasattr(m, "is_causal")]
        self._causal = any(attending)
        self._offset = _position_offset(model)
        self._softcap = getattr(self._text, "final_logit_softcapping", None) or 0.0
        with reading(model), torch.no_grad(), autocast_of(model):
            self.packs = pack and self._packs_well(longest)
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
        losses = [self._loss(tokens[p], some, targets[p], shape) for p, some in self._alike(lengths)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _loss(
        self, tokens: torch.Tensor, lengths: torch.Tensor, targets: torch.Tensor, shape: LossShape
    ) -> torch.Tensor:
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
        """Start and end logits of each token, from a model for questions: (N,) and (N,), fp32."""

        def both(places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            given, flat = self.inputs(tokens[places], lengths, None if types is None else types[places])
            output = self.model(**given)
            return torch.stack((flat(output.start_logits), flat(output.end_logits)), dim=1).float()

        starts, ends = self._by_token(lengths, both).unbind(dim=1)
        return starts, ends

    def gap_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens at `gaps` (N,) bool alone, from a model that fills gaps: (M, V)."""
        parts = [(p[gaps[p]], self._gap_logits(tokens[p], some, gaps[p])) for p, some in self._alike(lengths)]
        return _in_order(parts)

    def _gap_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
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

    def _alike(self, lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Examples that may be read together: the places of their tokens (n,), and their lengths (b,)."""
        everything = torch.arange(int(lengths.sum()), device=lengths.device)
        groups = self._rotary.groups(lengths.tolist()) if self._rotary else []
        if not self._rotary:
            yield everything, lengths
        for group in groups:
            self._rotary.forget()
            chosen = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
            chosen[group] = True
            yield everything[torch.repeat_interleave(chosen, lengths)], lengths[chosen]

    def _by_token(
        self, lengths: torch.Tensor, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """What `run` gives for each token, in the tokens' order: (N, ...)."""
        return _in_order([(places, run(places, some)) for places, some in self._alike(lengths)])

    @property
    def _filler(self) -> int:
        return int(self._text.pad_token_id or 0)

    def _packs_well(self, longest: int) -> bool:
        """True if two examples in one row give what the model gives for each by itself, called plainly.

        Models with states of their own, or with positions that do not begin at 0, give something else.
        """
        lengths = self._probe_lengths(longest)
        tokens = torch.arange(sum(lengths)) * 7 % self._text.vocab_size
        flops = 4.0 * sum(lengths) * sum(p.numel() for p in self.model.base_model.parameters())
        with _first_blocks_of(self.model, self._text) if flops > PROBE_FLOPS else nullcontext():
            try:
                self.packs = True
                together = self._output(tokens, torch.tensor(lengths))
                self.packs = False
                apart = [self._output(part, torch.tensor([len(part)])) for part in tokens.split(lengths)]
            except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
                return False
        error = (together - torch.cat(apart)).abs().max() / together.abs().max()
        return bool(error <= PROBE_TOLERANCE.get(_matrix_dtype(self.model), min(PROBE_TOLERANCE.values())))

    def _probe_lengths(self, longest: int) -> list[int]:
        """A short example, and one that is longer than every window or block that the configuration names, as far as
        examples are; none is so long that rotary frequencies would depend on it, as those are read apart.
        """
        places = int(getattr(self._text, "max_position_embeddings", None) or 0)
        limits = [longest, *([places - self._offset] if places > 0 else []), self._rotary.unscaled or longest]
        named = 1 + max(_possible_windows(self.model.config.to_dict()), default=0)
        return [min(PROBE_SHORT, *limits), min(max(PROBE_LONG, named), *limits)]

    def _output(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        given, flat = self.inputs(tokens, lengths)
        return flat(self.model.base_model(**given).last_hidden_state).float()


def _in_order(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Rows of several tensors by the places that they belong to."""
    if len(parts) == 1:
        return parts[0][1]
    places, values = (torch.cat(side) for side in zip(*parts, strict=True))
    return values[places.argsort()]


def _possible_windows(settings: Any, name: str = "") -> Iterator[int]:
    """Every whole number of a configuration that may be a window, a block, a chunk or a stride."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _possible_windows(value, str(key))
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from _possible_windows(value, name)
    elif isinstance(settings, int) and not isinstance(settings, bool) and not OTHER_SIZES.search(name):
        yield settings


@contextmanager
def _first_blocks_of(model: PreTrainedModel, config: Any) -> Iterator[None]:
    """Has a model compute its first blocks alone, of each type of layer at least one."""
    blocks = blocks_of(model)
    types = (getattr(config, "layer_types", None) or [])[: len(blocks)]
    count = max([2, *(types.index(kind) + 1 for kind in dict.fromkeys(types))])
    if not blocks:
        yield
        return
    lists = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    parent, name, whole = next(
        (parent, name, child)
        for parent, name, child in lists
        if isinstance(child, nn.ModuleList) and len(child) == len(blocks) and all(map(operator.is_, child, blocks))
    )
    setattr(parent, name, whole[:count])
    try:
        yield
    finally:
        setattr(parent, name, whole)


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
