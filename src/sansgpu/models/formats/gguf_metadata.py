"""Converts a config.json to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, Keys

from sansgpu.config import ConfigError
from sansgpu.models.formats.layout import Layout, Settings, Weights
from sansgpu.models.formats.layouts import LAYOUTS, rope_of, with_default_settings
from sansgpu.models.formats.weights import as_stored

KNOWN = ", ".join(LAYOUTS)
_ROPE_THETA = 10_000.0  # default if a file has none
# Llama 3's RoPE scaling: llama.cpp reads the factors of the wavelengths from this tensor. sansgpu reads the parameters
# from which they are computed, and stores them under its own key.
ROPE_FACTORS = "rope_freqs.weight"
_LOCAL_ROPE_THETA = "{arch}.rope.freq_base_swa"
_ROPE_KEY = "sansgpu.rope_parameters"
# Parameters of xIELU (arXiv 2411.13010): Hugging Face's name -> (GGUF's key, the value with which xIELU equals ReLU
# squared). With these values softplus(alpha_p) is 1 and softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}


def require_expressible(settings: Settings) -> None:
    """Raises ConfigError if llama.cpp does not support a setting of the model."""
    architecture = settings["model_type"]
    if architecture not in LAYOUTS:
        raise ConfigError(f"--format gguf supports {KNOWN}, but this model has the architecture {architecture}.")
    layout = LAYOUTS[architecture]
    if (activation := settings.get(layout.activation_key)) not in (*layout.gguf_activations, None):
        supported = " or ".join(layout.gguf_activations)
        raise ConfigError(
            f"llama.cpp supports only {supported} in {architecture}, but this model uses {activation}; use --format hf."
        )
    required = {**layout.fixed, **dict.fromkeys(layout.biases, False), **layout.gguf_fixed(settings)}
    bad = [key for key, value in required.items() if settings.get(key, value) != value]
    bad += [key for key in layout.gguf_keys if key not in settings]
    rope_types = ("default", "llama3") if layout.gguf_rope_scaling else ("default",)
    used = {rope.get("rope_type", "default") for rope in _ropes(settings)}
    bad += ["rope_parameters"] if used.difference(rope_types) else []
    if bad:
        raise ConfigError(f"GGUF does not support {bad[0]} {settings.get(bad[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Settings, weights: Mapping[str, Any]) -> None:
    """Writes the settings as metadata, with the parameters of xIELU, which GGUF does not store as tensors."""
    layout = LAYOUTS[settings["model_type"]]
    keys = {**layout.gguf_keys, **layout.gguf_optional}
    values = {key: settings[hf_key] for hf_key, key in keys.items() if hf_key in settings}
    if layout.gguf_layers is not None:
        values |= layout.gguf_layers.write(settings)
    if layout.rotary:
        values |= _rope_values(layout, settings)
    if layout.gguf_no_window and "sliding_window" in settings:
        values[Keys.LLM.CONTEXT_LENGTH] = min(values[Keys.LLM.CONTEXT_LENGTH], settings["sliding_window"])
    for key, value in values.items():
        _add(writer, key.format(arch=writer.arch), value)
    if layout.rotary and rope_of(settings).get("rope_type") == "llama3":
        writer.add_string(_ROPE_KEY, json.dumps(dict(rope_of(settings))))
    if _is_xielu(layout):
        for parameter, (key, relu_squared) in _XIELU.items():
            learned = settings["hidden_act"] == "xielu"
            names = (_xielu_name(layer, parameter) for layer in range(settings["num_hidden_layers"]))
            writer.add_array(
                key, [float(as_stored(weights[name]).read()) if learned else relu_squared for name in names]
            )


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case list():
            writer.add_array(key, value)
        case bool():
            writer.add_bool(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_uint32(key, value)


def _ropes(settings: Settings) -> tuple[Mapping[str, Any], ...]:
    """Returns the RoPE parameters: of all layers, or of those with full attention and of those with a window."""
    rope = rope_of(settings)
    return (rope["full_attention"], rope["sliding_attention"]) if "full_attention" in rope else (rope,)


def _rope_values(layout: Layout, settings: Settings) -> dict[str, Any]:
    rope, *local = _ropes(settings)
    head_dim = settings["head_dim"]
    values = {
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Rope.DIMENSION_COUNT: int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        Keys.Rope.FREQ_BASE: float(rope.get("rope_theta", _ROPE_THETA)),
    }
    return {**values, _LOCAL_ROPE_THETA: float(local[0]["rope_theta"])} if local else values


def read_settings(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings for a config.json, except those that follow from the tensors.

    `architecture` is a model_type. Raises KeyError if a setting is missing, and ConfigError if the RoPE scaling is not
    supported.
    """
    layout = LAYOUTS[architecture]
    name = layout.gguf_name or architecture

    def value_of(key: str) -> Any:
        return _shortest(metadata.get(key.format(arch=name)))

    activation = layout.gguf_activations[0]
    if _is_xielu(layout) and not _is_relu_squared(metadata):
        activation = "xielu"
    settings = {
        "model_type": architecture,
        **{hf_key: value_of(key) for hf_key, key in {**layout.gguf_keys, **layout.gguf_optional}.items()},
        "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": metadata.get(Keys.Tokenizer.EOS_ID),
        "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
        "dtype": "float32",
        layout.activation_key: activation,
    }
    if layout.gguf_layers is not None:
        settings |= layout.gguf_layers.read(value_of, settings["num_hidden_layers"])
    settings = with_default_settings(settings)
    settings = {**layout.fixed, **layout.gguf_fixed(settings), **settings}
    for hf_key, key in layout.gguf_keys.items():
        if hf_key not in settings:
            raise KeyError(key.format(arch=name))
    return {**settings, **_read_rope(layout, settings, metadata, value_of)} if layout.rotary else settings


def _read_rope(
    layout: Layout, settings: Settings, metadata: Mapping[str, Any], value_of: Callable[[str], Any]
) -> dict[str, Any]:
    scaling = value_of(Keys.Rope.SCALING_TYPE) or "none"
    if scaling != "none":
        raise ConfigError(f"its RoPE scaling type {scaling} is not supported.")
    if _ROPE_KEY in metadata:
        return {"rope_parameters": json.loads(metadata[_ROPE_KEY])}
    rope = {"rope_type": "default", "rope_theta": value_of(Keys.Rope.FREQ_BASE) or _ROPE_THETA}
    rotated = value_of(Keys.Rope.DIMENSION_COUNT) or settings["head_dim"]
    if rotated != settings["head_dim"]:
        rope["partial_rotary_factor"] = rotated / settings["head_dim"]
    if layout.gguf_local_rope:
        local = {"rope_type": "default", "rope_theta": value_of(_LOCAL_ROPE_THETA) or _ROPE_THETA}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {"rope_parameters": rope}


def rope_factors(settings: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the factors (d / 2,) by which Llama 3's scaling lengthens RoPE wavelengths; None without it."""
    rope = rope_of(settings)
    if rope.get("rope_type") != "llama3":
        return None
    d, low, high = settings["head_dim"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    turns = rope["original_max_position_embeddings"] / wavelengths
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1 for waves that turn often in the original context
    factors: torch.Tensor = 1 / ((1 - unscaled) / rope["factor"] + unscaled)
    return factors.float()


def xielu_weights(metadata: Mapping[str, Any]) -> Weights:
    """Returns xIELU's parameters under Hugging Face's names."""
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
    """Rounds a float to the shortest decimal with the same fp32 value: 9.999999974752427e-07 becomes 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
