"""Qwen2-MoE, a mixture of experts with one that all tokens share."""

from dataclasses import replace

from sansgpu.models.families import qwen3_moe
from sansgpu.models.family import TINY_GQA

FAMILY = replace(
    qwen3_moe.FAMILY,
    title="Qwen2-MoE",
    tiny={
        **TINY_GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    },
    model_class="Qwen2MoeForCausalLM",
    modules={
        **qwen3_moe.FAMILY.modules,
        "blocks.{}.shared_expert.router": "model.layers.{}.mlp.shared_expert_gate",
        "blocks.{}.shared_expert.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
        "blocks.{}.shared_expert.up": "model.layers.{}.mlp.shared_expert.up_proj",
        "blocks.{}.shared_expert.down": "model.layers.{}.mlp.shared_expert.down_proj",
    },
    fixed={**qwen3_moe.FAMILY.fixed, "norm_topk_prob": False, "qkv_bias": True},
    biases={},
    gguf_name="qwen2moe",
    gguf_settings={
        **qwen3_moe.expert_counts("num_experts"),
        **qwen3_moe.EXPERT_SIZE,
        "shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
    },
    gguf_squeezed={".shared_expert_gate.weight": 0},  # (1, width)
    gguf_needs_head=True,
    older_settings=lambda settings: {},
)  # fmt: skip
