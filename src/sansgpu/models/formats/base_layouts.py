"""The layouts of Llama, Qwen3 and GPT-2, from which those of other architectures in layouts.py derive."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sansgpu.models.formats.layout import Layout, Settings
from sansgpu.models.formats.layout_rules import rotary_pairs_adjacent


def modern_defaults(settings: Settings) -> dict[str, Any]:
    heads = settings["num_attention_heads"]
    return {
        "head_dim": settings["hidden_size"] // heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": False,
    }


def _llama_defaults(settings: Settings) -> dict[str, Any]:
    return {**modern_defaults(settings), "hidden_act": "silu"}


def _gpt2_defaults(settings: Settings) -> dict[str, Any]:
    return {"n_inner": 4 * settings["n_embd"], "activation_function": "gelu_new", "tie_word_embeddings": True}


ATTENTION_BIAS = {"attention_bias": ("attention", "all")}
QWEN3 = Layout(
    model_class="Qwen3ForCausalLM",
    prefix="model.",
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
    norm_eps=("rms_norm_eps", "{arch}.attention.layer_norm_rms_epsilon"),
    activation_key="hidden_act",
    activations={"silu": "swiglu"},
    defaults=_llama_defaults,
    gguf_activations=("silu",),
    fixed={"use_sliding_window": False},
    biases=ATTENTION_BIAS,
    dropouts={},
    rope_theta=10_000.0,
)
GPT2 = Layout(
    model_class="GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
        "blocks.{}.feed_forward_norm": "transformer.h.{}.ln_2",
        "blocks.{}.attention.qkv": "transformer.h.{}.attn.c_attn",
        "blocks.{}.attention.o": "transformer.h.{}.attn.c_proj",
        "blocks.{}.feed_forward.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.feed_forward.down": "transformer.h.{}.mlp.c_proj",
    },
    sizes={
        "d_model": ("n_embd", "{arch}.embedding_length"),
        "n_heads": ("n_head", "{arch}.attention.head_count"),
        "n_layers": ("n_layer", "{arch}.block_count"),
        "d_ff": ("n_inner", "{arch}.feed_forward_length"),
        "max_seq_len": ("n_positions", "{arch}.context_length"),
    },
    norm_eps=("layer_norm_epsilon", "{arch}.attention.layer_norm_epsilon"),
    activation_key="activation_function",
    activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"},
    defaults=_gpt2_defaults,
    gguf_activations=("gelu_new", "gelu_pytorch_tanh"),
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    biases={},
    dropouts={"embd_pdrop": "dropout", "resid_pdrop": "dropout", "attn_pdrop": "attention_dropout"},
    transposed=("c_attn", "c_proj", "c_fc"),
    rotary=False,
)
LLAMA = replace(
    QWEN3,
    model_class="LlamaForCausalLM",
    fixed={},
    biases={**ATTENTION_BIAS, "mlp_bias": ("all",)},
    gguf_rope_types=("llama3",),
    gguf_rows=rotary_pairs_adjacent,
)
