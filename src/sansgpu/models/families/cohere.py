"""Command R, whose attention and feed-forward layers are parallel and share a norm."""

from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.families.phi import LAYER_NORM_EPS
from sansgpu.models.family import TINY_GQA, full_width_heads

FAMILY = replace(
    qwen3.FAMILY,
    title="Command R",
    tiny={**TINY_GQA, "logit_scale": 0.5},
    model_class="CohereForCausalLM",
    norm_eps=LAYER_NORM_EPS,
    activations={},
    defaults=lambda settings: {
        **qwen3.common_defaults(settings),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    fixed={"use_qk_norm": False, "tie_word_embeddings": True},
    gguf_name="command-r",
    gguf_settings={"logit_scale": "{arch}.logit_scale"},
    gguf_fixed=full_width_heads,
    rope_theta=500_000.0,
    pre_tokenizers={"command-r": llama.DIGITS_APART._replace(is_alias=True)},
)
