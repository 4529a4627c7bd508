"""Qwen3-MoE, a mixture of experts in all layers."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.family import GROUPED, renamed

EXPERTS = {
    "blocks.{}.router": "model.layers.{}.mlp.gate",
    "blocks.{}.experts.gate": "model.layers.{}.mlp.experts.gate_proj",
    "blocks.{}.experts.up": "model.layers.{}.mlp.experts.up_proj",
    "blocks.{}.experts.down": "model.layers.{}.mlp.experts.down_proj",
}
EXPERTS_USED = {"num_experts_per_tok": "{arch}.expert_used_count"}
ROUTER = ".ffn_gate_inp.weight"  # llama.cpp's name
ALL_LAYERS_HAVE_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen3-MoE",
    tiny={**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    model_class="Qwen3MoeForCausalLM",
    modules={**qwen3.FAMILY.modules, **EXPERTS},
    fixed={**qwen3.FAMILY.fixed, **ALL_LAYERS_HAVE_EXPERTS, "norm_topk_prob": True},
    gguf_name="qwen3moe",
    gguf_settings={
        **EXPERTS_USED,
        "num_local_experts": "{arch}.expert_count",
        "moe_intermediate_size": "{arch}.expert_feed_forward_length",
    },
    gguf_precise=(ROUTER,),
    older_settings=renamed(num_experts="num_local_experts"),
)
