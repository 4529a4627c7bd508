"""Hunyuan without experts, which normalizes queries and keys after it rotates them."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.family import NTK_ALPHA, TINY_HEAD_DIM

_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0}
FAMILY = replace(
    qwen3.FAMILY,
    title="Hunyuan",
    tiny={**TINY_HEAD_DIM, "rope_parameters": _ROPE},
    model_class="HunYuanDenseV1ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.attention.q_norm": "model.layers.{}.self_attn.query_layernorm",
        "blocks.{}.attention.k_norm": "model.layers.{}.self_attn.key_layernorm",
    },
    activations={},
    fixed={},
    biases={"attention_bias": ()},
    gguf_name="hunyuan-dense",
    gguf_rope_types=(NTK_ALPHA,),
)
