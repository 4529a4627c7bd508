"""OLMoE, a mixture of experts."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.qwen3_moe import EXPERTS, EXPERTS_USED, ROUTER
from sansgpu.models.family import LAYERED, heads_as_wide_as_the_model

FAMILY = replace(
    qwen3.FAMILY,
    title="OLMoE",
    tiny={**LAYERED, "num_experts": 4, "num_experts_per_tok": 2},
    model_class="OlmoeForCausalLM",
    modules={**qwen3.FAMILY.modules, **EXPERTS},
    fixed={"norm_topk_prob": False, "clip_qkv": None},
    gguf_settings={**EXPERTS_USED, "num_experts": "{arch}.expert_count"},
    gguf_fixed=lambda settings: {
        **heads_as_wide_as_the_model(settings),
        "num_key_value_heads": settings["num_attention_heads"],
    },
    gguf_precise=(ROUTER,),
    gguf_needs_head=True,
)
