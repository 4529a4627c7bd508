"""Converts parameter names and configurations between our decoder and Hugging Face's layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.models.decoder import INIT_STD, LAYER_EPS, RMS_EPS

# Our parameter names -> Hugging Face's. `{}` is the layer.
_QWEN3 = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "blocks.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blocks.{}.feed_forward_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blocks.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blocks.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blocks.{}.attention.o.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blocks.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "blocks.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blocks.{}.feed_forward.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blocks.{}.feed_forward.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blocks.{}.feed_forward.down.weight": "model.layers.{}.mlp.down_proj.weight",
}
_APERTUS = _QWEN3 | {
    "blocks.{}.attention_norm.weight": "model.layers.{}.attention_layernorm.weight",
    "blocks.{}.feed_forward_norm.weight": "model.layers.{}.feedforward_layernorm.weight",
}
_GPT2 = {
    "embedding.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
    "blocks.{}.attention_norm.weight": "transformer.h.{}.ln_1.weight",
    "blocks.{}.attention_norm.bias": "transformer.h.{}.ln_1.bias",
    "blocks.{}.feed_forward_norm.weight": "transformer.h.{}.ln_2.weight",
    "blocks.{}.feed_forward_norm.bias": "transformer.h.{}.ln_2.bias",
    "blocks.{}.attention.o.weight": "transformer.h.{}.attn.c_proj.weight",
    "blocks.{}.attention.o.bias": "transformer.h.{}.attn.c_proj.bias",
    "blocks.{}.feed_forward.up.weight": "transformer.h.{}.mlp.c_fc.weight",
    "blocks.{}.feed_forward.up.bias": "transformer.h.{}.mlp.c_fc.bias",
    "blocks.{}.feed_forward.down.weight": "transformer.h.{}.mlp.c_proj.weight",
    "blocks.{}.feed_forward.down.bias": "transformer.h.{}.mlp.c_proj.bias",
}
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")  # GPT-2's Conv1D stores (in, out)
_MASK = re.compile(r"\.attn\.(masked_)?bias$")  # GPT-2's causal mask, a buffer in old checkpoints
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_NAMES = {"swiglu": _QWEN3, "relu2": _APERTUS, "gelu": _GPT2, "relu": _GPT2}
_MODERN = {  # our activation -> architecture, model_type and hidden_act in config.json
    "swiglu": ("Qwen3ForCausalLM", "qwen3", "silu"),
    "relu2": ("ApertusForCausalLM", "apertus", "relu2"),
}
_OUR_ACTIVATION = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}

Weights = dict[str, torch.Tensor]


def to_hugging_face(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Weights:
    """Renames weights to Hugging Face's names. Leaves out tied heads, as transformers does."""
    names = _NAMES[config.activation]
    renamed: Weights = {}
    for name, tensor in weights.items():
        if not config.uses_rope and ".attention." in name and ".o." not in name:
            continue
        hf_name = _translate(name, names)
        renamed[hf_name] = (tensor.T if TRANSPOSED.search(hf_name) else tensor).contiguous()
    if not config.uses_rope:
        for layer in range(config.n_layers):
            for kind in ("weight", "bias"):
                fused = torch.cat([weights[f"blocks.{layer}.attention.{part}.{kind}"] for part in "qkv"])
                renamed[f"transformer.h.{layer}.attn.c_attn.{kind}"] = (
                    fused.T.contiguous() if kind == "weight" else fused
                )
    return renamed


