from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.family import TINY_HEAD_DIM, renamed

EXPERTS = {
    "blocks.{}.router": "model.layers.{}.mlp.gate",
    "blocks.{}.experts.gate": "model.layers.{}.mlp.experts.gate_proj",
    "blocks.{}.experts.up": "model.layers.{}.mlp.experts.up_proj",
    "blocks.{}.experts.down": "model.layers.{}.mlp.experts.down_proj",
}
EXPERT_SIZE = {"moe_intermediate_size": "{arch}.expert_feed_forward_length"}
SIGMOID_ROUTER = {"{arch}.expert_gating_func": 2}  # instead of a softmax
ROUTER = ".ffn_gate_inp.weight"  # llama.cpp's name


def expert_counts(key: str) -> dict[str, str]:
    """Returns `gguf_settings` for the number of experts, which is `key` in config.json, and of experts per token."""
    return {"num_experts_per_tok": "{arch}.expert_used_count", key: "{arch}.expert_count"}


FAMILY = replace(
    qwen3.FAMILY,
    title="Qwen3-MoE",
    tiny={
        **TINY_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    model_class="Qwen3MoeForCausalLM",
    modules={**qwen3.FAMILY.modules, **EXPERTS},
    fixed={**qwen3.FAMILY.fixed, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    gguf_name="qwen3moe",
    gguf_settings={**expert_counts("num_local_experts"), **EXPERT_SIZE},
    gguf_precise=(ROUTER,),
    older_settings=renamed(num_experts="num_local_experts"),
)  # fmt: skip
