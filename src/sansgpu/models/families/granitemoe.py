"""Granite-MoE, a mixture of experts."""

from dataclasses import replace

from sansgpu.models.families import granite, qwen3
from sansgpu.models.families.qwen3_moe import EXPERTS, EXPERTS_USED, ROUTER

_EXPERTS = {name: key.replace(".mlp.", ".block_sparse_moe.") for name, key in EXPERTS.items()}
FAMILY = replace(
    granite.FAMILY,
    title="Granite-MoE",
    tiny={**granite.FAMILY.tiny, "num_local_experts": 4, "num_experts_per_tok": 2},
    model_class="GraniteMoeForCausalLM",
    modules={**granite.FAMILY.modules, **_EXPERTS, "blocks.{}.router": "model.layers.{}.block_sparse_moe.router"},
    biases=qwen3.ATTENTION_BIAS,
    gguf_settings={**granite.SCALES, **EXPERTS_USED, "num_local_experts": "{arch}.expert_count"},
    gguf_modules={
        "model.layers.{}.block_sparse_moe.router": "blk.{}.ffn_gate_inp",
        "model.layers.{}.block_sparse_moe.experts.gate_proj": "blk.{}.ffn_gate_exps",
        "model.layers.{}.block_sparse_moe.experts.up_proj": "blk.{}.ffn_up_exps",
        "model.layers.{}.block_sparse_moe.experts.down_proj": "blk.{}.ffn_down_exps",
    },
    gguf_precise=(ROUTER,),
)