def from_hugging_face(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Weights:
    """Inverts `to_hugging_face`."""
    names = {hf_name: name for name, hf_name in _NAMES[config.activation].items()}
    prefix = "model." if config.uses_rope else "transformer."
    renamed: Weights = {}
    for name, value in weights.items():
        hf_name = name if name.startswith((prefix, "lm_head.")) else prefix + name  # base models lack the prefix
        if _MASK.search(hf_name) or (hf_name == "lm_head.weight" and config.tie_embeddings):
            continue
        tensor = (value.T if TRANSPOSED.search(hf_name) and not config.uses_rope else value).contiguous()
        if ".c_attn." in hf_name:
            layer = _LAYER.search(hf_name)
            assert layer is not None
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                renamed[f"blocks.{layer[0]}.attention.{part}.{hf_name.rsplit('.', 1)[1]}"] = piece.contiguous()
        else:
            renamed[_translate(hf_name, names)] = tensor
    return renamed


def _translate(name: str, names: Mapping[str, str]) -> str:
    layer = _LAYER.search(name)
    pattern = _LAYER.sub("{}", name, count=1)
    if pattern not in names:
        raise ConfigError(f"this layout has no weight named {name}.")
    return names[pattern].format(layer[0] if layer else "")


def module_names(model_type: str, layers: int) -> Iterator[str]:
    """Yields Hugging Face's names of the modules with weights; Llama and Qwen2 share those of Qwen3."""
    names = {"gpt2": _GPT2, "apertus": _APERTUS}.get(model_type, _QWEN3)
    patterns = dict.fromkeys(hf_name.rpartition(".")[0] for hf_name in names.values())
    if names is _GPT2:
        patterns["transformer.h.{}.attn.c_attn"] = None
    for pattern in patterns:
        yield from (pattern.format(layer) for layer in range(layers)) if "{}" in pattern else (pattern,)


def rope_of(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the RoPE parameters of a config.json; rope_type is absent or "default" without RoPE scaling."""
    rope: Mapping[str, Any] = settings.get("rope_parameters") or settings
    return {**rope, "rope_type": "scaled"} if settings.get("rope_scaling") else rope


def hugging_face_config(config: ModelConfig, end_id: int) -> dict[str, Any]:
    """Returns the config.json of an exported model."""
    shared = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "initializer_range": INIT_STD,
        "dtype": "float32",
    }
    if config.uses_rope:
        architecture, model_type, hidden_act = _MODERN[config.activation]
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": config.d_model,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": config.n_layers,
            "intermediate_size": config.d_ff,
            "max_position_embeddings": config.max_seq_len,
            "rms_norm_eps": RMS_EPS,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "hidden_act": hidden_act,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "pad_token_id": None,  # Apertus defaults to 3, and the padding row gets no gradient
            **shared,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.d_model,
        "n_head": config.n_heads,
        "n_layer": config.n_layers,
        "n_inner": config.d_ff,
        "n_positions": config.max_seq_len,
        "layer_norm_epsilon": LAYER_EPS,
        "activation_function": "relu" if config.activation == "relu" else "gelu_new",
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        **shared,
    }


def model_config(settings: Mapping[str, Any]) -> ModelConfig | None:
    """Converts a config.json in one of these layouts; returns None for any other model."""
    modern = next((ours for ours, (_, name, _) in _MODERN.items() if name == settings.get("model_type")), None)
    if modern is not None:
        if settings.get("attention_bias") or settings.get("use_sliding_window"):
            return None
        if settings.get("rms_norm_eps", RMS_EPS) != RMS_EPS or settings.get("hidden_act", "silu") != _MODERN[modern][2]:
            return None
        rope = rope_of(settings)
        if rope.get("rope_type", "default") != "default":
            return None
        heads = settings["num_attention_heads"]
        if settings["hidden_size"] != settings.get("head_dim", settings["hidden_size"] // heads) * heads:
            return None
        return ModelConfig.model_validate(
            {
                "vocab_size": settings["vocab_size"],
                "d_model": settings["hidden_size"],
                "n_heads": heads,
                "n_kv_heads": settings["num_key_value_heads"],
                "n_layers": settings["num_hidden_layers"],
                "d_ff": settings["intermediate_size"],
                "max_seq_len": settings["max_position_embeddings"],
                "rope_theta": rope["rope_theta"],
                "activation": modern,
                "tie_embeddings": settings.get("tie_word_embeddings", False),
            }
        )
    if settings.get("model_type") == "gpt2":
        activation = _OUR_ACTIVATION.get(settings.get("activation_function", "gelu_new"))
        if activation is None or settings.get("scale_attn_by_inverse_layer_idx"):
            return None
        if settings.get("layer_norm_epsilon", LAYER_EPS) != LAYER_EPS or not settings.get("scale_attn_weights", True):
            return None
        return ModelConfig.model_validate(
            {
                "vocab_size": settings["vocab_size"],
                "d_model": settings["n_embd"],
                "n_heads": settings["n_head"],
                "n_layers": settings["n_layer"],
                "d_ff": settings.get("n_inner") or 4 * settings["n_embd"],
                "max_seq_len": settings["n_positions"],
                "activation": activation,
                "dropout": settings.get("resid_pdrop", 0.0),
                "attention_dropout": settings.get("attn_pdrop", 0.0),
                "tie_embeddings": settings.get("tie_word_embeddings", True),
            }
        )
    return None
