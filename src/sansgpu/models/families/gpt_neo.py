"""GPT-Neo, whose attention ignores transformers' attention interface, and masks windows itself."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sansgpu.models.attention_interface import attention_forward, give_our_masks
from sansgpu.models.family import TINY_CONTEXT, Family
from sansgpu.models.layer_trials import with_forward
from sansgpu.models.packed_masks import projected_heads


class GPTNeoAttention:
    """Mixin for attention that computes its scores with our interface."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, layer_past: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        module = cast(Any, self)
        q, k, v = projected_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
        if layer_past is not None:
            k, v = layer_past.update(k, v, module.layer_id)
        dropout = module.attn_dropout.p if module.training else 0.0
        window = module.config.window_size if module.attention_type == "local" else None
        out, _ = attention_forward(module, q, k, v, attention_mask, dropout, scaling=1.0, window=window)
        return module.resid_dropout(module.out_proj(out.flatten(2))), None


def use_attention_interface(model: nn.Module) -> None:
    """Makes the attention of GPT-Neo use our attention interface, in place."""
    found = [module for module in model.modules() if type(module).__name__ == "GPTNeoSelfAttention"]
    if found:
        give_our_masks(model)
    for module in found:
        module.__class__ = with_forward(GPTNeoAttention, type(module))
        module._buffers = {}  # its mask, which would limit the length of rows


FAMILY = Family(
    title="GPT-Neo",
    tiny={
        "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "window_size": 32,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": TINY_CONTEXT,
    },
    patches=(use_attention_interface,),
)  # fmt: skip
