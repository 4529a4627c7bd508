"""Gemma 2, which has norms before and after attention and feed-forward layers."""

from dataclasses import replace

from sansgpu.models.families import gemma
from sansgpu.models.families.olmo2 import POST_NORMS
from sansgpu.models.family import LOGIT_SOFTCAP, SLIDING_WINDOW, TINY_HEAD_DIM, windows

FAMILY = replace(
    gemma.FAMILY,
    title="Gemma 2",
    tiny={**TINY_HEAD_DIM, "query_pre_attn_scalar": 16, "sliding_window": 32},
    model_class="Gemma2ForCausalLM",
    modules={
        **gemma.FAMILY.modules,
        **POST_NORMS,
        "blocks.{}.feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm",
    },
    activation_key="hidden_activation",
    gguf_settings={
        "attn_logit_softcapping": "{arch}.attn_logit_softcapping",
        **LOGIT_SOFTCAP,
        **SLIDING_WINDOW,
    },
    gguf_fixed=lambda settings: {"query_pre_attn_scalar": settings["head_dim"]},
    gguf_layers=windows(2),
)
