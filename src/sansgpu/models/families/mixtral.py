"""Mixtral, a mixture of experts."""

from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.families.qwen3_moe import EXPERTS, EXPERTS_USED, ROUTER
from sansgpu.models.family import GROUPED

FAMILY = replace(
    llama.FAMILY,
    title="Mixtral",
    tiny={**GROUPED, "num_local_experts": 4},
    model_class="MixtralForCausalLM",
    modules={**llama.FAMILY.modules, **EXPERTS},
    biases={},
    gguf_name="llama",
    gguf_recognizes=lambda metadata: bool(metadata.get("llama.expert_count")),
    gguf_settings={**EXPERTS_USED, "num_local_experts": "{arch}.expert_count"},
    gguf_precise=(ROUTER,),
    gguf_rope_types=(),
    gguf_no_window=True,
)
