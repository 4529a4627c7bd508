from dataclasses import replace

from sansgpu.models.families import lfm2
from sansgpu.models.families.qwen3_moe import EXPERT_SIZE, EXPERTS, ROUTER, SIGMOID_ROUTER, expert_counts
from sansgpu.models.family import full_width_heads

_EXPERTS = {name: key.replace(".mlp.", ".feed_forward.") for name, key in EXPERTS.items()}

FAMILY = replace(
    lfm2.FAMILY,
    title="LFM2-MoE",
    tiny={
        **lfm2.FAMILY.tiny, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    model_class="Lfm2MoeForCausalLM",
    modules={
        **lfm2.FAMILY.modules,
        **_EXPERTS,
    },
    fixed={**lfm2.FAMILY.fixed, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    gguf_name="lfm2moe",
    gguf_settings={
        **lfm2.FAMILY.gguf_settings,
        **expert_counts("num_experts"),
        **EXPERT_SIZE,
        "num_dense_layers": "{arch}.leading_dense_block_count",
    },
    gguf_weights={"model.layers.{}.feed_forward.expert_bias": "blk.{}.exp_probs_b.bias"},
    gguf_constants=SIGMOID_ROUTER,
    gguf_fixed=full_width_heads,
    gguf_layers=lfm2.CONVOLUTIONS,
    gguf_precise=(*lfm2.FAMILY.gguf_precise, ROUTER),
)  # fmt: skip
