from dataclasses import replace

from sansgpu.models.families import qwen3

FAMILY = replace(
    qwen3.FAMILY,
    title="Seed-OSS",
    model_class="SeedOssForCausalLM",
    activations={},
    fixed={"attention_out_bias": False, "mlp_bias": False},
    biases={},
)
