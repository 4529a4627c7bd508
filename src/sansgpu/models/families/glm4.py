"""GLM-4, which has norms before and after attention and feed-forward layers."""

from dataclasses import replace

from sansgpu.models.families import llama, phi3, qwen3
from sansgpu.models.family import TINY_HEAD_DIM, PreTokenizer

FAMILY = replace(
    qwen3.FAMILY,
    title="GLM-4",
    tiny=TINY_HEAD_DIM,
    model_class="Glm4ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.attention_post_norm": "model.layers.{}.post_self_attn_layernorm",
        "blocks.{}.feed_forward_post_norm": "model.layers.{}.post_mlp_layernorm",
        "blocks.{}.feed_forward.gate_up": phi3.GATE_UP,
    },
    activations={},
    fixed={},
    biases={},
    pre_tokenizers=dict.fromkeys(("chatglm-bpe", "glm4"), PreTokenizer((llama.GPT4_SPLIT,), is_alias=True)),
)
