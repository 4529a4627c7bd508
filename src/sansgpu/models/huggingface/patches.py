"""Makes the layers of a transformers model use our kernels, which compute the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from sansgpu.kernels.embedding import embed
from sansgpu.kernels.feed_forward import feed_forward
from sansgpu.kernels.linear import Linear
from sansgpu.kernels.norm import LayerNorm
from sansgpu.kernels.pointwise import Activation, dropout
from sansgpu.models import families
from sansgpu.models.attention_interface import (
    NAME,
    attention_forward,
    use_our_attention,
    uses_our_attention,
)
from sansgpu.models.attention_windows import has_recurrences
from sansgpu.models.huggingface.fused_layers import FusedGELU, FusedTanhGELU, fuse_layers
from sansgpu.models.huggingface.patch_trial import apply_patches
from sansgpu.models.huggingface.probes import has_causal_attention
from sansgpu.models.huggingface.rotary_attention import fuse_rotary_attention
from sansgpu.models.layer_trials import (
    AttentionPart,
    LinearPart,
    Part,
    agree,
    random_tensor,
    replaced_parts,
    tried,
    with_forward,
)
from sansgpu.models.packed_masks import projected_heads
from sansgpu.models.quantized_layers import is_linear
from sansgpu.models.recurrent_layers import use_recurrent_kernels
from sansgpu.models.relative_attention import fuse_relative_attention, has_relative_attention

GELUS: dict[type[nn.Module], Activation] = {FusedGELU: Activation.GELU, FusedTanhGELU: Activation.GELU_TANH}


class _EncoderAttention:
    """Mixin for self-attention that projects queries, keys and values in one call."""

    projections: tuple[str, str, str]
    dropout: nn.Dropout
    attention_head_size: int
    scaling: float
    training: bool

    def attend(self, x: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        """Computes attention without the output projection: (B, T, D) -> (B, T, D)."""
        q, k, v = projected_heads(x, self.attention_head_size, *(getattr(self, name) for name in self.projections))
        dropout = self.dropout.p if self.training else 0.0
        out, _ = attention_forward(cast(Any, self), q, k, v, attention_mask, dropout, self.scaling, **kwargs)
        return out.flatten(2)


class BertSelfAttention(_EncoderAttention):
    """Mixin for the self-attention of BERT, whose output projection is in a separate module."""

    projections = ("query", "key", "value")

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if past_key_values is not None:  # a decoder generates with a cache
            original = cast(Any, super()).forward
            return cast(
                tuple[torch.Tensor, None],
                original(hidden_states, attention_mask, past_key_values=past_key_values, **kwargs),
            )
        return self.attend(hidden_states, attention_mask, **kwargs), None


class DistilBertSelfAttention(_EncoderAttention):
    """Mixin for the self-attention of DistilBERT."""

    projections = ("q_lin", "k_lin", "v_lin")
    out_lin: nn.Module

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        return self.out_lin(self.attend(hidden_states, attention_mask, **kwargs)), None


class BertOutput:
    """Mixin for BertOutput and BertSelfOutput: a linear layer, dropout, residual addition and LayerNorm."""

    dense: nn.Module
    dropout: nn.Dropout
    LayerNorm: LayerNorm

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm.after(input_tensor, self.dense(hidden_states), self.dropout.p)


class BertLayer:
    """Mixin for a block of BERT that computes the feed-forward network as one autograd function."""

    fused_as = "encoder"  # see module_costs
    intermediate: Any
    output: Any

    def feed_forward_chunk(self, attention_output: torch.Tensor) -> torch.Tensor:
        up, down = self.intermediate.dense, self.output.dense
        if type(up) is not Linear or type(down) is not Linear:  # layers with an adapter have another class
            return cast(torch.Tensor, self.output(self.intermediate(attention_output), attention_output))
        y = feed_forward(attention_output, GELUS[type(self.intermediate.intermediate_act_fn)], up, down)
        return cast(torch.Tensor, self.output.LayerNorm.after(attention_output, y, self.output.dropout.p))


class DebertaLayer(BertLayer):
    """Mixin for a block of DeBERTa or MPNet, which has no method for the feed-forward network."""

    fused_as = "relative"
    attention: nn.Module

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        attention_output, *others = self.attention(hidden_states, *args, **kwargs)
        return (self.feed_forward_chunk(attention_output), *others)


class DistilBertFeedForward:
    """Mixin for the feed-forward network of DistilBERT that computes it as one autograd function."""

    lin1: nn.Module
    lin2: nn.Module
    activation: nn.Module
    dropout: nn.Module

    def ff_chunk(self, input: torch.Tensor) -> torch.Tensor:
        if type(self.lin1) is not Linear or type(self.lin2) is not Linear:  # layers with an adapter differ
            return cast(torch.Tensor, cast(Any, super()).ff_chunk(input))
        return cast(torch.Tensor, self.dropout(feed_forward(input, GELUS[type(self.activation)], self.lin1, self.lin2)))


class DistilBertBlock:
    """Mixin for a block of DistilBERT that fuses the residual additions with the norms."""

    fused_as = "encoder"
    attention: nn.Module
    sa_layer_norm: LayerNorm
    ffn: nn.Module
    output_layer_norm: LayerNorm

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        y, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        x = self.sa_layer_norm.after(hidden_states, y, 0.0)
        return self.output_layer_norm.after(x, self.ffn(x), 0.0)


def fuse_encoder_layers(model: nn.Module) -> None:
    """Makes the encoder layers of a model use fused kernels, in place; call `patch_layers` and `fuse_layers` first."""
    modules = list(model.modules())
    replaced: list[tuple[Callable[[Any], bool], type]] = [
        (lambda module: _is_self_attention(module, BertSelfAttention, ()), BertSelfAttention),
        (lambda module: _is_self_attention(module, DistilBertSelfAttention, ("out_lin",)), DistilBertSelfAttention),
        (_is_output, BertOutput),
        (_is_distilbert_feed_forward, DistilBertFeedForward),
        (_is_bert_layer, BertLayer),
        (_is_deberta_layer, DebertaLayer),
        (_is_distilbert_block, DistilBertBlock),
    ]
    for recognizes, mixin in replaced:  # submodules before the blocks that contain them
        for module in modules:
            if tried(recognizes, module):
                module.__class__ = with_forward(mixin, type(module))


def _has_parts(module: nn.Module, **types: type | tuple[type, ...]) -> bool:
    """Returns True if a module has exactly the submodules with these names and classes, and no parameters."""
    parts = module._modules
    return (
        not module._parameters and set(parts) == set(types) and all(isinstance(parts[n], t) for n, t in types.items())
    )


def _is_self_attention(module: Any, mixin: type[_EncoderAttention], others: tuple[str, ...]) -> bool:
    names = (*mixin.projections, *others)
    if not _has_parts(module, dropout=nn.Dropout, **dict.fromkeys(names, Linear)):
        return False
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != NAME:
        return False
    trial, width = copy.copy(module), 2 * module.attention_head_size
    trial._modules = {name: LinearPart(width, width, place) for place, name in enumerate(names)}
    trial._modules["dropout"], trial.training = nn.Dropout(0.5), True
    ours, x = copy.copy(trial), random_tensor(1, 5, width)
    ours.__class__ = with_forward(mixin, type(module))
    return agree(lambda: _seeded(lambda: trial.forward(x)), lambda: _seeded(lambda: ours.forward(x)))


def _seeded(attention: Callable[[], Any]) -> torch.Tensor:
    """Returns the output of attention with a fixed seed for its dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cast(torch.Tensor, attention()[0])


