"""Converts the weights and settings of a `TransformerLM` to transformers' names and layout and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from sansgpu.config import ConfigError
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight
from sansgpu.models import families
from sansgpu.models.architectures import ARCHITECTURES, DecoderConfig
from sansgpu.models.family import Settings, Weights, block_pattern, rope_of
from sansgpu.models.modules import INIT_STD

_MASK = re.compile(r"\.attn\.(masked_)?bias$")  # GPT-2's causal mask, a buffer that old checkpoints contain
_QKV = re.compile(r"(?<=\.attention\.)[qkv](?=\.)")


def to_hugging_face(config: DecoderConfig, weights: Mapping[str, torch.Tensor]) -> Weights:
    """Converts weights to transformers' names and layout. Omits a tied head, as transformers does."""
    family = families.get(config.decoder.name)
    fused = "blocks.{}.attention.qkv" in family.modules
    renamed: Weights = {}
    for name, tensor in weights.items():
        part = _QKV.search(name) if fused else None
        if part is not None:
            if part[0] != "q":
                continue
            tensor = torch.cat([weights[_QKV.sub(each, name)] for each in "qkv"])
            name = _QKV.sub("qkv", name)
        hf_name = _translate(name, family.modules)
        renamed[hf_name] = (tensor.T if family.is_transposed(hf_name) else tensor).contiguous()
    return renamed


def from_hugging_face(config: DecoderConfig, weights: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Inverts `to_hugging_face`. Quantized matrices, which are always (outputs, inputs), stay quantized."""
    family = families.get(config.decoder.name)
    modules = {hf_name: name for name, hf_name in family.modules.items()}
    renamed: dict[str, Matrix] = {}
    for name_in_file, value in weights.items():
        hf_name = name_in_file if name_in_file.startswith((family.prefix, "lm_head.")) else family.prefix + name_in_file
        if _MASK.search(hf_name) or (hf_name == "lm_head.weight" and config.tie_embeddings):
            continue
        name = _translate(hf_name, modules)
        parts = "qkv" if ".attention.qkv." in name else "q"
        is_transposed = family.is_transposed(hf_name)
        for part, piece in zip(parts, _in_pieces(value, len(parts), is_transposed), strict=True):
            renamed[name.replace(".attention.qkv.", f".attention.{part}.")] = piece
    return renamed


def _in_pieces(value: Matrix, count: int, is_transposed: bool) -> list[Matrix]:
    """Splits a weight along its outputs. `is_transposed` does not apply to quantized weights."""
    if isinstance(value, QuantizedWeight):
        return [QuantizedWeight(piece.contiguous(), value.format) for piece in value.data.chunk(count)]
    return [piece.contiguous() for piece in (value.T if is_transposed else value).chunk(count)]


def _translate(name: str, modules: Mapping[str, str]) -> str:
    pattern, number = block_pattern(name)
    module, _, parameter = pattern.rpartition(".")
    if module not in modules:
        raise ConfigError(f"its layout has no weight named {name}; download or export the model again.")
    return f"{modules[module].format(number)}.{parameter}"


def hugging_face_config(config: DecoderConfig, end_id: int) -> dict[str, Any]:
    """Returns the config.json of an exported model."""
    family = families.get(config.decoder.name)
    theta = {"rope_theta": config.rope_theta}
    # transformers 4 reads rope_theta and rope_scaling, for which Apertus has a default, and version 5 rope_parameters.
    rope = {**theta, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **theta}}
    return {
        "architectures": [family.model_class],
        "model_type": config.decoder.name,
        **{key: getattr(config, ours) for ours, (key, _) in family.sizes.items()},
        family.norm_eps[0]: config.decoder.norm_eps,
        **(rope if family.rotary else {}),
        family.activation_key: next(key for key, ours in family.activations.items() if ours == config.activation),
        **{key: config.biased in values for key, values in family.biases.items()},
        **{key: getattr(config, ours) for key, ours in family.dropouts.items()},
        **family.fixed,
        **family.derived(config),
        "pad_token_id": None,  # Apertus' default is 3, and transformers does not train the padding token's embedding
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "initializer_range": INIT_STD,
        "dtype": "float32",
    }


def model_config(settings: Settings) -> DecoderConfig | None:
    """Converts a config.json to a DecoderConfig; returns None if `TransformerLM` does not compute the model."""
    name = settings.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        return None
    architecture, family = ARCHITECTURES[name], families.get(name)
    settings = families.with_default_settings(settings)
    activation = family.activations.get(settings[family.activation_key])
    flags = {key: bool(settings.get(key)) for key in family.biases}
    bias = next((b for b in architecture.bias if flags == {key: b in v for key, v in family.biases.items()}), None)
    fixed = {family.norm_eps[0]: architecture.norm_eps, **family.fixed}
    if activation is None or bias is None or any(settings.get(key, value) != value for key, value in fixed.items()):
        return None
    values = {ours: settings[key] for ours, (key, _) in family.sizes.items()}
    values |= {ours: settings.get(key, 0.0) for key, ours in family.dropouts.items()}
    if family.rotary:
        rope = rope_of(settings)
        values["rope_theta"] = rope.get("rope_theta", family.rope_theta)
        if rope.get("rope_type", "default") != "default" or values["rope_theta"] is None:
            return None
        if values["d_model"] != values.pop("head_dim") * values["n_heads"]:
            return None
        values["n_kv_heads"] = values.pop("kv_heads")
    selected = {"architecture": name, "activation": activation, "bias": bias}
    tables = {"vocab_size": settings["vocab_size"], "tie_embeddings": settings["tie_word_embeddings"]}
    config = DecoderConfig.model_validate({**selected, **tables, **values})
    return config if all(settings.get(key) == value for key, value in family.derived(config).items()) else None
