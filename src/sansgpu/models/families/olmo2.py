"""OLMo 2, which has norms only after attention and feed-forward layers."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.family import TINY_GQA, full_width_heads

POST_NORMS = {
    "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.feed_forward_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
FAMILY = replace(
    qwen3.FAMILY,
    title="OLMo 2",
    tiny=TINY_GQA,
    model_class="Olmo2ForCausalLM",
    modules={**qwen3.FAMILY.modules, **POST_NORMS},
    fixed={},
    gguf_fixed=full_width_heads,
    gguf_needs_head=True,
)
