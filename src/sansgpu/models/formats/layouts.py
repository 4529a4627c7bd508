"""The names under which transformers and llama.cpp store the weights and settings of decoders.

To add an architecture, add a `Layout` here and, if `TransformerLM` computes it, a record in config/architectures.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sansgpu.models.formats.base_layouts import ATTENTION_BIAS, GPT2, LLAMA, QWEN3, modern_defaults
from sansgpu.models.formats.layout import LayerTypes, Layout, Settings
from sansgpu.models.formats.layout_rules import (
    every_fourth_without_rope,
    heads_as_wide_as_the_model,
    heads_before_parts,
    read_convolutions,
    windows,
    write_convolutions,
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
_ALL_LAYERS_HAVE_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_GEMMA = replace(
    QWEN3,
    model_class="GemmaForCausalLM",
    activations={},
    defaults=lambda settings: {**modern_defaults(settings), "tie_word_embeddings": True},
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
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": replace(QWEN3, model_class="Qwen2ForCausalLM"),
    "qwen3": QWEN3,
    "apertus": replace(
        QWEN3,
        model_class="ApertusForCausalLM",
        modules={
            **QWEN3.modules,
            "blocks.{}.attention_norm": "model.layers.{}.attention_layernorm",
            "blocks.{}.feed_forward_norm": "model.layers.{}.feedforward_layernorm",
        },
        activations={"relu2": "relu2"},
        defaults=lambda settings: {**modern_defaults(settings), "hidden_act": "xielu"},
        gguf_activations=("relu2", "xielu"),
        rope_theta=None,  # no default, because transformers' default has RoPE scaling
        gguf_rope_types=("llama3",),
        gguf_needs_head=True,
    ),
    # For fine-tuning; TransformerLM does not compute these, nor qwen2.
    "mistral": replace(
        LLAMA,
        model_class="MistralForCausalLM",
        biases={},
        gguf_name="llama",
        gguf_rope_types=(),
        gguf_no_window=True,
    ),
    "smollm3": replace(
        LLAMA,
        model_class="SmolLM3ForCausalLM",
        fixed={"use_sliding_window": False},
        gguf_fixed=every_fourth_without_rope,
        gguf_rope_types=(),
    ),
    "granite": replace(LLAMA, model_class="GraniteForCausalLM", gguf_settings=_SCALES, gguf_rope_types=()),
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
        QWEN3,
        model_class="Qwen3MoeForCausalLM",
        modules={**QWEN3.modules, **_EXPERTS},
        fixed={**QWEN3.fixed, **_ALL_LAYERS_HAVE_EXPERTS, "norm_topk_prob": True},
        gguf_name="qwen3moe",
        gguf_settings={
            **_EXPERTS_USED,
            "num_local_experts": "{arch}.expert_count",
            "moe_intermediate_size": "{arch}.expert_feed_forward_length",
        },
    ),
    "mixtral": replace(
        LLAMA,
        model_class="MixtralForCausalLM",
        modules={**LLAMA.modules, **_EXPERTS},
        biases={},
        gguf_name="llama",
        gguf_settings={**_EXPERTS_USED, "num_local_experts": "{arch}.expert_count"},
        gguf_rope_types=(),
        gguf_no_window=True,
    ),
    "qwen2_moe": replace(
        QWEN3,
        model_class="Qwen2MoeForCausalLM",
        modules={
            **QWEN3.modules,
            **_EXPERTS,
            "blocks.{}.shared_expert.router": "model.layers.{}.mlp.shared_expert_gate",
            "blocks.{}.shared_expert.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
            "blocks.{}.shared_expert.up": "model.layers.{}.mlp.shared_expert.up_proj",
            "blocks.{}.shared_expert.down": "model.layers.{}.mlp.shared_expert.down_proj",
        },
        fixed={**QWEN3.fixed, **_ALL_LAYERS_HAVE_EXPERTS, "norm_topk_prob": False, "qkv_bias": True},
        biases={},
        gguf_name="qwen2moe",
        gguf_settings={
            **_EXPERTS_USED,
            "num_experts": "{arch}.expert_count",
            "moe_intermediate_size": "{arch}.expert_feed_forward_length",
            "shared_expert_intermediate_size": "{arch}.expert_shared_feed_forward_length",
        },
        gguf_needs_head=True,
    ),
    "olmoe": replace(
        QWEN3,
        model_class="OlmoeForCausalLM",
        modules={**QWEN3.modules, **_EXPERTS},
        fixed={"norm_topk_prob": False, "clip_qkv": None},
        gguf_settings={**_EXPERTS_USED, "num_experts": "{arch}.expert_count"},
        gguf_fixed=lambda settings: {
            **heads_as_wide_as_the_model(settings),
            "num_key_value_heads": settings["num_attention_heads"],
        },
        gguf_needs_head=True,
    ),
    "granitemoe": replace(
        LLAMA,
        model_class="GraniteMoeForCausalLM",
        modules={
            **LLAMA.modules,
            **{name: key.replace(".mlp.", ".block_sparse_moe.") for name, key in _EXPERTS.items()},
            "blocks.{}.router": "model.layers.{}.block_sparse_moe.router",
        },
        biases=ATTENTION_BIAS,
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
        QWEN3,
        model_class="Olmo2ForCausalLM",
        modules={**QWEN3.modules, **_POST_NORMS},
        fixed={},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_needs_head=True,
    ),
    "phi": replace(
        QWEN3,
        model_class="PhiForCausalLM",
        modules={
            **QWEN3.modules,
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
        QWEN3,
        model_class="Phi3ForCausalLM",
        modules={
            **QWEN3.modules,
            "blocks.{}.attention.qkv": "model.layers.{}.self_attn.qkv_proj",
            "blocks.{}.feed_forward.gate_up": "model.layers.{}.mlp.gate_up_proj",
        },
        fixed={},
        gguf_fixed=heads_as_wide_as_the_model,
        gguf_rope_types=("longrope",),
        gguf_no_window=True,
    ),
    "gpt_neox": replace(
        QWEN3,
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
        sizes={name: keys for name, keys in QWEN3.sizes.items() if name != "kv_heads"},
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
        QWEN3,
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
BY_GGUF_NAME: dict[str, str] = {}  # llama.cpp's name of an architecture -> model_type; `llama` is Llama, see below
for _model_type, _layout in LAYOUTS.items():
    BY_GGUF_NAME.setdefault(_layout.gguf_name or _model_type, _model_type)


def model_type_of(gguf_name: str, metadata: Mapping[str, Any]) -> str:
    """Returns the model_type of a file with an architecture of llama.cpp, in which Mixtral is `llama` with experts."""
    return "mixtral" if gguf_name == "llama" and metadata.get("llama.expert_count") else BY_GGUF_NAME[gguf_name]


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
