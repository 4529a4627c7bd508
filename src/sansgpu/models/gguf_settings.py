"""Converts the settings of a config.json to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, Keys

from sansgpu.config import ConfigError
from sansgpu.models.layouts import Weights, rope_of

# The activations that llama.cpp supports, by model_type of config.json, which is also llama.cpp's architecture name.
ACTIVATIONS = {
    "gpt2": ("gelu_new", "gelu_pytorch_tanh"),
    "llama": ("silu",),
    "qwen2": ("silu",),
    "qwen3": ("silu",),
    "apertus": ("relu2", "xielu"),
}
KNOWN = ", ".join(ACTIVATIONS)
# Sizes: keys of config.json -> keys of GGUF.
_CLASSIC = {
    "n_embd": Keys.LLM.EMBEDDING_LENGTH,
    "n_layer": Keys.LLM.BLOCK_COUNT,
    "n_head": Keys.Attention.HEAD_COUNT,
    "n_inner": Keys.LLM.FEED_FORWARD_LENGTH,
    "n_positions": Keys.LLM.CONTEXT_LENGTH,
    "layer_norm_epsilon": Keys.Attention.LAYERNORM_EPS,
}
_MODERN = {
    "hidden_size": Keys.LLM.EMBEDDING_LENGTH,
    "num_hidden_layers": Keys.LLM.BLOCK_COUNT,
    "num_attention_heads": Keys.Attention.HEAD_COUNT,
    "num_key_value_heads": Keys.Attention.HEAD_COUNT_KV,
    "head_dim": Keys.Attention.KEY_LENGTH,
    "intermediate_size": Keys.LLM.FEED_FORWARD_LENGTH,
    "max_position_embeddings": Keys.LLM.CONTEXT_LENGTH,
    "rms_norm_eps": Keys.Attention.LAYERNORM_RMS_EPS,
}
_OPTIONAL = ("num_key_value_heads", "head_dim")  # may be missing from GGUF files and config.json
_ROPE_THETA = 10_000.0  # default
# Llama 3's rope scaling: llama.cpp reads factors of the wavelengths, we read the parameters from which they follow.
ROPE_FACTORS = "rope_freqs.weight"
_ROPE_KEY = "sansgpu.rope_parameters"
_ROPE_SCALED = ("llama", "apertus")  # the architectures for which llama.cpp reads ROPE_FACTORS
# xIELU (arXiv 2411.13010) of each layer: Hugging Face's parameter, GGUF's key, and the value with which xIELU equals
# ReLU squared, as softplus(alpha_p) is 1 and softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}


def with_default_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with defaults for the sizes that config.json may leave out."""
    present = {key: value for key, value in settings.items() if value is not None}
    if present["model_type"] == "gpt2":
        return {"n_inner": 4 * present["n_embd"], **present}
    if present["model_type"] not in ACTIVATIONS:
        return present
    heads = present["num_attention_heads"]
    return {"head_dim": present["hidden_size"] // heads, "num_key_value_heads": heads, **present}


def require_expressible(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if llama.cpp cannot compute the model exactly."""
    architecture = settings["model_type"]
    if architecture not in ACTIVATIONS:
        raise ConfigError(f"--format gguf supports {KNOWN}, but this model has the architecture {architecture}.")
    activation = settings.get("activation_function" if architecture == "gpt2" else "hidden_act")
    if activation not in ACTIVATIONS[architecture]:
        supported = " or ".join(ACTIVATIONS[architecture])
        raise ConfigError(
            f"llama.cpp computes {supported} in {architecture}, but this model has {activation}; use --format hf."
        )
    options = ("use_sliding_window", "attention_bias", "mlp_bias", "scale_attn_by_inverse_layer_idx")
    bad = [key for key in options if settings.get(key)]
    bad += ["scale_attn_weights"] if not settings.get("scale_attn_weights", True) else []
    rope_types = ("default", "llama3") if architecture in _ROPE_SCALED else ("default",)
    bad += ["rope_parameters"] if rope_of(settings).get("rope_type", "default") not in rope_types else []
    if bad:
        raise ConfigError(f"GGUF does not support {bad[0]} {settings.get(bad[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any], weights: Weights) -> None:
    """Writes the settings as metadata, and xIELU's parameters, which GGUF does not store as tensors."""
    architecture = settings["model_type"]
    for hf_key, key in _sizes(architecture).items():
        value, name = settings[hf_key], key.format(arch=architecture)
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_uint32(name, value)
    if architecture == "gpt2":
        return
    rope = rope_of(settings)
    writer.add_value_length(settings["head_dim"])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", _ROPE_THETA))
    if rope.get("rope_type") == "llama3":
        writer.add_string(_ROPE_KEY, json.dumps(dict(rope)))
    if architecture == "apertus":
        for parameter, (key, relu_squared) in _XIELU.items():
            learned = settings["hidden_act"] == "xielu"
            names = (_xielu_name(layer, parameter) for layer in range(settings["num_hidden_layers"]))
            writer.add_array(key, [float(weights[name]) if learned else relu_squared for name in names])


def read_settings(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json, except those that tensors imply. Raises KeyError if one is missing."""
    keys = {hf_key: key.format(arch=architecture) for hf_key, key in _sizes(architecture).items()}
    settings = {
        "model_type": architecture,
        **{name: _shortest(metadata[key]) for name, key in keys.items() if key in metadata or name not in _OPTIONAL},
        "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": metadata.get(Keys.Tokenizer.EOS_ID),
        "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
        "dtype": "float32",
    }
    if architecture == "gpt2":
        return with_default_settings({**settings, "activation_function": "gelu_new"})
    scaling = metadata.get(Keys.Rope.SCALING_TYPE.format(arch=architecture), "none")
    if scaling != "none":
        raise ConfigError(f"its RoPE scaling type {scaling} is not supported.")
    theta = _shortest(metadata.get(Keys.Rope.FREQ_BASE.format(arch=architecture), _ROPE_THETA))
    default = {"rope_type": "default", "rope_theta": theta}
    rope = json.loads(metadata[_ROPE_KEY]) if _ROPE_KEY in metadata else default
    activation = ACTIVATIONS[architecture][0]
    if architecture == "apertus" and not _is_relu_squared(metadata):
        activation = "xielu"
    return with_default_settings({**settings, "rope_parameters": rope, "hidden_act": activation})


def rope_factors(settings: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the factors (d / 2,) by which Llama 3 scaling lengthens RoPE wavelengths; None without that scaling."""
    rope = rope_of(settings)
    if rope.get("rope_type") != "llama3":
        return None
    d, low, high = settings["head_dim"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    turns = rope["original_max_position_embeddings"] / wavelengths
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1 for waves with many turns in the original context
    factors: torch.Tensor = 1 / ((1 - unscaled) / rope["factor"] + unscaled)
    return factors.float()


def xielu_weights(metadata: Mapping[str, Any]) -> Weights:
    """Returns xIELU's parameters by Hugging Face's names."""
    return {
        _xielu_name(layer, parameter): torch.tensor([value] if parameter.startswith("alpha") else value)
        for parameter, (key, _) in _XIELU.items()
        for layer, value in enumerate(metadata[key])
    }


def _xielu_name(layer: int, parameter: str) -> str:
    return f"model.layers.{layer}.mlp.act_fn.{parameter}"


def _is_relu_squared(metadata: Mapping[str, Any]) -> bool:
    """Returns True if the xIELU of every layer equals ReLU squared."""
    pairs = [(value, np.float32(expected)) for key, expected in _XIELU.values() for value in metadata[key]]
    return all(np.float32(value) == expected for value, expected in pairs)


def _sizes(architecture: str) -> dict[str, str]:
    return _CLASSIC if architecture == "gpt2" else _MODERN


def _shortest(value: Any) -> Any:
    """Returns the shortest decimal that rounds to the same fp32 value: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
