"""Runs a transformers model on a few tokens to find out which optimizations leave its outputs unchanged."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sansgpu.kernels.linear import MIN_ROWS, Linear
from sansgpu.models.attention_interface import NAME
from sansgpu.models.attention_windows import (
    causal_window,
    encoder_window,
    has_convolutions,
    has_recurrences,
    has_windows,
)
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.rotary_attention import LengthDependentRotary
from sansgpu.models.modules import blocks_of, integer_of_model
from sansgpu.models.quantized_layers import QuantizedLayer, QuantizedLinear
from sansgpu.models.recurrent_layers import STARTS
from sansgpu.models.relative_attention import has_relative_attention

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

PROBE_SHORT = 5  # tokens of the first example, so that the second one does not start at a block boundary
PROBE_LONG = 65  # minimum tokens of the second example: longer than hard-coded blocks of 32 or 64 tokens
PROBE_LONGEST = 1024  # maximum tokens of the second example, if the length of the data's examples is unknown
SHARED_PARTS = (24, 9, 13, 17)  # tokens of the beginning that examples of a probe share, and of their ends
PROBE_FLOPS = 1e11  # about a second; if a probe would take more, only the first blocks run
# Keys of a config whose values cannot be window sizes.
OTHER_SIZES = re.compile(r"_ids?$|vocab|hidden|intermediate|ffn|mlp|dim$|embd|d_model|^n_|^num_|max_position|head|rank")
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # relative to the largest output
INTEGER_TOLERANCE = {"int16": 1e-2, "int8": 0.2}  # the same for models that multiply integers
Output = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (concatenated examples, their lengths) -> outputs


class PackingModel(Protocol):
    """The interface of `UnpaddedModel` that the probes use."""

    model: PreTrainedModel
    packs: bool
    shares: bool
    position_offset: int

    def hidden_states(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor: ...

    def sequence_logits(
        self, tokens: torch.Tensor, lengths: torch.Tensor, types: torch.Tensor | None
    ) -> torch.Tensor: ...


def packs_well(unpadded: PackingModel, longest: int) -> bool:
    """Returns True if two packed examples give the same outputs as separate forward passes. Changes `packs`.

    They differ for models with recurrent state or with other position ids, for instance. The examples have up to
    `longest` tokens.
    """
    model = unpadded.model
    lengths = _probe_lengths(unpadded, longest)
    lengths *= copies_for_kernels(sum(lengths))
    tokens = probe_tokens(model, sum(lengths))
    outputs: list[Output] = [lambda tokens, lengths: unpadded.hidden_states(tokens, lengths).float()]
    if type(model).__name__.endswith("ForSequenceClassification"):
        outputs.append(lambda tokens, lengths: unpadded.sequence_logits(tokens, lengths, None))
    with _blocks_to_probe(model, sum(lengths)):
        return all(_packs_equally(unpadded, output, tokens, lengths) for output in outputs)


def _packs_equally(unpadded: PackingModel, output: Output, tokens: torch.Tensor, lengths: list[int]) -> bool:
    try:
        unpadded.packs = True
        packed = output(tokens, torch.tensor(lengths))
        unpadded.packs = False
        separate = [_separate(output, part) for part in tokens.split(lengths)]
    except Exception:  # anything that the code of a model may raise
        return False
    return close_outputs(unpadded.model, packed, torch.cat(separate))


def pads_well(unpadded: PackingModel) -> bool:
    """Returns False if padding changes the outputs of an encoder, e.g. because convolutions mix neighboring tokens."""
    lengths = [PROBE_SHORT, *SHARED_PARTS]
    tokens = probe_tokens(unpadded.model, sum(lengths))
    try:
        with _blocks_to_probe(unpadded.model, sum(lengths)):
            padded = unpadded.hidden_states(tokens, torch.tensor(lengths))
            separate = [_separate(unpadded.hidden_states, part) for part in tokens.split(lengths)]
    except Exception:  # some models take only texts of certain lengths
        return True
    return close_outputs(unpadded.model, padded.float(), torch.cat(separate).float())


def shares_well(unpadded: PackingModel) -> bool:
    """Returns True if examples that share beginnings give the same outputs as separate ones. Changes `shares`."""
    model = unpadded.model
    beginning, *ends = probe_tokens(model, sum(SHARED_PARTS)).split(SHARED_PARTS)
    examples = [torch.cat((beginning, ends[0])), torch.cat((beginning[:PROBE_SHORT], ends[1])), ends[2]]
    examples.append(torch.cat((beginning, ends[2])))
    tokens, lengths = torch.cat(examples), torch.tensor([len(one) for one in examples])
    with _blocks_to_probe(model, len(tokens)):
        try:
            unpadded.shares = False
            separate = unpadded.hidden_states(tokens, lengths)
            unpadded.shares = True
            shared = unpadded.hidden_states(tokens, lengths)
        except Exception:  # anything that the code of a model may raise
            return False
    return close_outputs(model, shared.float(), separate.float())


def _blocks_to_probe(model: PreTrainedModel, tokens: int) -> AbstractContextManager[None]:
    """Returns a context that truncates a model to its first blocks if a probe with all of them would take too long."""
    flops = 4.0 * tokens * block_weights(model)
    return first_blocks_of(model) if flops > PROBE_FLOPS else nullcontext()


def block_weights(model: PreTrainedModel) -> int:
    """Returns the number of weights in the blocks of a model, of which some may be quantized."""
    modules = [module for block in blocks_of(model) for module in block.modules()]
    quantized = [module.blocks for module in modules if isinstance(module, QuantizedLayer)]
    plain = sum(p.numel() for module in modules for p in module.parameters(recurse=False))
    return plain + sum(blocks.outputs * blocks.inputs for blocks in quantized)


def _separate(output: Output, part: torch.Tensor) -> torch.Tensor:
    """Returns the output of a single example."""
    copies = copies_for_kernels(len(part))
    return output(part.repeat(copies), torch.full((copies,), len(part))).chunk(copies)[0]


def probe_tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Returns different tokens (count,) of a model's vocabulary."""
    return torch.arange(count) * 7 % int(model.config.get_text_config().vocab_size)


