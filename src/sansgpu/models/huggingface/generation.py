"""Text generation with transformers models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, PreTrainedModel

from sansgpu.kernels.decoder_step import DecoderStep, StepWeight, step_layer, step_of
from sansgpu.kernels.linear import MIN_ROWS, Linear, autocast_dtype
from sansgpu.models.generation.answer_end import token_ids
from sansgpu.models.generation.batch import BatchReader
from sansgpu.models.generation.generate import BatchModel, SlotReader
from sansgpu.models.generation.kv_cache import SlotCache
from sansgpu.models.generation.prompts import tokenizer_fields
from sansgpu.models.generation.state_slots import StateName
from sansgpu.models.huggingface.cached_reader import PretrainedReader, arguments_of, cache_use
from sansgpu.models.huggingface.fused_layers import LLAMA_PARTS, GatedFeedForward, PreNormLayer
from sansgpu.models.huggingface.packed_forward import UnpaddedModel
from sansgpu.models.huggingface.probes import autocast_of, close_outputs, copies_for_kernels, logits_of, probe_tokens
from sansgpu.models.huggingface.rotary_attention import LLAMA_NAMES, NORMS, RotaryAttention
from sansgpu.models.modules import blocks_of, integer_of_model
from sansgpu.models.quantized_layers import QuantizedLinear, has_only_codes, matrix_of, pack_codes

UNBOUNDED_CONTEXT = 4096  # tokens of context for models without max_position_embeddings


class PretrainedSlots(SlotReader):
    """A BatchReader with several sequences for transformers models that use our attention; see `slots_work`."""

    def __init__(self, unpadded: UnpaddedModel, slots: int, length: int, fused: DecoderStep | None = None) -> None:
        super().__init__(slots, length, fused, 1 if has_only_codes(unpadded.model) else MIN_ROWS)
        self._unpadded, self.recurrent = unpadded, unpadded.has_recurrences
        self._argument = "past_key_values" if "past_key_values" in arguments_of(unpadded.model) else "cache_params"

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        model = self._unpadded.model
        inputs = self._unpadded.slot_inputs(ids, self.cache) | {self._argument: _TransformersCache(self.cache)}
        with autocast_of(model):
            return logits_after(model, chosen, **inputs, use_cache=True)

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model: Any = self._unpadded.model
        x = model.get_input_embeddings()(ids)
        return x, *model.base_model.rotary_emb(x.float(), positions[:, None])


class _TransformersCache(Cache):
    """A SlotCache with the interface of transformers' caches."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        widths = key_states.shape[-1], value_states.shape[-1]
        if widths[0] == widths[1]:
            return self._cache.append(key_states, value_states, layer_idx)
        # Latent attention caches two parts of different widths; the cache has one, so the narrower part is widened.
        keys, values = (F.pad(part, (0, max(widths) - part.shape[-1])) for part in (key_states, value_states))
        keys, values = self._cache.append(keys, values, layer_idx)
        return keys[..., : widths[0]], values[..., : widths[1]]

    @property
    def places(self) -> torch.Tensor:
        """The indices of the tokens of a pass in the states that `update` returns."""
        return self._cache.places

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._cache.states(StateName(layer_idx, "inputs", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Takes the inputs (1, D, T) of prompts; the code of transformers updates the state itself in a step."""
        self._cache.store_inputs(StateName(layer_idx, "inputs", state_idx), conv_states, kwargs["conv_kernel_size"])
        return conv_states

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._cache.states(StateName(layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._cache.store_states(StateName(layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def slots_work(unpadded: UnpaddedModel, fused: DecoderStep | None = None) -> bool:
    """Returns True if a model gives the same logits with several sequences in a SlotCache as with separate passes.

    Models with length-dependent RoPE do not.
    """
    if not unpadded.fits_slots or unpadded.model.device.type != "cpu":
        return False
    model, tokens = unpadded.model, probe_tokens(unpadded.model, 17)
    first, second = tokens[:7].tolist(), tokens[7:].tolist()
    reader, last = PretrainedSlots(unpadded, 2, 32, fused), torch.tensor([-1])
    try:
        with torch.inference_mode(), autocast_of(model):
            copied = [torch.tensor([ids] * copies_for_kernels(len(ids))) for ids in (first, second)]
            expected = [logits_after(model, last, input_ids=ids) for ids in copied]
            reader.add([first[:-2], second[:-2]])
            for place in (-2, -1):  # a second step needs the state that the first one leaves
                found = reader.step([first[place], second[place]])
    except Exception:  # whatever goes wrong, separate passes still work
        return False
    return close_outputs(model, found.float(), torch.cat(expected).float())


def logits_after(model: PreTrainedModel, chosen: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Computes only the logits (n, V) at `chosen` (n,), indices into all tokens of the batch."""
    return logits_of(model, lambda states: states.flatten(0, 1)[chosen], **inputs)


def pretrained_step(model: Any, may_fill_memory: bool = False) -> DecoderStep | None:
    """Returns the fused decoding step of a model whose blocks are all fused; None for other models."""
    blocks: list[Any] = blocks_of(model)
    head, last_norm = _step_weight(model.get_output_embeddings()), getattr(model.base_model, "norm", None)
    if not blocks or head is None:
        return None
    layers = []
    for block in blocks:
        if not _is_like_llama(block):
            return None
        attention, mlp = block.self_attn, block.mlp
        projections = [getattr(attention, name) for name in (*LLAMA_NAMES.inputs, LLAMA_NAMES.output)]
        linears = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        head_norms = [getattr(attention, name, None) for name in NORMS]
        weights = [_step_weight(linear) for linear in linears]
        layers.append(step_layer(block.input_layernorm, block.post_attention_layernorm, head_norms, weights))
    with autocast_of(model):
        dtype = autocast_dtype(torch.empty(0)) or torch.float32
    head_dim, integer = blocks[0].self_attn.head_dim, integer_of_model(model)
    return step_of(layers, last_norm, head, head_dim, dtype, integer, may_fill_memory)


def _is_like_llama(block: Any) -> bool:
    """Returns whether the fused decoding step computes what a block does."""
    if not isinstance(block, PreNormLayer) or block.names != PreNormLayer.names or block.residual_multiplier != 1.0:
        return False
    parts: dict[str, Any] = cast(Any, block)._modules
    attention, mlp = parts["self_attn"], parts["mlp"]
    if not isinstance(attention, RotaryAttention) or attention.rotary_names != LLAMA_NAMES:
        return False
    if attention.softcap is not None or attention.score_scale * attention.head_dim**0.5 != 1.0:
        return False
    return isinstance(mlp, GatedFeedForward) and mlp.gated_parts == LLAMA_PARTS


def _step_weight(layer: Any) -> StepWeight | None:
    """Returns the weight, bias and adapter of a linear layer, or None if it computes something else."""
    if type(layer) in (Linear, nn.Linear, QuantizedLinear):
        return StepWeight(matrix_of(layer), layer.bias)
    if not hasattr(layer, "lora_A"):
        return None
    from sansgpu.models.huggingface.lora import LoraLinear  # imports peft, which takes a second

    adapter = layer.single_adapter() if isinstance(layer, LoraLinear) else None
    base = _step_weight(layer.base_layer)
    return None if adapter is None or base is None else replace(base, adapter=adapter)


def pretrained_single(model: PreTrainedModel, tokenizer: Any) -> BatchModel:
    """Returns a transformers model and its tokenizer as a BatchModel that processes one sequence at a time."""
    return _batch_model(model, tokenizer, None)


def pretrained_batch(unpadded: UnpaddedModel, tokenizer: Any, may_fill_memory: bool = False) -> BatchModel:
    """Returns a transformers model and its tokenizer as the fastest BatchModel that works.

    It may keep a packed copy of the weights: if enough memory is available, or always with `may_fill_memory`.
    """
    model, fused = unpadded.model, None
    if unpadded.has_plain_rows:
        fused = pretrained_step(model, may_fill_memory)
    if fused is None:
        pack_codes(model, may_fill_memory)
    together = slots_work(unpadded, fused)
    if not together and fused is not None:  # its embeddings or head may differ from those of the fused step
        pack_codes(model, may_fill_memory)
        together, fused = slots_work(unpadded), None
    if not together:
        return pretrained_single(model, tokenizer)

    def open_reader(slots: int, length: int) -> BatchReader:
        return PretrainedSlots(unpadded, slots, length, fused)

    batch = _batch_model(model, tokenizer, open_reader)
    return (
        batch
        if fused is None
        else replace(batch, open_single=lambda length: PretrainedSlots(unpadded, 1, length, fused.exact()))
    )


def _batch_model(
    model: PreTrainedModel, tokenizer: Any, open_reader: Callable[[int, int], BatchReader] | None
) -> BatchModel:
    """Returns a BatchModel. Without `open_reader`, it processes one sequence at a time."""
    text: Any = model.config.get_text_config()
    use = cache(lambda: cache_use(model))  # the trial runs once, when the first reader is opened

    def open_single(length: int) -> BatchReader:
        return PretrainedReader(model, use())

    return BatchModel(
        open_reader or (lambda slots, length: open_single(length)),
        open_single,
        int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT),
        together=open_reader is not None,
        **tokenizer_fields(tokenizer, token_ids(getattr(model.generation_config, "eos_token_id", None))),
    )
