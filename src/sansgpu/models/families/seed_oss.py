from dataclasses import replace

from sansgpu.models.families import llama, qwen3
from sansgpu.models.family import PreTokenizer

_SPLIT = llama.GPT4_SPLIT.replace("{1,3}", "{1}").replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
FAMILY = replace(
    qwen3.FAMILY,
    title="Seed-OSS",
    model_class="SeedOssForCausalLM",
    activations={},
    fixed={"attention_out_bias": False, "mlp_bias": False},
    biases={},
    pre_tokenizers={"seed-coder": PreTokenizer((_SPLIT,))},
)
