"""Qwen3, from which most decoders derive, because they share its names in files."""

from sansgpu.models.family import TINY_HEAD_DIM, Family, Settings, full_width_heads


def common_defaults(settings: Settings) -> Settings:
    """Returns `defaults` of most families, except for the activation."""
    heads = settings["num_attention_heads"]
    return {**full_width_heads(settings), "num_key_value_heads": heads, "tie_word_embeddings": False}


ATTENTION_BIAS = {"attention_bias": ("attention", "all")}
FAMILY = Family(
    title="Qwen3",
    tiny=TINY_HEAD_DIM,
    model_class="Qwen3ForCausalLM",
    modules={
        "embedding": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
        "blocks.{}.feed_forward_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.{}.attention.q": "model.layers.{}.self_attn.q_proj",
        "blocks.{}.attention.k": "model.layers.{}.self_attn.k_proj",
        "blocks.{}.attention.v": "model.layers.{}.self_attn.v_proj",
        "blocks.{}.attention.o": "model.layers.{}.self_attn.o_proj",
        "blocks.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
        "blocks.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
        "blocks.{}.feed_forward.gate": "model.layers.{}.mlp.gate_proj",
        "blocks.{}.feed_forward.up": "model.layers.{}.mlp.up_proj",
        "blocks.{}.feed_forward.down": "model.layers.{}.mlp.down_proj",
    },
    sizes={
        "d_model": ("hidden_size", "{arch}.embedding_length"),
        "n_heads": ("num_attention_heads", "{arch}.attention.head_count"),
        "kv_heads": ("num_key_value_heads", "{arch}.attention.head_count_kv"),
        "head_dim": ("head_dim", "{arch}.attention.key_length"),
        "n_layers": ("num_hidden_layers", "{arch}.block_count"),
        "d_ff": ("intermediate_size", "{arch}.feed_forward_length"),
        "max_seq_len": ("max_position_embeddings", "{arch}.context_length"),
    },
    activations={"silu": "swiglu"},
    defaults=lambda settings: {**common_defaults(settings), "hidden_act": "silu"},
    gguf_activations=("silu",),
    fixed={"use_sliding_window": False},
    biases=ATTENTION_BIAS,
    rope_theta=10_000.0,
)
