"""Qwen3-Next, which alternates gated delta nets with gated attention, and is a mixture of experts."""

from dataclasses import replace

from sansgpu.models.families import qwen2_moe, qwen3_5_text
from sansgpu.models.families.mamba import SQUEEZED
from sansgpu.models.family import Division, LayerTypes, Settings, part_by_part

_NET = "model.layers.{}.linear_attn"


def _projections(settings: Settings) -> dict[str, Division]:
    """Returns how llama.cpp divides a projection that has query, key, values and gates of each key head together."""
    heads, size = settings["linear_num_key_heads"], settings["linear_key_head_dim"]
    values = settings["linear_num_value_heads"] * settings["linear_value_head_dim"]
    rows = {f"{_NET}.in_proj_qkv": 2 * heads * size + values, f"{_NET}.in_proj_z": values}
    order = part_by_part(heads, [size, size, values // heads, values // heads])
    return {f"{_NET}.in_proj_qkvz": Division(rows, order)}


FAMILY = replace(
    qwen3_5_text.FAMILY,
    title="Qwen3-Next",
    tiny={
        **qwen3_5_text.TINY_DELTA_NET, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    model_class="Qwen3NextForCausalLM",
    modules={
        **qwen2_moe.FAMILY.modules,
        **{ours: theirs for ours, theirs in qwen3_5_text.FAMILY.modules.items() if ".net" in ours},
        "blocks.{}.net.steps": f"{_NET}.in_proj_ba",
    },
    fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    gguf_name="qwen3next",
    gguf_settings={**qwen3_5_text.FAMILY.gguf_settings, **qwen2_moe.FAMILY.gguf_settings},
    gguf_divided=_projections,
    gguf_layers=LayerTypes(qwen3_5_text.write_nets, qwen3_5_text.read_nets),
    gguf_rows=lambda name, settings: None,
    gguf_layout=qwen3_5_text.net_layout,
    gguf_squeezed={**SQUEEZED, **qwen2_moe.FAMILY.gguf_squeezed},
    gguf_precise=(*qwen3_5_text.FAMILY.gguf_precise, *qwen2_moe.FAMILY.gguf_precise),
    pre_tokenizers={},
)  # fmt: skip
