"""OLMo, whose norms have no weights."""

from dataclasses import replace

from sansgpu.models.families import gpt2, llama, qwen3
from sansgpu.models.families.phi import LAYER_NORM_EPS
from sansgpu.models.family import TINY_GQA, PreTokenizer, full_width_heads

_EPS = {LAYER_NORM_EPS[0]: 1e-5}  # config.json does not contain it
FAMILY = replace(
    llama.FAMILY,
    title="OLMo",
    tiny={**TINY_GQA, "clip_qkv": 0.5},
    model_class="OlmoForCausalLM",
    modules={name: key for name, key in llama.FAMILY.modules.items() if "norm" not in name},
    norm_eps=LAYER_NORM_EPS,
    activations={},
    defaults=lambda settings: {**qwen3.common_defaults(settings), "hidden_act": "silu", **_EPS},
    fixed=_EPS,
    biases=qwen3.ATTENTION_BIAS,
    gguf_optional={"clip_qkv": "{arch}.attention.clamp_kqv"},
    gguf_fixed=full_width_heads,
    gguf_rope_types=(),
    pre_tokenizers={"olmo": PreTokenizer((gpt2.SPLIT,), is_alias=True)},
)
