"""What config.json says, in a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, Keys

from sansgpu.config import ConfigError
from sansgpu.models.layouts import Weights, rope_of

# model_type of config.json, which llama.cpp has for its architecture's name too: the activations it computes.
ACTIVATIONS = {
    "gpt2": ("gelu_new", "gelu_pytorch_tanh"),
    "llama": ("silu",),
    "qwen2": ("silu",),
    "qwen3": ("silu",),
    "apertus": ("relu2", "xielu"),
}
KNOWN = ", ".join(ACTIVATIONS)
# Sizes: config.json's key, then GGUF's.
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
_LEFT_OUT = ("num_key_value_heads", "head_dim")  # by some files, as by some config.json
_ROPE_THETA = 10_000.0  # where nothing is said
# Llama 3's stretched rotary positions: llama.cpp reads factors of the wavelengths, and we what they come from.
ROPE_FACTORS = "rope_freqs.weight"
_ROPE_KEY = "sansgpu.rope_parameters"
_STRETCHED = ("llama", "apertus")  # the architectures whose factors llama.cpp reads
# xIELU (arXiv 2411.13010) of each layer: Hugging Face's parameter, GGUF's key, and the value that makes it ReLU
# squared: softplus(alpha_p) is 1, softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the sizes that config.json may leave out."""
    done = {key: value for key, value in settings.items() if value is not None}
    if done["model_type"] == "gpt2":
        return {"n_inner": 4 * done["n_embd"], **done}
    if done["model_type"] not in ACTIVATIONS:
        return done
    heads = done["num_attention_heads"]
    return {"head_dim": done["hidden_size"] // heads, "num_key_value_heads": heads, **done}


def require_expressible(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError where llama.cpp has no model that computes the same."""
    architecture = settings["model_type"]
    if architecture not in ACTIVATIONS:
        raise ConfigError(f"--format gguf knows {KNOWN}, but this model is of architecture {architecture}.")
    activation = settings.get("activation_function" if architecture == "gpt2" else "hidden_act")
    if activation not in ACTIVATIONS[architecture]:
        computed = " or ".join(ACTIVATIONS[architecture])
        raise ConfigError(
            f"llama.cpp computes {computed} in {architecture}, but this model has {activation}; use --format hf."
        )
    options = ("use_sliding_window", "attention_bias", "mlp_bias", "scale_attn_by_inverse_layer_idx")
    odd = [key for key in options if settings.get(key)]
    odd += ["scale_attn_weights"] if not settings.get("scale_attn_weights", True) else []
    stretched = rope_of(settings).get("rope_type", "default")
    odd += (
        ["rope_parameters"] if stretched not in ("default", *(["llama3"] if architecture in _STRETCHED else [])) else []
    )
    if odd:
        raise ConfigError(f"GGUF has no place for {odd[0]} {settings.get(odd[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any], weights: Weights) -> None:
    """Add what is no tensor; xIELU's parameters are none."""
    architecture = settings["model_type"]
    for ours, key in _sizes(architecture).items():
        value, name = settings[ours], key.format(arch=architecture)
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
        for parameter, (key, squared) in _XIELU.items():
            learned = settings["hidden_act"] == "xielu"
            names = (_xielu_name(layer, parameter) for layer in range(settings["num_hidden_layers"]))
            writer.add_array(key, [float(weights[name]) if learned else squared for name in names])


def read_settings(architecture: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a file's metadata, but for what its tensors say. Raises KeyError where something is missing."""
    keys = {ours: key.format(arch=architecture) for ours, key in _sizes(architecture).items()}
    settings = {
        "model_type": architecture,
        **{ours: _shortest(metadata[key]) for ours, key in keys.items() if key in metadata or ours not in _LEFT_OUT},
        "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": metadata.get(Keys.Tokenizer.EOS_ID),
        "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
        "dtype": "float32",
    }
    if architecture == "gpt2":
        return completed({**settings, "activation_function": "gelu_new"})
    scaling = metadata.get(Keys.Rope.SCALING_TYPE.format(arch=architecture), "none")
    if scaling != "none":
        raise ConfigError(f"its rotary positions are stretched by {scaling}, which is not known here.")
    theta = _shortest(metadata.get(Keys.Rope.FREQ_BASE.format(arch=architecture), _ROPE_THETA))
    plain = {"rope_type": "default", "rope_theta": theta}
    rope = json.loads(metadata[_ROPE_KEY]) if _ROPE_KEY in metadata else plain
    activation = ACTIVATIONS[architecture][0]
    if architecture == "apertus" and not _is_squared(metadata):
        activation = "xielu"
    return completed({**settings, "rope_parameters": rope, "hidden_act": activation})


def rope_factors(settings: Mapping[str, Any]) -> torch.Tensor | None:
    """How much longer each wavelength of the rotary positions is than rope_theta has it, (d / 2,); None: none is."""
    rope = rope_of(settings)
    if rope.get("rope_type") != "llama3":
        return None
    d, low, high = settings["head_dim"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    turns = rope["original_max_position_embeddings"] / wavelengths
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1 where a wave turns often in the first context: as it was
    factors: torch.Tensor = 1 / ((1 - kept) / rope["factor"] + kept)
    return factors.float()


def xielu_weights(metadata: Mapping[str, Any]) -> Weights:
    """xIELU's parameters by Hugging Face's names."""
    return {
        _xielu_name(layer, parameter): torch.tensor([value] if parameter.startswith("alpha") else value)
        for parameter, (key, _) in _XIELU.items()
        for layer, value in enumerate(metadata[key])
    }


def _xielu_name(layer: int, parameter: str) -> str:
    return f"model.layers.{layer}.mlp.act_fn.{parameter}"


def _is_squared(metadata: Mapping[str, Any]) -> bool:
    """Whether each layer's xIELU is ReLU squared."""
    wanted = [(value, np.float32(squared)) for key, squared in _XIELU.values() for value in metadata[key]]
    return all(np.float32(value) == squared for value, squared in wanted)


def _sizes(architecture: str) -> dict[str, str]:
    return _CLASSIC if architecture == "gpt2" else _MODERN


def _shortest(value: Any) -> Any:
    """A number that was stored in fp32 as it was written: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
