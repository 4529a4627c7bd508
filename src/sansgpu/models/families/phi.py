"""Phi-1 to Phi-2."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.family import TINY_MHA, full_width_heads

LAYER_NORM_EPS = ("layer_norm_eps", "{arch}.attention.layer_norm_epsilon")
FAMILY = replace(
    qwen3.FAMILY,
    title="Phi",
    tiny=TINY_MHA,
    model_class="PhiForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "norm": "model.final_layernorm",
        "blocks.{}.attention.o": "model.layers.{}.self_attn.dense",
        "blocks.{}.feed_forward.up": "model.layers.{}.mlp.fc1",
        "blocks.{}.feed_forward.down": "model.layers.{}.mlp.fc2",
    },
    norm_eps=LAYER_NORM_EPS,
    gguf_activations=("gelu_new",),
    fixed={"qk_layernorm": False, "tie_word_embeddings": False},
    biases={},
    gguf_name="phi2",
    gguf_fixed=full_width_heads,
)