@torch.no_grad()
def output_width(unpadded: PackingModel) -> int:
    """Returns the number of features of final hidden states, which differs from that of the layers in some models."""
    tokens = probe_tokens(unpadded.model, PROBE_SHORT)
    with reading(unpadded.model), autocast_of(unpadded.model):
        return unpadded.hidden_states(tokens, torch.tensor([len(tokens)])).shape[1]


def copies_for_kernels(rows: int) -> int:
    """Returns how often to repeat `rows` tokens so that the same matmul kernel runs as for many tokens.

    Different kernels compute matmuls with few rows and round differently. A comparison of passes with few and with many
    rows would measure that: 4-bit models amplify it to 4% of their outputs.
    """
    return -(-MIN_ROWS // rows)


def _probe_lengths(unpadded: PackingModel, longest: int) -> list[int]:
    """Returns the lengths of a short example and of one that is longer than every window or block in the config.

    Neither exceeds `longest` or the model's maximum position.
    """
    config: Any = unpadded.model.config
    max_positions = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
    limit = min(longest, max_positions - unpadded.position_offset) if max_positions > 0 else longest
    beyond_windows = 1 + max(_possible_windows(config.to_dict()), default=0)
    return [min(PROBE_SHORT, limit), min(max(PROBE_LONG, beyond_windows), limit)]


def _possible_windows(settings: Any, name: str = "") -> Iterator[int]:
    """Yields every integer in a config that may be the size of a window, block, chunk or stride."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _possible_windows(value, str(key))
    elif isinstance(settings, (list, tuple)):
        for value in settings:
            yield from _possible_windows(value, name)
    elif isinstance(settings, int) and not isinstance(settings, bool) and not OTHER_SIZES.search(name):
        yield settings


@contextmanager
def first_blocks_of(model: PreTrainedModel) -> Iterator[None]:
    """Context that truncates a model to its first blocks, with at least one block of each kind."""
    blocks = blocks_of(model)
    types = getattr(model.config.get_text_config(), "layer_types", None) or [None] * len(blocks)
    kinds = [(kind, *(type(module) for module in block.modules())) for kind, block in zip(types, blocks, strict=False)]
    count = max([2, *(kinds.index(kind) + 1 for kind in dict.fromkeys(kinds))])
    if not blocks:
        yield
        return
    children = ((parent, name, child) for parent in model.modules() for name, child in parent.named_children())
    parent, name, block_list = next(
        (parent, name, child)
        for parent, name, child in children
        if isinstance(child, nn.ModuleList) and len(child) == len(blocks) and all(map(operator.is_, child, blocks))
    )
    setattr(parent, name, block_list[:count])
    try:
        yield
    finally:
        setattr(parent, name, block_list)


def body_of(model: PreTrainedModel) -> Any:
    """Returns the part of a model before its head, which computes the final hidden states."""
    from transformers import PreTrainedModel

    base = model.base_model
    if base is not model or model.get_output_embeddings() is None:
        return base
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else base  # Llama 4's class has the wrong name for its body


def logits_of(model: PreTrainedModel, chosen: Callable[[torch.Tensor], torch.Tensor], **inputs: Any) -> torch.Tensor:
    """Computes only the logits (n, V) of n tokens, whose final hidden states `chosen` gathers from (B, T, D)."""
    logits: torch.Tensor = output_of(model, chosen, **inputs).logits[0]
    return logits


def output_of(model: PreTrainedModel, chosen: Callable[[torch.Tensor], torch.Tensor], **inputs: Any) -> Any:
    """Returns the model's output, in which `logits` (1, n, V) are those of the tokens that `chosen` gathers."""
    base: Any = body_of(model)

    def select(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = chosen(output.last_hidden_state)[None]
        return output

    # Mamba 2's class with a head does not pass on arguments that it does not know.
    known = {STARTS: inputs.pop(STARTS)} if STARTS in inputs else {}
    hooks = [
        base.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, **known}), with_kwargs=True),
        base.register_forward_hook(select),
    ]
    try:
        return model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()


