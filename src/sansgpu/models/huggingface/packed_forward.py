"""Runs transformers models on examples of different lengths, packed without padding if the model supports it.

B examples, N tokens in total, T tokens in the longest example, D width, V vocabulary, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from sansgpu.kernels.attention import bidirectional_ranges, causal_ranges, in_window, token_places
from sansgpu.kernels.cross_entropy import (
    DEFAULT_LOSS_OPTIONS,
    LossOptions,
    linear_cross_entropy,
)
from sansgpu.kernels.log_probabilities import target_log_probabilities
from sansgpu.models.attention_windows import (
    CONVOLUTION,
    FULL,
    LINEAR,
    SLIDING,
    has_convolutions,
    has_recurrences,
    layer_types,
)
from sansgpu.models.frozen_layers import FrozenLayers
from sansgpu.models.generation.kv_cache import SlotCache, WindowedSlots
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.probes import (
    PROBE_LONGEST,
    attends_by_ranges,
    autocast_of,
    body_of,
    can_pack,
    has_causal_attention,
    head_is_plain,
    logits_of,
    may_share,
    packs_well,
    pads_well,
    position_offset,
    shares_well,
    window_of,
)
from sansgpu.models.huggingface.rotary_attention import LengthDependentRotary
from sansgpu.models.kept_states import KeptStates
from sansgpu.models.modules import integer_of_model
from sansgpu.models.packed_masks import KeyRanges, PackedMask, SequenceStarts, TokenPositions, stand_in_mask
from sansgpu.models.quantized_layers import matrix_of
from sansgpu.models.recurrent_layers import STARTS
from sansgpu.models.shared_prefixes import SharedPrefixes
from sansgpu.models.token_rows import in_order, of_equal_length, padded_rows

if TYPE_CHECKING:  # transformers is optional and slow to import
    from transformers import PreTrainedModel

MIN_SAVED = 0.05  # share of tokens; copying keys and values takes about as long as computing 2% of them

Flat = Callable[[torch.Tensor], torch.Tensor]  # gathers the N tokens of an output (B, T, ...): (N, ...)


class UnpaddedModel:
    """Wraps a transformers model so that it takes concatenated examples, each of at most `longest` tokens.

    If `packs`, the examples share one row and do not attend to each other; otherwise each one has a padded row.
    Examples whose RoPE frequencies differ, because they depend on the length, run in separate forward passes.
    """

    def __init__(self, model: PreTrainedModel, pack: bool, longest: int = PROBE_LONGEST) -> None:
        self.model, self._rotary = model, LengthDependentRotary(model)
        self._text: Any = model.config.get_text_config()
        self.causal = has_causal_attention(model)
        self._window = window_of(model)
        self._has_convolutions = has_convolutions(self._text)
        self.has_recurrences = has_recurrences(self._text)
        self._by_ranges = attends_by_ranges(model)
        self.position_offset = position_offset(model)
        self.softcap = getattr(self._text, "final_logit_softcapping", None) or 0.0
        self.shares = False  # until a probe below shows that sharing changes no output
        self._pads = True  # otherwise, only examples of the same length run together
        self.frozen: FrozenLayers | None = None
        self.kept: KeptStates | None = None  # outputs of the frozen layers
        self._counts = [0, 0]  # tokens of sequences, and those that were computed, in passes of training
        with reading(model), torch.no_grad(), autocast_of(model):
            unscaled = min(longest, self._rotary.unscaled or longest)
            self.packs = pack and can_pack(model) and packs_well(self, unscaled)
            self._pads = self.packs or self.causal or pads_well(self)
            self.fused = head_is_plain(model, self.softcap)
            self.shares = self.packs and may_share(model) and shares_well(self)

    def packed_inputs(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: PackedMask | None = None,
        windowed: Callable[[int], PackedMask] | None = None,
    ) -> dict[str, Any]:
        """Returns the model's keyword arguments for packed tokens with `ids` and `positions`, both (B, T).

        `windowed` returns the mask of layers with a sliding window of the given size, if the model has such layers.
        """
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions + self.position_offset}
        if mask is not None:
            inputs["attention_mask"] = self._by_layer(mask, windowed, positions)
        return inputs

    def _by_layer(
        self, mask: PackedMask, windowed: Callable[[int], PackedMask] | None, positions: torch.Tensor
    ) -> torch.Tensor | dict[str, Any]:
        """Returns the mask of all layers, or one for each layer type."""
        device = positions.device
        if self._has_convolutions:
            return {FULL: stand_in_mask(mask, device), CONVOLUTION: TokenPositions(positions)}
        if self._window is None or windowed is None:
            return stand_in_mask(mask, device)
        local = stand_in_mask(windowed(self._window), device)
        return {FULL: stand_in_mask(mask, device), SLIDING: local} if layer_types(self._text) else local

    def _add_starts(self, inputs: dict[str, Any], starts: torch.Tensor) -> None:
        """Tells recurrent layers, if the model has any, where sequences start: `starts` (S + 1,)."""
        if not self.has_recurrences:
            return
        recurrent = stand_in_mask(SequenceStarts(starts), starts.device)
        full = inputs.get("attention_mask")
        inputs["attention_mask"] = recurrent if full is None else {FULL: full, LINEAR: recurrent}
        inputs[STARTS] = starts

    def slot_inputs(self, ids: torch.Tensor, cache: SlotCache) -> dict[str, Any]:
        """Returns the model's keyword arguments for the tokens (B, T) of a pass with a SlotCache."""
        mask = cache if self._by_ranges else None
        inputs = self.packed_inputs(ids, cache.positions.view_as(ids), mask, partial(WindowedSlots, cache))
        self._add_starts(inputs, cache.starts)
        return inputs

    @contextmanager
    def _forward(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None = None
    ) -> Iterator[tuple[dict[str, torch.Tensor], Flat]]:
        """Context for a forward pass, which skips frozen layers if their outputs are kept for all examples.

        Yields the model's keyword arguments, and a function that gathers the N tokens of its outputs. `tokens` and
        `types` are (N,).
        """
        inputs, flat, arranged = self._inputs(tokens, lengths, types)
        states = None if self.kept is None else self.kept.rows(tokens, lengths, types)
        if self.frozen is None or states is None:
            yield inputs, flat
            return
        with self.frozen.skipped(arranged(states)):
            yield inputs, flat

    def _inputs(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], Flat, Flat]:
        """Returns the model's keyword arguments, and functions that gather and arrange tokens.

        The first one gathers the N tokens of an output (B, T, ...), and the second one does the opposite.
        """
        row = SharedPrefixes.of(tokens, lengths) if self.shares and types is None else None
        if row is not None and row.saved < MIN_SAVED * len(tokens):
            row = None
        if torch.is_grad_enabled():
            self._counts[0] += len(tokens)
            self._counts[1] += len(tokens if row is None else row)
        if row is not None:
            inputs = self._shared_inputs(tokens, row)
            return inputs, lambda output: row.expand(output[0]), lambda rows: rows[row.originals][None]
        examples, positions = token_places(lengths)
        if self.packs:
            inputs = self.packed_inputs(tokens[None], positions[None])
            if self._by_ranges:
                inputs["attention_mask"] = self._packed_mask(examples[None], positions[None])
            self._add_starts(inputs, torch.cat((lengths.new_zeros(1), lengths.cumsum(0))))
            if types is not None:
                inputs["token_type_ids"] = types[None]
            return inputs, lambda output: output[0], lambda rows: rows[None]
        padded = self._padded(tokens, lengths, types)
        return padded, lambda output: output[examples, positions], lambda rows: padded_rows(rows, lengths)

    def take_counts(self) -> tuple[float, float]:
        """Returns and resets how many tokens training passes had, and how many of them were computed."""
        (given, computed), self._counts = self._counts, [0, 0]
        return float(given), float(computed)

    def _shared_inputs(self, tokens: torch.Tensor, row: SharedPrefixes) -> dict[str, Any]:
        """Returns the model's keyword arguments for a row in which the sequences `tokens` (N,) share beginnings."""
        return self.packed_inputs(tokens[row.originals][None], row.positions[None], row, row.windowed)

    def _packed_mask(self, examples: torch.Tensor, positions: torch.Tensor) -> Any:
        """Returns the mask of packed tokens, or one per layer type.

        `examples` and `positions` (1, N) are the example of each token and its position in it.
        """
        if self.causal:
            ranges = causal_ranges(examples)
            return self._by_layer(KeyRanges(ranges), lambda size: KeyRanges(in_window(ranges, size)), positions)
        ranges = bidirectional_ranges(examples)

        def windowed(size: int) -> KeyRanges:
            position = torch.arange(examples.shape[1], device=examples.device, dtype=ranges.dtype)
            first = torch.maximum(ranges[..., 0], position - size)
            end = torch.minimum(ranges[..., 1], position + size + 1)
            return KeyRanges(torch.stack((first, end), dim=-1))

        return self._by_layer(KeyRanges(ranges), windowed, positions)

    def _padded(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Returns the model's keyword arguments for one padded row per example."""
        mask = padded_rows(torch.ones_like(tokens), lengths)
        inputs = {
            "input_ids": padded_rows(tokens, lengths, int(getattr(self._text, "pad_token_id", None) or 0)),
            "attention_mask": mask,
        }
        if types is not None:
            inputs["token_type_ids"] = padded_rows(types, lengths)
        return inputs

    def summed_loss(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        targets: torch.Tensor,
        options: LossOptions = DEFAULT_LOSS_OPTIONS,
    ) -> torch.Tensor:
        """Returns the cross-entropy of a causal model, summed over targets (N,) other than -100: ()."""
        options = replace(options, softcap=self.softcap, integer=integer_of_model(self.model))
        states, head = self.head_inputs(tokens, lengths), self.head
        if head is not None:
            return linear_cross_entropy(states, matrix_of(head), targets, options)
        valid = targets != -100
        logits, targets = states[valid].float(), targets[valid]
        loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=options.label_smoothing)
        return loss + options.z_loss * torch.logsumexp(logits, dim=-1).square().sum() if options.z_loss else loss

    def head_inputs(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the final hidden states of a causal model if it has a plain `head`, else its logits: (N, ...)."""
        return self._by_token(self.before_head, tokens, lengths)

    def shared_head_inputs(self, tokens: torch.Tensor, row: SharedPrefixes) -> torch.Tensor:
        """Returns the same as `head_inputs` for the tokens of a row that stands for the sequences: (M, ...)."""
        return self.before_head(self._shared_inputs(tokens, row))[0]

    def target_log_probabilities(
        self, inputs: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """Returns the log-probability (N,) of each target (N,), from what `head_inputs` returns for its token.

        The logits are divided by `temperature` before the softmax.
        """
        if temperature != 1.0:
            inputs = inputs / temperature
        if self.head is not None:
            return target_log_probabilities(inputs, matrix_of(self.head), targets, self.softcap / temperature)
        return torch.log_softmax(inputs.float(), dim=1).gather(1, targets[:, None])[:, 0]

    def before_head(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the same as `head_inputs`, but from the model's keyword arguments and as (B, T, ...)."""
        if self.head is not None:
            states: torch.Tensor = body_of(self.model)(**inputs, use_cache=False).last_hidden_state
            return states
        logits: torch.Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    @property
    def has_plain_rows(self) -> bool:
        """True if the model `fits_slots` and all its layers have full attention."""
        others = self._window is not None or self._has_convolutions or self.has_recurrences
        return self.fits_slots and not others

    @property
    def fits_slots(self) -> bool:
        """True for a causal model that packs with only key ranges and starts, and has no length-dependent RoPE."""
        attends = self.causal and self._by_ranges
        return self.packs and not self._rotary and (attends or (self.has_recurrences and not self.causal))

    @property
    def head(self) -> nn.Linear | None:
        """The output head of a causal model if its logits are the head's product with the final hidden states."""
        head: Any = self.model.get_output_embeddings()
        return head if self.fused and isinstance(head, nn.Linear) else None  # peft may have replaced the head

    def qa_logits(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the start and end logits of a question answering model: (N,) and (N,), fp32."""

        def start_and_end(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            output = self.model(**inputs)
            return torch.stack((output.start_logits, output.end_logits), dim=-1)

        starts, ends = self._by_token(start_and_end, tokens, lengths, types).float().unbind(dim=1)
        return starts, ends

    def token_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Returns the logits of a token classifier: (N, L), fp32."""
        return self._by_token(lambda inputs: self.model(**inputs).logits, tokens, lengths, types).float()

    def sequence_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Returns the logits of a sequence classifier: (B, L), fp32."""
        examples, _ = token_places(lengths)
        groups = []
        for indices, group in self._groups(lengths):
            own_types = None if types is None else types[indices]
            logits = self._sequence_logits(tokens[indices], group, own_types)
            groups.append((examples[indices].unique(), logits.float()))
        return in_order(groups)

    def _sequence_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Runs the base model on packed examples and the head on padded ones, which every head supports."""
        with self._forward(tokens, lengths, types) as (inputs, flat):
            if self.packs:
                return self._logits_of_packed(inputs, flat, self._padded(tokens, lengths, types), lengths)
            logits: torch.Tensor = self.model(**inputs).logits
            return logits

    def _logits_of_packed(
        self, packed: dict[str, torch.Tensor], flat: Flat, padded: dict[str, torch.Tensor], lengths: torch.Tensor
    ) -> torch.Tensor:
        base: Any = body_of(self.model)

        def pack(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return (), {**kwargs, "attention_mask": None, **packed}

        def unpack(module: nn.Module, args: Any, output: Any) -> Any:
            output.last_hidden_state = padded_rows(flat(output.last_hidden_state), lengths)
            return output

        hooks = [base.register_forward_pre_hook(pack, with_kwargs=True), base.register_forward_hook(unpack)]
        if (pooler := getattr(base, "pooler", None)) is not None:  # e.g. BERT's, which is inside the base model
            hooks.append(
                pooler.register_forward_pre_hook(lambda _, args: (padded_rows(args[0][0], lengths), *args[1:]))
            )
        try:
            logits: torch.Tensor = self.model(**padded).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits

    def frozen_states(self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None) -> torch.Tensor:
        """Returns what the frozen layers compute: (N, D)."""
        assert self.frozen is not None
        below = self.frozen.output
        return self._by_token(lambda inputs: below(lambda: body_of(self.model)(**inputs)), tokens, lengths, types)

    def hidden_states(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Returns the final hidden states of the base model: (N, D)."""
        return self._by_token(lambda inputs: body_of(self.model)(**inputs).last_hidden_state, tokens, lengths)

    def masked_lm_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Returns the logits of a masked LM at the M tokens where `masked` (N,) is True: (M, V)."""
        parts = [(p[masked[p]], self._masked_logits(tokens[p], group, masked[p])) for p, group in self._groups(lengths)]
        return in_order(parts)

    def _masked_logits(self, tokens: torch.Tensor, lengths: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        with self._forward(tokens, lengths) as (inputs, flat):
            return logits_of(self.model, lambda states: flat(states)[masked], **inputs)

    def _groups(self, lengths: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the token indices (n,) and lengths (b,) of the examples for each forward pass."""
        all_tokens = torch.arange(int(lengths.sum()), device=lengths.device)
        if self._pads and not self._rotary:
            yield all_tokens, lengths
            return
        for group in self._rotary.groups(lengths.tolist()) if self._pads else of_equal_length(lengths.tolist()):
            self._rotary.reset()
            chosen = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
            chosen[group] = True
            yield all_tokens[torch.repeat_interleave(chosen, lengths)], lengths[chosen]

    def _by_token(
        self,
        run: Callable[[dict[str, torch.Tensor]], torch.Tensor],
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Calls `run` with the model's keyword arguments and returns its output for each of the N tokens: (N, ...)."""
        parts = []
        for indices, group in self._groups(lengths):
            own_types = None if types is None else types[indices]
            with self._forward(tokens[indices], group, own_types) as (inputs, flat):
                parts.append((indices, flat(run(inputs))))
        return in_order(parts)
