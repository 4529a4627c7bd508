"""gpt-oss, a mixture of experts with attention sinks."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.qwen3_moe import EXPERTS, ROUTER, expert_counts
from sansgpu.models.family import SLIDING_WINDOW, TINY_HEAD_DIM, Layout, Settings, windows

SINKS = {"model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight"}
_TRANSPOSED = Layout(lambda weight: weight.transpose(1, 2), lambda weight: weight.transpose(1, 2).contiguous())


def _layout(name: str, settings: Settings) -> Layout | None:
    return _TRANSPOSED if ".experts." in name and name.endswith(".weight") else None


FAMILY = replace(
    qwen3.FAMILY,
    title="gpt-oss",
    tiny={
        **TINY_HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    model_class="GptOssForCausalLM",
    modules={
        **{ours: theirs for ours, theirs in qwen3.FAMILY.modules.items() if ".feed_forward." not in ours},
        **EXPERTS,
        "blocks.{}.router": "model.layers.{}.mlp.router",
    },
    activations={},
    fixed={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    biases={},
    gguf_name="gpt-oss",
    gguf_settings={
        **expert_counts("num_local_experts"),
        "intermediate_size": "{arch}.expert_feed_forward_length",
        **SLIDING_WINDOW,
    },
    gguf_layers=windows(2),
    gguf_weights=SINKS,
    gguf_layout=_layout,
    gguf_alternating_experts=True,
    gguf_precise=(ROUTER, "_exps.bias"),
)  # fmt: skip
