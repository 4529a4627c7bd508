from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.family import TINY_GQA, full_width_heads

FAMILY = replace(
    qwen3.FAMILY,
    title="StarCoder 2",
    tiny={**TINY_GQA, "sliding_window": 32},
    tiny_exported={"sliding_window": None},
    model_class="Starcoder2ForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        "blocks.{}.feed_forward.up": "model.layers.{}.mlp.c_fc",
        "blocks.{}.feed_forward.down": "model.layers.{}.mlp.c_proj",
    },
    norm_eps=("norm_epsilon", "{arch}.attention.layer_norm_epsilon"),
    activations={},
    defaults=lambda settings: {
        **qwen3.common_defaults(settings),
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    gguf_activations=("gelu_pytorch_tanh",),
    fixed={"use_bias": True},
    biases={},
    gguf_fixed=full_width_heads,
    gguf_no_window=True,
    pre_tokenizers={"starcoder": llama.DIGITS_APART._replace(is_alias=True)},
)
