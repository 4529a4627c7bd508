"""Qwen2-MoE, a mixture of experts with one that all tokens share."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.qwen3_moe import ALL_LAYERS_HAVE_EXPERTS, EXPERTS, EXPERTS_USED, ROUTER
from sansgpu.models.family import SHARED

FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen2-MoE",
    tiny={
        **SHARED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    },
    model_class="Qwen2MoeForCausalLM",
    modules={
        **qwen3.FAMILY.modules,
        **EXPERTS,
        "blocks.{}.shared_expert.router": "model.layers.{}.mlp.shared_expert_gate",
        "blocks.{}.shared_expert.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
        "blocks.{}.shared_expert.up": "model.layers.{}.mlp.shared_expert.up_proj",
        "blocks.{}.shared_expert.down": "model.layers.{}.mlp.shared_expert.down_proj",
    },
    fixed={**qwen3.FAMILY.fixed, **ALL_LAYERS_HAVE_EXPERTS, "norm_topk_prob": False, "qkv_bias": True},
    biases={},
    gguf_name="qwen2moe",
    gguf_settings={
        **EXPERTS_USED,
        "num_experts": "{arch}.expert_count",
        "moe_intermediate_size": "{arch}.expert_feed_forward_length",
        "shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
    },
    gguf_squeezed={".shared_expert_gate.weight": 0},  # (1, width)
    gguf_precise=(ROUTER,),
    gguf_needs_head=True,
)  # fmt: skip
