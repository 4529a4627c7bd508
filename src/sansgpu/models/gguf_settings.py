"""Converts the settings of a config.json to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, Keys

from sansgpu.config import ConfigError
from sansgpu.models.layouts import LAYOUTS, Layout, Weights, rope_of, with_default_settings
from sansgpu.models.stored_weights import as_stored

KNOWN = ", ".join(LAYOUTS)
_OPTIONAL = ("num_key_value_heads", "head_dim")  # may be missing from GGUF files and config.json
_ROPE_THETA = 10_000.0  # default
# Llama 3's rope scaling: llama.cpp reads factors of the wavelengths, we read the parameters from which they follow.
ROPE_FACTORS = "rope_freqs.weight"
_ROPE_KEY = "sansgpu.rope_parameters"
# xIELU (arXiv 2411.13010) of each layer: Hugging Face's parameter, GGUF's key, and the value with which xIELU equals
# ReLU squared, as softplus(alpha_p) is 1 and softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}


def require_expressible(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if llama.cpp cannot compute the model exactly."""
    architecture = settings["model_type"]
    if architecture not in LAYOUTS:
        raise ConfigError(f"--format gguf supports {KNOWN}, but this model has the architecture {architecture}.")
    layout = LAYOUTS[architecture]
    if (activation := settings.get(layout.activation_key)) not in layout.gguf_activations:
        supported = " or ".join(layout.gguf_activations)
        raise ConfigError(
            f"llama.cpp computes {supported} in {architecture}, but this model has {activation}; use --format hf."
        )
    required = {**layout.fixed, **dict.fromkeys(layout.biases, False)}
    bad = [key for key, value in required.items() if settings.get(key, value) != value]
    rope_types = ("default", "llama3") if layout.gguf_rope_scaling else ("default",)
    bad += ["rope_parameters"] if rope_of(settings).get("rope_type", "default") not in rope_types else []
    if bad:
        raise ConfigError(f"GGUF does not support {bad[0]} {settings.get(bad[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Writes the settings as metadata, and xIELU's parameters, which GGUF does not store as tensors."""
    architecture = settings["model_type"]
    layout = LAYOUTS[architecture]
    for hf_key, key in layout.gguf_keys.items():
        value, name = settings[hf_key], key.format(arch=architecture)
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_uint32(name, value)
    if not layout.rotary:
        return
    rope = rope_of(settings)
    writer.add_value_length(settings["head_dim"])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_rope_freq_base(rope.get("rope_theta", _ROPE_THETA))
    if rope.get("rope_type") == "llama3":
        writer.add_string(_ROPE_KEY, json.dumps(dict(rope)))
    if _is_xielu(layout):
        for parameter, (key, relu_squared) in _XIELU.items():
            learned = settings["hidden_act"] == "xielu"
            names = (_xielu_name(layer, parameter) for layer in range(settings["num_hidden_layers"]))
            writer.add_array(
                key, [float(as_stored(weights[name]).read()) if learned else relu_squared for name in names]
            )


def read_settings(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json, except those that tensors imply. Raises KeyError if one is missing."""
    layout = LAYOUTS[architecture]
    keys = {hf_key: key.format(arch=architecture) for hf_key, key in layout.gguf_keys.items()}
    activation = layout.gguf_activations[0]
    if _is_xielu(layout) and not _is_relu_squared(metadata):
        activation = "xielu"
    settings = {
        "model_type": architecture,
        **{name: _shortest(metadata[key]) for name, key in keys.items() if key in metadata or name not in _OPTIONAL},
        "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": metadata.get(Keys.Tokenizer.EOS_ID),
        "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
        "dtype": "float32",
        layout.activation_key: activation,
    }
    if not layout.rotary:
        return with_default_settings(settings)
    scaling = metadata.get(Keys.Rope.SCALING_TYPE.format(arch=architecture), "none")
    if scaling != "none":
        raise ConfigError(f"its RoPE scaling type {scaling} is not supported.")
    theta = _shortest(metadata.get(Keys.Rope.FREQ_BASE.format(arch=architecture), _ROPE_THETA))
    default = {"rope_type": "default", "rope_theta": theta}
    rope = json.loads(metadata[_ROPE_KEY]) if _ROPE_KEY in metadata else default
    return with_default_settings({**settings, "rope_parameters": rope})


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


def _is_xielu(layout: Layout) -> bool:
    return "xielu" in layout.gguf_activations


def _is_relu_squared(metadata: Mapping[str, Any]) -> bool:
    """Returns True if the xIELU of every layer equals ReLU squared."""
    pairs = [(value, np.float32(expected)) for key, expected in _XIELU.values() for value in metadata[key]]
    return all(np.float32(value) == expected for value, expected in pairs)


def _shortest(value: Any) -> Any:
    """Returns the shortest decimal that rounds to the same fp32 value: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
