from dataclasses import replace

from sansgpu.models.families import qwen3, qwen3_moe
from sansgpu.models.families.qwen3_moe import EXPERT_SIZE, SIGMOID_ROUTER, expert_counts
from sansgpu.models.family import TINY_HEAD_DIM

FAMILY = replace(
    qwen3_moe.FAMILY,
    title="dots.llm1",
    tiny={
        **TINY_HEAD_DIM, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
    },
    model_class="Dots1ForCausalLM",
    modules={
        **qwen3_moe.FAMILY.modules,
        "blocks.{}.shared_expert.gate": "model.layers.{}.mlp.shared_experts.gate_proj",
        "blocks.{}.shared_expert.up": "model.layers.{}.mlp.shared_experts.up_proj",
        "blocks.{}.shared_expert.down": "model.layers.{}.mlp.shared_experts.down_proj",
    },
    activations={},
    fixed={"n_group": 1, "topk_group": 1},
    biases=qwen3.ATTENTION_BIAS,
    gguf_name="dots1",
    gguf_settings={
        **expert_counts("n_routed_experts"),
        **EXPERT_SIZE,
        "first_k_dense_replace": "{arch}.leading_dense_block_count",
        "n_shared_experts": "{arch}.expert_shared_count",
        "norm_topk_prob": "{arch}.expert_weights_norm",
        "routed_scaling_factor": "{arch}.expert_weights_scale",
    },
    gguf_weights={"model.layers.{}.mlp.gate.e_score_correction_bias": "blk.{}.exp_probs_b.bias"},
    gguf_constants=SIGMOID_ROUTER,
    gguf_fixed=lambda settings: {
        "layer_types": ["full_attention"] * settings["num_hidden_layers"],
        "num_key_value_heads": settings["num_attention_heads"],
    },
    older_settings=lambda settings: {},
)  # fmt: skip
