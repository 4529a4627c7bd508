"""Falcon with RoPE, whose attention ignores transformers' attention interface."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sansgpu.kernels.rotary import rotate_heads
from sansgpu.models.attention_interface import attention_forward, give_our_masks
from sansgpu.models.family import Family
from sansgpu.models.layer_trials import with_forward


class FalconAttention:
    """Mixin for attention that computes its scores with our interface."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert position_embeddings is not None
        module = cast(Any, self)
        q, k, v = module._split_heads(module.query_key_value(hidden_states))
        cos, sin = (angles.unsqueeze(1) for angles in position_embeddings)
        q, k = rotate_heads(q, k, cos, sin)
        v = v.transpose(1, 2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, module.layer_idx)
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        out, _ = attention_forward(module, q, k, v, attention_mask)
        return module.dense(out.flatten(2)), None


class FalconMLP:
    """Mixin for a feed-forward layer that returns a copy, because the block adds to it in place.

    PyTorch does not allow that for the output of our linear layer, which is a view.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, cast(Any, super()).forward(x).clone())


def use_attention_interface(model: nn.Module) -> None:
    """Makes the attention of Falcon use our attention interface, in place. Models with ALiBi stay unchanged."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "falcon" or config.alibi:
        return
    give_our_masks(model)
    mixins = {"FalconAttention": FalconAttention, "FalconMLP": FalconMLP}
    for module in model.modules():
        if (mixin := mixins.get(type(module).__name__)) is not None:
            module.__class__ = with_forward(mixin, type(module))


FAMILY = Family(
    title="Falcon",
    tiny={"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    patches=(use_attention_interface,),
)
