"""Converts RoPE's parameters to the metadata and tensors of a GGUF file and back.

A model with scaled RoPE divides each frequency by a factor. llama.cpp computes the factors of YaRN, and reads others
from tensors: one for Llama 3's scaling, and two for LongRoPE, for contexts up to the length of pretraining and for
longer ones.

d / 2 frequencies, where d is how many elements of a head RoPE rotates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gguf import Keys

from sansgpu.config import ConfigError
from sansgpu.models.family import NTK_ALPHA, Family, Settings, Weights, rope_of

_FACTORS, _LONG, _SHORT = ROPE_TENSORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
OTHER_FORMAT = "use the model in Hugging Face's format"
_THETA = 10_000.0  # default if a file has none
_LOCAL_THETA = "{arch}.rope.freq_base_swa"
_NO_ROTATION = 1e30  # factor of elements that proportional RoPE does not rotate, as in files of llama.cpp's converter
_LLAMA3_KEY = "sansgpu.rope_parameters"  # JSON of the parameters from which Llama 3's factors are computed
# All Llama 3 models have these values. llama.cpp's converter writes only the tensor, the maximum of which is `factor`.
_YARN = {  # parameter of YaRN: (GGUF's key, default)
    "factor": (Keys.Rope.SCALING_FACTOR, 1.0),
    "original_max_position_embeddings": (Keys.Rope.SCALING_ORIG_CTX_LEN, None),
    "beta_fast": (Keys.Rope.SCALING_YARN_BETA_FAST, 32.0),
    "beta_slow": (Keys.Rope.SCALING_YARN_BETA_SLOW, 1.0),
    "llama_4_scaling_beta": (Keys.Attention.TEMPERATURE_SCALE, None),  # makes queries grow with their position
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def has_unsupported_rope(family: Family, settings: Settings) -> bool:
    """Returns True if llama.cpp does not support the RoPE scaling of a model."""
    used = {_rope_type(rope) for rope in _ropes(settings)}
    return bool(used.difference(("default", *_scalings(family))))


def is_untruncated_yarn(settings: Settings) -> bool:
    """Returns True for a model like gpt-oss, whose YaRN has limits between two frequencies."""
    return any(rope.get("rope_type") == "yarn" and not rope.get("truncate", True) for rope in _ropes(settings))


def _scalings(family: Family) -> tuple[str, ...]:
    """Returns the types of scaled RoPE that llama.cpp supports; not YaRN, if some layers have an unscaled RoPE."""
    has_yarn = family.gguf_yarn and not family.gguf_local_rope
    return ("yarn", *family.gguf_rope_types) if has_yarn else family.gguf_rope_types


def _rope_type(rope: Settings) -> str:
    """Returns the type of scaling, with a name of its own for the variant that only enlarges the base."""
    name = str(rope.get("rope_type", "default"))
    return NTK_ALPHA if name == "dynamic" and rope.get("alpha") else name


def rope_metadata(settings: Settings) -> dict[str, Any]:
    """Returns the metadata of RoPE, by key."""
    rope, *local = _ropes(settings)
    head_dim = _head_dim(settings)
    share = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
    values: dict[str, Any] = {
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Rope.DIMENSION_COUNT: int(head_dim * share),
        Keys.Rope.FREQ_BASE: _theta(rope, head_dim),
    }
    if local:
        values[_LOCAL_THETA] = float(local[0]["rope_theta"])
    if "global_head_dim" in settings:
        local_keys = Keys.Attention.KEY_LENGTH_SWA, Keys.Attention.VALUE_LENGTH_SWA, Keys.Rope.DIMENSION_COUNT_SWA
        values |= dict.fromkeys(local_keys, settings["head_dim"])
    match rope.get("rope_type"):
        case "llama3":
            values[_LLAMA3_KEY] = json.dumps(dict(rope))
        case "longrope":
            values[Keys.Rope.SCALING_ORIG_CTX_LEN] = rope["original_max_position_embeddings"]
            values[Keys.Rope.SCALING_ATTN_FACTOR] = _attention_factor(rope, settings)
        case "yarn":
            values[Keys.Rope.SCALING_TYPE] = "yarn"
            values |= {key: rope[name] for name, (key, _) in _YARN.items() if rope.get(name) is not None}
            values[Keys.Rope.SCALING_ATTN_FACTOR] = _yarn_attention_factor(rope) / _yarn_scale(rope["factor"])
    return values


def _theta(rope: Settings, head_dim: int) -> float:
    theta = float(rope.get("rope_theta", _THETA))
    return theta * float(rope["alpha"]) ** (head_dim / (head_dim - 2)) if _rope_type(rope) == NTK_ALPHA else theta


def rope_tensors(settings: Settings) -> Weights:
    """Returns the tensors of factors (d / 2,) by name; empty if RoPE is not scaled."""
    rope = _ropes(settings)[0]
    match rope.get("rope_type"):
        case "llama3":
            return {_FACTORS: _llama3_factors(rope, _head_dim(settings))}
        case "proportional":
            pairs = _head_dim(settings) // 2
            rotated = int(rope.get("partial_rotary_factor", 1.0) * pairs)
            return {_FACTORS: torch.tensor([1.0] * rotated + [_NO_ROTATION] * (pairs - rotated))}
        case "longrope":
            factors = {_LONG: rope["long_factor"], _SHORT: rope["short_factor"]}
            return {name: torch.tensor(values, dtype=torch.float32) for name, values in factors.items()}
    return {}


def read_rope(
    family: Family, settings: Settings, value_of: Callable[[str], Any], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Returns the settings of RoPE. Raises ConfigError if its scaling is not supported."""
    scaling = value_of(Keys.Rope.SCALING_TYPE) or "none"
    if scaling == "linear" and value_of(Keys.Rope.SCALING_FACTOR) in (1.0, None):
        scaling = "none"
    if scaling not in ("none", *_scalings(family)):
        raise ConfigError(f"its RoPE scaling type {scaling} is not supported; {OTHER_FORMAT}.")
    if (own := value_of(_LLAMA3_KEY)) is not None:
        return {"rope_parameters": json.loads(own)}
    theta: Any = value_of(Keys.Rope.FREQ_BASE) or _THETA
    rope = {"rope_type": "default", "rope_theta": theta}
    head_dim = _head_dim(settings)
    rotated = value_of(Keys.Rope.DIMENSION_COUNT) or head_dim
    local_theta: Any = value_of(_LOCAL_THETA) or family.gguf_local_theta or theta
    is_base = 0 < theta < math.inf and 0 < local_theta < math.inf
    if not (is_base and rotated % 2 == 0 and 0 < rotated <= head_dim):
        raise ConfigError(
            f"RoPE rotates {rotated} of {head_dim} elements of a head with base {theta}, which is "
            "impossible; download or convert it again."
        )
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if any(array.shape != (rotated // 2,) or not (array > 0).all() for array in factors.values()):
        raise ConfigError(f"its RoPE factors are not {rotated // 2} positive numbers; {OTHER_FORMAT}.")
    if scaling == "yarn":
        return {"rope_parameters": {**rope, **_read_yarn(value_of)}}
    if family.gguf_local_rope:
        if "proportional" in family.gguf_rope_types and _FACTORS in factors:
            rope |= {"rope_type": "proportional", "partial_rotary_factor": float((factors[_FACTORS] == 1).mean())}
        local = {"rope_type": "default", "rope_theta": local_theta}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    if "llama3" in family.gguf_rope_types and _FACTORS in factors:
        return {"rope_parameters": _read_llama3(rope, settings, factors[_FACTORS])}
    if "longrope" in family.gguf_rope_types and _LONG in factors:
        return _read_longrope(rope, settings, value_of, factors)
    return {"rope_parameters": rope}


def _read_llama3(rope: Settings, settings: Settings, factors: np.ndarray) -> dict[str, Any]:
    scaled = {**rope, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    if not np.allclose(_llama3_factors(scaled, settings["head_dim"]).numpy(), factors, rtol=1e-4):
        raise ConfigError(f"its RoPE scaling is not that of Llama 3, the only one that is supported; {OTHER_FORMAT}.")
    return scaled


def _read_longrope(
    rope: Settings, settings: Settings, value_of: Callable[[str], Any], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    trained = value_of(Keys.Rope.SCALING_ORIG_CTX_LEN) or settings["max_position_embeddings"]
    scaled = {
        **rope,
        "rope_type": "longrope",
        "long_factor": [shortest(factor) for factor in factors[_LONG].tolist()],
        "short_factor": [shortest(factor) for factor in factors[_SHORT].tolist()],
        "original_max_position_embeddings": trained,
        "attention_factor": value_of(Keys.Rope.SCALING_ATTN_FACTOR) or 1.0,
    }
    # Phi-3's config ignores the length among RoPE's parameters if it also has one of its own, which has a default.
    return {"rope_parameters": scaled, "original_max_position_embeddings": trained}


def _read_yarn(value_of: Callable[[str], Any]) -> dict[str, Any]:
    read: dict[str, Any] = {name: value_of(key) or default for name, (key, default) in _YARN.items()}
    if not read["original_max_position_embeddings"]:
        raise ConfigError(f"its RoPE has no original context length, which YaRN needs; {OTHER_FORMAT}.")
    scale, given = _yarn_scale(read["factor"]), value_of(Keys.Rope.SCALING_ATTN_FACTOR) or 1.0
    scale /= _yarn_scale(read["factor"], value_of(Keys.Rope.SCALING_YARN_LOG_MUL) or 0.0)
    present = {name: value for name, value in read.items() if value is not None}
    return {**present, "rope_type": "yarn", "attention_factor": shortest(given * scale)}


def shortest(value: Any) -> Any:
    """Rounds a float to the shortest decimal with the same fp32 value: 9.999999974752427e-07 becomes 1e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _ropes(settings: Settings) -> tuple[Mapping[str, Any], ...]:
    """Returns the RoPE parameters of all layers, or those of full_attention and those of sliding_attention layers."""
    rope = rope_of(settings)
    return (rope["full_attention"], rope["sliding_attention"]) if "full_attention" in rope else (rope,)


def _head_dim(settings: Settings) -> int:
    """Returns the head_dim of layers with full attention, which may differ from that of layers with a window."""
    return int(settings.get("global_head_dim") or settings["head_dim"])


def _attention_factor(rope: Settings, settings: Settings) -> float:
    """Returns the factor of queries and keys, by default the one that transformers computes as in LongRoPE's paper."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    trained = rope["original_max_position_embeddings"]
    longer = rope.get("factor") or settings["max_position_embeddings"] / trained
    return math.sqrt(1 + math.log(longer) / math.log(trained)) if longer > 1 else 1.0


def _yarn_attention_factor(rope: Settings) -> float:
    """Returns the factor of queries and keys, by default the one that transformers computes."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    scale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and all_dims:
        return _yarn_scale(rope["factor"], scale) / _yarn_scale(rope["factor"], all_dims)
    return _yarn_scale(rope["factor"])


def _yarn_scale(factor: float, multiplier: float = 1.0) -> float:
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


def _llama3_factors(rope: Settings, d: int) -> torch.Tensor:
    """Returns the factors (d / 2,) by which Llama 3's scaling lengthens RoPE wavelengths."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    turns = rope["original_max_position_embeddings"] / wavelengths
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1 for waves that turn often in the original context
    factors: torch.Tensor = 1 / ((1 - unscaled) / rope["factor"] + unscaled)
    return factors.float()
