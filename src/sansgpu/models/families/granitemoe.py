from dataclasses import replace

from sansgpu.models.families import granite, qwen3
from sansgpu.models.families.qwen3_moe import EXPERTS, ROUTER, expert_counts

_EXPERTS = {name: key.replace(".mlp.", ".block_sparse_moe.") for name, key in EXPERTS.items()}
FAMILY = replace(
    granite.FAMILY,
    title="Granite-MoE",
    tiny={**granite.FAMILY.tiny, "num_local_experts": 4, "num_experts_per_tok": 2},
    model_class="GraniteMoeForCausalLM",
    modules={**granite.FAMILY.modules, **_EXPERTS, "blocks.{}.router": "model.layers.{}.block_sparse_moe.router"},
    biases=qwen3.ATTENTION_BIAS,
    gguf_settings={**granite.FAMILY.gguf_settings, **expert_counts("num_local_experts")},
    gguf_modules={
        "model.layers.{}.block_sparse_moe.router": "blk.{}.ffn_gate_inp",
        "model.layers.{}.block_sparse_moe.experts.gate_proj": "blk.{}.ffn_gate_exps",
        "model.layers.{}.block_sparse_moe.experts.up_proj": "blk.{}.ffn_up_exps",
        "model.layers.{}.block_sparse_moe.experts.down_proj": "blk.{}.ffn_down_exps",
    },
    gguf_precise=(ROUTER,),
)
