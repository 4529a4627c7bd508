from dataclasses import replace

from sansgpu.models.families import llama
from sansgpu.models.families.qwen3_moe import EXPERTS, ROUTER, expert_counts
from sansgpu.models.family import TINY_HEAD_DIM

FAMILY = replace(
    llama.FAMILY,
    title="Mixtral",
    tiny={**TINY_HEAD_DIM, "num_local_experts": 4},
    model_class="MixtralForCausalLM",
    modules={**llama.FAMILY.modules, **EXPERTS},
    biases={},
    gguf_name="llama",
    gguf_recognizes=lambda metadata: bool(metadata.get("llama.expert_count")),
    gguf_settings=expert_counts("num_local_experts"),
    gguf_precise=(ROUTER,),
    gguf_rope_types=(),
    gguf_no_window=True,
)
