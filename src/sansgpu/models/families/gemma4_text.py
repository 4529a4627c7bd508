"""The language model inside Gemma 4, whose last layers use the keys and values of earlier ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from sansgpu.models.family import TINY_HEAD_DIM, Family
from sansgpu.models.layer_trials import with_forward

_SLICES = "_maybe_slice_kv_shared_inputs"  # method that drops the tokens without logits before the last layers


class UncutLayers:
    """Mixin for the decoder, which passes on masks as they are if no token is dropped.

    The original slices the masks even then, and slices of the masks of packed rows are ordinary tensors.
    """

    def _maybe_slice_kv_shared_inputs(
        self, hidden_states: torch.Tensor, *others: Any, logits_to_keep: int | torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        *inputs, kept = others if logits_to_keep is None else (*others, logits_to_keep)
        if isinstance(kept, int) and kept == 0:
            return (hidden_states, *inputs)
        return cast(tuple[Any, ...], getattr(super(), _SLICES)(hidden_states, *inputs, kept, **kwargs))


def keep_masks_whole(model: nn.Module) -> None:
    """Makes decoders that share keys and values between layers support packed rows, in place."""
    for module in model.modules():
        if hasattr(module, _SLICES):
            module.__class__ = with_forward(UncutLayers, type(module))


FAMILY = Family(
    title="Gemma 4",
    # Like E2B: the last layers share keys and values, and each layer has an embedding of its own.
    tiny={
        **TINY_HEAD_DIM, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32, "sliding_window": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024, "final_logit_softcapping": 30.0,
    },
    patches=(keep_masks_whole,),
)  # fmt: skip
