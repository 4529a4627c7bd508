"""GPT-NeoX, and models with its architecture such as Pythia."""

from dataclasses import replace

from sansgpu.models.families import qwen3
from sansgpu.models.families.phi import LAYER_NORM_EPS
from sansgpu.models.family import TINY_MHA, OlderRope, RowOrder, Settings, full_width_heads, part_by_part


def _queries_keys_values(name: str, settings: Settings) -> RowOrder | None:
    """GPT-NeoX stores query, key and value by head; llama.cpp stores all queries, then all keys and all values."""
    if ".query_key_value." not in name:
        return None
    return part_by_part(settings["num_attention_heads"], [settings["head_dim"]] * 3)


FAMILY = replace(
    qwen3.FAMILY,
    title="GPT-NeoX",
    tiny=TINY_MHA,
    model_class="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    modules={
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
        "blocks.{}.attention_norm": "gpt_neox.layers.{}.input_layernorm",
        "blocks.{}.feed_forward_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "blocks.{}.attention.qkv": "gpt_neox.layers.{}.attention.query_key_value",
        "blocks.{}.attention.o": "gpt_neox.layers.{}.attention.dense",
        "blocks.{}.feed_forward.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "blocks.{}.feed_forward.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
    },
    sizes={name: keys for name, keys in qwen3.FAMILY.sizes.items() if name != "kv_heads"},
    norm_eps=LAYER_NORM_EPS,
    gguf_activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    fixed={"attention_bias": True},
    biases={},
    gguf_name="gptneox",
    gguf_settings={"use_parallel_residual": "{arch}.use_parallel_residual"},
    gguf_fixed=full_width_heads,
    gguf_rows=_queries_keys_values,
    gguf_needs_head=True,
    older_rope=OlderRope("rotary_emb_base", partial="rotary_pct"),
)