def _is_output(module: nn.Module) -> bool:
    if not _has_parts(module, dense=Linear, dropout=nn.Dropout, LayerNorm=LayerNorm):
        return False
    dense, drop, norm, h, x = Part(1.5), Part(2.5), Part(0.5), random_tensor(3, 8), random_tensor(3, 8).sin()
    with replaced_parts(module, {"dense": dense, "dropout": drop, "LayerNorm": norm}):
        return agree(lambda: module.forward(h, x), lambda: norm(x + drop(dense(h))))


def _is_bert_layer(module: Any) -> bool:
    return _has_feed_forward(module, lambda x: module.feed_forward_chunk(x), lambda x: x)


def _is_deberta_layer(module: Any) -> bool:
    attention = AttentionPart(0.7)
    return _has_feed_forward(module, lambda x: module.forward(x, None)[0], lambda x: attention(x)[0], attention)


def _has_feed_forward(
    module: Any,
    forward: Callable[[torch.Tensor], torch.Tensor],
    before: Callable[[torch.Tensor], torch.Tensor],
    attention: nn.Module | None = None,
) -> bool:
    """Returns True if `forward` applies `before` and then the feed-forward network of a block like BERT's."""
    if not _has_parts(module, attention=nn.Module, intermediate=nn.Module, output=BertOutput):
        return False
    first, up, act, output, x = module.intermediate, Part(1.5), Part(2.5), _OutputPart(), random_tensor(1, 3, 8)
    if not _has_parts(first, dense=Linear, intermediate_act_fn=tuple(GELUS)):
        return False
    stubs = {"dense": up, "intermediate_act_fn": act}
    blocks = {"attention": attention or module.attention, "output": output}
    with replaced_parts(first, stubs), replaced_parts(module, blocks):
        return agree(lambda: forward(x), lambda: output(act(up(before(x))), before(x)))


