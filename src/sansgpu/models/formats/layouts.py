"""The names under which transformers and llama.cpp store the weights and settings of decoders.

To add an architecture, add a `Layout` here and, if `TransformerLM` computes it, a record in config/architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sansgpu.models.formats.layout import LayerTypes, Layout, Settings
from sansgpu.models.formats.layout_rules import (
    every_fourth_without_rope,
    heads_as_wide_as_the_model,
    heads_before_parts,
    read_convolutions,
    rotary_pairs_adjacent,
    windows,
    write_convolutions,
)


def _modern_defaults(settings: Settings) -> dict[str, Any]:
    heads = settings["num_attention_heads"]
    return {
        "head_dim": settings["hidden_size"] // heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": False,
    }


def _llama_defaults(settings: Settings) -> dict[str, Any]:
    return {**_modern_defaults(settings), "hidden_act": "silu"}


def _gpt2_defaults(settings: Settings) -> dict[str, Any]:
    return {"n_inner": 4 * settings["n_embd"], "activation_function": "gelu_new", "tie_word_embeddings": True}


_ATTENTION_BIAS = {"attention_bias": ("attention", "all")}
_QWEN3 = Layout(
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
    biases=_ATTENTION_BIAS,
    dropouts={},
    rope_theta=10_000.0,
)
_GPT2 = Layout(
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
_LLAMA = replace(
    _QWEN3,
    model_class="LlamaForCausalLM",
    fixed={},
    biases={**_ATTENTION_BIAS, "mlp_bias": ("all",)},
    gguf_rope_types=("llama3",),
    gguf_rows=rotary_pairs_adjacent,
)
_SCALES = {  # Granite's multipliers
    "attention_multiplier": "{arch}.attention.scale",
    "embedding_multiplier": "{arch}.embedding_scale",
    "residual_multiplier": "{arch}.residual_scale",
    "logits_scaling": "{arch}.logit_scale",
}
_POST_NORMS = {  # norms after attention and feed-forward layers
    "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.feed_forward_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_EXPERTS = {
    "blocks.{}.router": "model.layers.{}.mlp.gate",
    "blocks.{}.experts.gate": "model.layers.{}.mlp.experts.gate_proj",
    "blocks.{}.experts.up": "model.layers.{}.mlp.experts.up_proj",
    "blocks.{}.experts.down": "model.layers.{}.mlp.experts.down_proj",
}
_EXPERTS_USED = {"num_experts_per_tok": "{arch}.expert_used_count"}
_GEMMA = replace(
    _QWEN3,
    model_class="GemmaForCausalLM",
    activations={},
    defaults=lambda settings: {**_modern_defaults(settings), "tie_word_embeddings": True},
    gguf_activations=("gelu_pytorch_tanh",),
    fixed={"tie_word_embeddings": True},
    gguf_norm_offset=1.0,
)
_GEMMA2 = replace(
    _GEMMA,
    model_class="Gemma2ForCausalLM",
    modules={
        **_GEMMA.modules,
        **_POST_NORMS,
        "blocks.{}.feed_forward_norm": "model.layers.{}.pre_feedforward_layernorm",
    },
    activation_key="hidden_activation",
    gguf_settings={
        "attn_logit_softcapping": "{arch}.attn_logit_softcapping",
        "final_logit_softcapping": "{arch}.final_logit_softcapping",
        "sliding_window": "{arch}.attention.sliding_window",
    },
    gguf_fixed=lambda settings: {"query_pre_attn_scalar": settings["head_dim"]},
    gguf_layers=windows(2),
)
_LAYER_NORM_EPS = ("layer_norm_eps", "{arch}.attention.layer_norm_epsilon")
LAYOUTS = {  # by model_type in config.json
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "qwen2": replace(_QWEN3, model_class="Qwen2ForCausalLM"),
    "qwen3": _QWEN3,
    "apertus": replace(
        _QWEN3,
        model_class="ApertusForCausalLM",
        modules={
            **_QWEN3.modules,
            "blocks.{}.attention_norm": "model.layers.{}.attention_layernorm",
            "blocks.{}.feed_forward_norm": "model.layers.{}.feedforward_layernorm",
        },
        activations={"relu2": "relu2"},
        defaults=lambda settings: {**_modern_defaults(settings), "hidden_act": "xielu"},
        gguf_activations=("relu2", "xielu"),
        rope_theta=None,  # no default, because transformers' default has RoPE scaling
        gguf_rope_types=("llama3",),
        gguf_needs_head=True,
    ),
    # For fine-tuning; TransformerLM does not compute these, nor qwen2.
    "mistral": replace(
        _LLAMA,
        model_class="MistralForCausalLM",
        biases={},
        gguf_name="llama",
        gguf_rope_types=(),
        gguf_no_window=True,
    ),
    "smollm3": replace(
        _LLAMA,
        model_class="SmolLM3ForCausalLM",
        fixed={"use_sliding_window": False},
        gguf_fixed=every_fourth_without_rope,
        gguf_rope_types=(),
    ),
    "granite": replace(_LLAMA, model_class="GraniteForCausalLM", gguf_settings=_SCALES, gguf_rope_types=()),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        model_class="Gemma3ForCausalLM",
        fixed={"use_bidirectional_attention": False},
        gguf_name="gemma3",
        gguf_settings={"sliding_window": "{arch}.attention.sliding_window"},
        gguf_optional={"final_logit_softcapping": "{arch}.final_logit_softcapping"},
        gguf_layers=windows(6),
        gguf_local_rope=True,
    ),
    "qwen3_moe": replace(
        _QWEN3,
        model_class="Qwen3MoeForCausalLM",
        modules={**_QWEN3.modules, **_EXPERTS},
        fixed={**_QWEN3.fixed, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        gguf_name="qwen3moe",
        gguf_settings={
            **_EXPERTS_USED,
            "num_local_experts": "{arch}.expert_count",
            "moe_intermediate_size": "{arch}.expert_feed_forward_length",
        },
    ),
    "olmoe": replace(
        _QWEN3,
        model_class="OlmoeForCausalLM",
        modules={**_QWEN3.modules, **_EXPERTS},
        fixed={"norm_topk_prob": False, "clip_qkv": None},
        gguf_settings={**_EXPERTS_USED, "num_experts": "{arch}.expert_count"},
        gguf_fixed=lambda settings: {
            **heads_as_wide_as_the_model(settings),
            "num_key_value_heads": settings["num_attention_heads"],
        },
        gguf_needs_head=True,
    ),
    "granitemoe": replace(
        _LLAMA,
        model_class="GraniteMoeForCausalLM",
        modules={
            **_LLAMA.modules,
            **{name: key.replace(".mlp.", ".block_sparse_moe.") for name, key in _EXPERTS.items()},
            "blocks.{}.router": "model.layers.{}.block_sparse_moe.router",
        },
        biases=_ATTENTION_BIAS,
        gguf_settings={**_SCALES, **_EXPERTS_USED, "num_local_experts": "{arch}.expert_count"},
        gguf_modules={
            "model.layers.{}.block_sparse_moe.router": "blk.{}.ffn_gate_inp",
            "model.layers.{}.block_sparse_moe.experts.gate_proj": "blk.{}.ffn_gate_exps",
            "model.layers.{}.block_sparse_moe.experts.up_proj": "blk.{}.ffn_up_exps",
            "model.layers.{}.block_sparse_moe.experts.down_proj": "blk.{}.ffn_down_exps",
        },
        gguf_rope_types=(),
    ),
    "olmo2": replace(
        _QWEN3,
        model_class="Olmo2ForCausalLM",
        modules={**_QWEN3.modules, **_POST_NORMS},
        fixed={},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_needs_head=True,
    ),
    "phi": replace(
        _QWEN3,
        model_class="PhiForCausalLM",
        modules={
            **_QWEN3.modules,
            "norm": "model.final_layernorm",
            "blocks.{}.attention.o": "model.layers.{}.self_attn.dense",
            "blocks.{}.feed_forward.up": "model.layers.{}.mlp.fc1",
            "blocks.{}.feed_forward.down": "model.layers.{}.mlp.fc2",
        },
        norm_eps=_LAYER_NORM_EPS,
        gguf_activations=("gelu_new",),
        fixed={"qk_layernorm": False, "tie_word_embeddings": False},
        biases={},
        gguf_name="phi2",
        gguf_fixed=heads_as_wide_as_the_model,
    ),
    "phi3": replace(
        _QWEN3,
        model_class="Phi3ForCausalLM",
        modules={
            **_QWEN3.modules,
            "blocks.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
            "blocks.{}.feed_forward.gate_up": "model.layers.{}.mlp.gate_up_proj",
        },
        fixed={},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_rope_types=("longrope",),
        gguf_no_window=True,
    ),
    "gpt_neox": replace(
        _QWEN3,
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
        sizes={name: keys for name, keys in _QWEN3.sizes.items() if name != "kv_heads"},
        norm_eps=_LAYER_NORM_EPS,
        gguf_activations=("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
        fixed={"attention_bias": True},
        biases={},
        gguf_name="gptneox",
        gguf_settings={"use_parallel_residual": "{arch}.use_parallel_residual"},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_rows=heads_before_parts,
        gguf_needs_head=True,
    ),
    "lfm2": replace(
        _QWEN3,
        model_class="Lfm2ForCausalLM",
        modules={
            "embedding": "model.embed_tokens",
            "norm": "model.embedding_norm",
            "head": "lm_head",
            "blocks.{}.attention_norm": "model.layers.{}.operator_norm",
            "blocks.{}.feed_forward_norm": "model.layers.{}.ffn_norm",
            "blocks.{}.attention.q": "model.layers.{}.self_attn.q_proj",
            "blocks.{}.attention.k": "model.layers.{}.self_attn.k_proj",
            "blocks.{}.attention.v": "model.layers.{}.self_attn.v_proj",
            "blocks.{}.attention.o": "model.layers.{}.self_attn.out_proj",
            "blocks.{}.attention.q_norm": "model.layers.{}.self_attn.q_layernorm",
            "blocks.{}.attention.k_norm": "model.layers.{}.self_attn.k_layernorm",
            "blocks.{}.convolution.in": "model.layers.{}.conv.in_proj",
            "blocks.{}.convolution.kernel": "model.layers.{}.conv.conv",
            "blocks.{}.convolution.out": "model.layers.{}.conv.out_proj",
            "blocks.{}.feed_forward.gate": "model.layers.{}.feed_forward.w1",
            "blocks.{}.feed_forward.up": "model.layers.{}.feed_forward.w3",
            "blocks.{}.feed_forward.down": "model.layers.{}.feed_forward.w2",
        },
        norm_eps=("norm_eps", "{arch}.attention.layer_norm_rms_epsilon"),
        fixed={"conv_bias": False},
        biases={},
        gguf_settings={"conv_L_cache": "{arch}.shortconv.l_cache"},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_layers=LayerTypes(write_convolutions, read_convolutions),
    ),
}
BY_GGUF_NAME: dict[str, str] = {}  # llama.cpp's name of an architecture -> model_type; `llama` is Llama, not Mistral
for _model_type, _layout in LAYOUTS.items():
    BY_GGUF_NAME.setdefault(_layout.gguf_name or _model_type, _model_type)


def module_names(layout: Layout, layers: int) -> Iterator[str]:
    """Yields transformers' names of the modules with weights."""
    for pattern in layout.modules.values():
        yield from (pattern.format(layer) for layer in range(layers)) if "{}" in pattern else (pattern,)


def rope_of(settings: Settings) -> Mapping[str, Any]:
    """Returns the RoPE parameters of a config.json. Without scaling, rope_type is missing or "default"."""
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings
    return {**rope, "rope_type": "scaled"} if settings.get("rope_scaling") else rope


def with_default_settings(settings: Settings) -> dict[str, Any]:
    """Returns the settings with defaults for optional keys that are missing. Raises KeyError if a required one is."""
    present = {key: value for key, value in settings.items() if value is not None}
    layout = LAYOUTS.get(present["model_type"])
    return present if layout is None else {**layout.defaults(present), **present}
