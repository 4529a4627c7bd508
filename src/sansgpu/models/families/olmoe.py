from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.qwen3_moe import EXPERTS, ROUTER, expert_counts
from sansgpu.models.family import TINY_MHA, full_width_heads

FAMILY = replace(
    qwen3.FAMILY,
    title="OLMoE",
    tiny={**TINY_MHA, "num_experts": 4, "num_experts_per_tok": 2},
    model_class="OlmoeForCausalLM",
    modules={**qwen3.FAMILY.modules, **EXPERTS},
    fixed={"norm_topk_prob": False, "clip_qkv": None},
    gguf_settings=expert_counts("num_experts"),
    gguf_fixed=lambda settings: {
        **full_width_heads(settings),
        "num_key_value_heads": settings["num_attention_heads"],
    },
    gguf_precise=(ROUTER,),
    gguf_needs_head=True,
)
