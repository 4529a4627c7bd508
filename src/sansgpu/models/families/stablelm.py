from dataclasses import replace

from sansgpu.models.families import qwen2, qwen3
from sansgpu.models.families.phi import LAYER_NORM_EPS
from sansgpu.models.family import TINY_GQA, full_width_heads

FAMILY = replace(
    qwen3.FAMILY,
    title="StableLM",
    tiny=TINY_GQA,
    model_class="StableLmForCausalLM",
    norm_eps=LAYER_NORM_EPS,
    activations={},
    fixed={"qk_layernorm": False},
    biases={},
    gguf_settings={"use_parallel_residual": "{arch}.use_parallel_residual"},
    gguf_fixed=full_width_heads,
    gguf_needs_head=True,
    pre_tokenizers={"stablelm2": qwen2.SPLIT._replace(is_alias=True)},
)