def _is_distilbert_feed_forward(module: Any) -> bool:
    if not _has_parts(module, lin1=Linear, activation=tuple(GELUS), lin2=Linear, dropout=nn.Dropout):
        return False
    up, act, down, drop, x = Part(1.5), Part(2.5), Part(0.5), Part(0.7), random_tensor(1, 3, 8)
    with replaced_parts(module, {"lin1": up, "activation": act, "lin2": down, "dropout": drop}):
        return agree(lambda: module.ff_chunk(x), lambda: drop(down(act(up(x)))))


def _is_distilbert_block(module: nn.Module) -> bool:
    norms = {"sa_layer_norm": LayerNorm, "output_layer_norm": LayerNorm}
    if not _has_parts(module, attention=nn.Module, ffn=nn.Module, **norms):
        return False
    attention, norm, ffn, last, x = AttentionPart(2.5), Part(1.5), Part(0.7), Part(0.5), random_tensor(1, 3, 8)

    def expected() -> torch.Tensor:
        total = cast(torch.Tensor, norm(x + attention(x)[0]))
        return cast(torch.Tensor, last(total + ffn(total)))

    stubs = {"attention": attention, "sa_layer_norm": norm, "ffn": ffn, "output_layer_norm": last}
    with replaced_parts(module, stubs):
        return agree(lambda: module.forward(x), expected)


class _OutputPart(nn.Module):
    """Replaces BertOutput in a trial."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return torch.sin(0.5 * hidden_states + input_tensor)


class Embedding(nn.Embedding):
    """nn.Embedding with fp32 outputs and gradients that are summed in fp32, whatever the dtype of its weight."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return embed(input, self.weight, sparse=True, padding=self.padding_idx)


class Dropout(nn.Dropout):
    """nn.Dropout as a kernel with a single pass over memory."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return dropout(input, self.p, self.training)


def patch_layers(model: nn.Module) -> None:
    """Makes the Linear, Dropout, LayerNorm and Embedding layers of a model use our kernels, in place."""
    for module in model.modules():
        if is_linear(module):
            module.__class__ = Linear
        elif type(module) is nn.Dropout:
            module.__class__ = Dropout
        elif type(module) is nn.LayerNorm:
            module.__class__ = LayerNorm
        elif type(module) is nn.Embedding and module.max_norm is None and not module.sparse:
            module.__class__ = Embedding


ATTENTION, LAYERS = "attention", "linear layers"  # parts that `patch_model` returns


def patch_model(model: PreTrainedModel) -> list[str]:
    """Makes a model use our kernels where it still computes the same, in place; returns the parts that do not."""
    # In this order, because later patches recognize layers that earlier ones have changed.
    own = [patch for family in families.every() for patch in family.patches]
    others = (fuse_layers, use_recurrent_kernels, fuse_rotary_attention, *own, fuse_encoder_layers)
    rejected = apply_patches(model, (_patch_attention, patch_layers, *others))
    attends = has_causal_attention(model) or not has_recurrences(model.config.get_text_config())
    ours = uses_our_attention(model) or has_relative_attention(model)
    unpatched = [ATTENTION] if attends and not ours else []
    unpatched += [LAYERS] if patch_layers in rejected else []
    other_layers = {type(m).__name__: None for m in model.modules() if type(m).__name__ == "Conv1D"}
    return unpatched + [f"layers of type {name}" for name in other_layers]


def _patch_attention(model: PreTrainedModel) -> None:
    if not use_our_attention(model):
        kinds = [family.relative_attention for family in families.every()]
        fuse_relative_attention(model, [kind for kind in kinds if kind is not None])