def towers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the parts of a multimodal model that compute nothing for a text, such as its image encoder, by name."""
    text, body = model.config.get_text_config(), body_of(model)
    parts = {name: part for name, part in body.named_children() if any(True for _ in part.parameters())}
    readers = [name for name, part in parts.items() if getattr(part, "config", None) is text]
    if text is model.config or len(readers) != 1:
        return {}
    return {name: part for name, part in parts.items() if name not in readers}


def position_offset(model: PreTrainedModel) -> int:
    """Returns the position id of the first token, which is the padding id plus one in RoBERTa and its relatives."""
    modules: Iterator[Any] = (m for m in model.modules() if hasattr(m, "create_position_ids_from_inputs_embeds"))
    return next((int(module.padding_idx) + 1 for module in modules), 0)


def has_causal_attention(model: PreTrainedModel) -> bool:
    return any(m.is_causal for m in model.modules() if hasattr(m, "is_causal"))


def can_pack(model: PreTrainedModel) -> bool:
    """Returns whether the model's attention masks allow packing, without running the model.

    They do not if an encoder has windows that our masks do not support, or if the mask has a fixed size, as in GPT-Neo,
    because packed examples may be longer than the mask.
    """
    config = model.config.get_text_config()
    places = getattr(config, "max_position_embeddings", None)
    if any(buffer.shape[-2:] == (places, places) for buffer in model.buffers()):
        return False
    return (
        has_causal_attention(model)
        or has_recurrences(config)
        or not has_windows(config)
        or encoder_window(config) is not None
    )


def may_share(model: PreTrainedModel) -> bool:
    """Returns whether the model's attention allows examples to share beginnings, without running the model."""
    text: Any = model.config.get_text_config()
    plain = not has_convolutions(text) and not has_recurrences(text) and not LengthDependentRotary(model)
    return plain and has_causal_attention(model) and attends_by_ranges(model)


def attends_by_ranges(model: PreTrainedModel) -> bool:
    """Returns whether key ranges can express all attention masks of the model."""
    text: Any = model.config.get_text_config()
    if has_recurrences(text):
        known = has_causal_attention(model)
    else:
        known = window_of(model) is not None or has_convolutions(text) or not has_windows(text)
    return known and (model.config._attn_implementation == NAME or has_relative_attention(model))


def window_of(model: PreTrainedModel) -> int | None:
    text: Any = model.config.get_text_config()
    return causal_window(text) if has_causal_attention(model) else encoder_window(text)


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Returns True if a token changes the outputs of earlier ones, as in an encoder. Runs only models that may do so.

    These are the outputs before the head, whose weights may be missing and thus uninitialized.
    """
    if has_causal_attention(model):
        return False
    copies = copies_for_kernels(PROBE_SHORT)
    tokens = probe_tokens(model, 2 * PROBE_SHORT).repeat(copies, 1)
    with torch.no_grad(), autocast_of(model):
        part, whole = (body_of(model)(ids)[0].float() for ids in (tokens[:, :PROBE_SHORT], tokens))
    return _relative_error(part, whole[:, :PROBE_SHORT]) > _tolerance(model)  # False for weights that are NaN


def close_outputs(model: PreTrainedModel, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns True if two outputs of a model are equal up to rounding in the dtype of its matrices."""
    return _relative_error(found, expected) <= _tolerance(model)


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / found.abs().max())


def _tolerance(model: PreTrainedModel) -> float:
    of_dtype = PROBE_TOLERANCE.get(matrix_dtype(model), min(PROBE_TOLERANCE.values()))
    return max(of_dtype, INTEGER_TOLERANCE.get(integer_of_model(model) or "", 0.0))


def autocast_of(model: PreTrainedModel) -> torch.autocast:
    """Returns an autocast context for inference, which is enabled if the model's matrices are in bf16."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=matrix_dtype(model) == torch.bfloat16)


def matrix_dtype(model: PreTrainedModel) -> torch.dtype:
    embedding: Any = model.get_input_embeddings()
    weight = getattr(embedding, "weight", embedding)  # Perceiver's is no module
    return torch.bfloat16 if weight is None else weight.dtype  # None: quantized, runs in bf16


def head_is_plain(model: PreTrainedModel, softcap: float) -> bool:
    """Returns True if the logits are the head's product with the final hidden states, apart from softcapping.

    Some models also scale or shift them.
    """
    head: Any = model.get_output_embeddings()
    if type(head) not in (nn.Linear, Linear, QuantizedLinear) or head.bias is not None:
        return False
    probe = torch.arange(4)[None] % head.out_features
    try:
        logits = head(body_of(model)(probe).last_hidden_state)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        return torch.allclose(logits, model(probe).logits, rtol=1e-4, atol=1e-5)
    except Exception:  # anything that the code of a model may raise
        return False
