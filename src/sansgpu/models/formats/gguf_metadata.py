"""Converts a config.json to the metadata of a GGUF file and back."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, prod
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFWriter, Keys

from sansgpu.config import ConfigError
from sansgpu.models import families
from sansgpu.models.family import Family, Settings
from sansgpu.models.formats.gguf_rope import (
    has_unsupported_rope,
    is_untruncated_yarn,
    read_rope,
    rope_metadata,
    shortest,
)
from sansgpu.models.formats.gguf_tokenizer import add_value, read_end_ids
from sansgpu.models.formats.weights import as_stored

_Weight = TypeVar("_Weight")
_INNER = "language_model"  # transformers' name of the language model inside a multimodal model
# (keys, tensor, dimension): in each layer, this dimension of the tensor is the product of the values of the keys.
_HEAD_DIM = Keys.Attention.KEY_LENGTH
_SIZES = (
    ((Keys.LLM.EMBEDDING_LENGTH,), "token_embd.weight", -1),
    ((Keys.LLM.EMBEDDING_LENGTH,), "output.weight", -1),
    ((Keys.LLM.CONTEXT_LENGTH,), "position_embd.weight", 0),
    ((Keys.Attention.HEAD_COUNT, _HEAD_DIM), "attn_q.weight", 0),
    ((Keys.Attention.HEAD_COUNT_KV, _HEAD_DIM), "attn_k.weight", 0),
    ((Keys.Attention.HEAD_COUNT_KV, Keys.Attention.VALUE_LENGTH), "attn_v.weight", 0),
    ((Keys.Attention.HEAD_COUNT, Keys.Attention.VALUE_LENGTH), "attn_output.weight", 1),
    ((Keys.LLM.FEED_FORWARD_LENGTH,), "ffn_down.weight", 1),
    ((Keys.LLM.EXPERT_COUNT,), "ffn_down_exps.weight", 0),
)


def require_sizes(family: Family, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError if the sizes in a file's metadata do not match the shapes of its tensors.

    Ignores keys that are missing, that have a value for each layer or for each layer type, or that describe the cache
    of latent attention.
    """
    architecture = family.llama_cpp_name
    other_sizes = Keys.Attention.KEY_LENGTH_SWA, Keys.Attention.KEY_LENGTH_MLA
    if any(key.format(arch=architecture) in metadata for key in other_sizes):
        heads = (_HEAD_DIM, Keys.Attention.VALUE_LENGTH)
        metadata = {
            key: size for key, size in metadata.items() if key not in [one.format(arch=architecture) for one in heads]
        }
    experts, used = (
        metadata.get(key.format(arch=architecture)) for key in (Keys.LLM.EXPERT_COUNT, Keys.LLM.EXPERT_USED_COUNT)
    )
    if isinstance(experts, int) and experts and isinstance(used, int) and not 1 <= used <= experts:
        raise ConfigError(f"it uses {used} of {experts} experts, which is impossible; download or convert it again.")
    for keys, tensor, dimension in _SIZES:
        names = [key.format(arch=architecture) for key in keys]
        sizes: list[Any] = [metadata.get(name) for name in names]
        if not all(isinstance(size, int) for size in sizes):
            continue
        size = prod(map(int, sizes)) * (2 if family.gguf_gated_queries and tensor == "attn_q.weight" else 1)
        for name, shape in shapes.items():
            if (name == tensor or name.endswith(f".{tensor}")) and shape[dimension] != size:
                expected = " x ".join(f"{key} {value}" for key, value in zip(names, sizes, strict=True))
                raise ConfigError(
                    f"its metadata do not match its tensors: {expected}, but {name} has the shape {shape}; download or "
                    "convert it again."
                )


def language_model_of(settings: Settings, weights: Mapping[str, _Weight]) -> tuple[Settings, Mapping[str, _Weight]]:
    """Returns the settings and weights of the language model inside a multimodal model.

    llama.cpp reads the encoders of images and sounds from a separate file. Returns both arguments unchanged for a model
    that reads only text.
    """
    text = settings.get("text_config")
    if not isinstance(text, Mapping):
        return settings, weights
    inner = f"{_INNER}."
    found = {name.replace(inner, "", 1): one for name, one in weights.items() if inner in name or "lm_head" in name}
    tied = settings.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return {**text, "tie_word_embeddings": tied}, found


def require_expressible(settings: Settings) -> None:
    """Raises ConfigError if llama.cpp does not support a setting of the model."""
    architecture = settings["model_type"]
    family = families.find(architecture)
    if family is None or not family.modules:
        known = ", ".join(family.model_type for family in families.with_gguf())
        raise ConfigError(
            f"--format gguf supports {known}, but this model has the architecture {architecture}; use --format hf."
        )
    if (activation := settings.get(family.activation_key)) not in (*family.gguf_activations, None):
        supported = " or ".join(family.gguf_activations)
        raise ConfigError(
            f"llama.cpp supports only {supported} in {architecture}, but this model uses {activation}; use --format hf."
        )
    if is_untruncated_yarn(settings):
        raise ConfigError(
            'llama.cpp rounds the limits of YaRN, but "truncate" in this model\'s rope_parameters is false; set it to '
            "true in config.json before training, or use --format hf."
        )
    required = {**family.fixed, **dict.fromkeys(family.biases, False), **family.gguf_fixed(settings)}
    bad = [key for key, value in required.items() if settings.get(key, value) != value]
    bad += [key for key in family.gguf_keys if key not in settings]
    bad += ["rope_parameters"] if has_unsupported_rope(family, settings) else []
    if bad:
        raise ConfigError(f"GGUF does not support {bad[0]} {settings.get(bad[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Settings, weights: Mapping[str, Any]) -> None:
    """Writes the settings as metadata, with the parameters of an activation, which GGUF does not store as tensors."""
    family = families.get(settings["model_type"])
    keys = {**family.gguf_keys, **family.gguf_optional}
    values = {key: settings[hf_key] for hf_key, key in keys.items() if hf_key in settings} | dict(family.gguf_constants)
    if family.rotary:
        values |= rope_metadata(settings)
    if family.gguf_layers is not None:
        values |= family.gguf_layers.write(settings)
    if family.gguf_no_window and "sliding_window" in settings:
        values[Keys.LLM.CONTEXT_LENGTH] = min(values[Keys.LLM.CONTEXT_LENGTH], settings["sliding_window"])
    for key, value in values.items():
        add_value(writer, key.format(arch=writer.arch), value)
    if family.gguf_learned_activation is not None:
        written = family.gguf_learned_activation.write(settings, lambda name: float(as_stored(weights[name]).read()))
        for key, numbers in written.items():
            writer.add_array(key, numbers)


def read_settings(
    architecture: str, metadata: Mapping[str, Any], rope_factors: Mapping[str, np.ndarray], known: Settings
) -> dict[str, Any]:
    """Returns the settings for a config.json.

    `architecture` is a model_type, `rope_factors` are the tensors of ROPE_TENSORS, and `known` the settings that follow
    from other tensors. Raises KeyError if a setting is missing, and ConfigError if the RoPE scaling is not supported.
    """
    family = families.get(architecture)
    name = family.llama_cpp_name

    def value_of(key: str) -> Any:
        return shortest(metadata.get(key.format(arch=name)))

    activation = family.gguf_activations[0]
    if family.gguf_learned_activation is not None:
        activation, _ = family.gguf_learned_activation.read(metadata)
    ends = read_end_ids(metadata)
    settings = {
        "model_type": architecture,
        **{hf_key: value_of(key) for hf_key, key in {**family.gguf_keys, **family.gguf_optional}.items()},
        "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
        "dtype": "float32",
        family.activation_key: activation,
        **known,
    }
    if family.gguf_layers is not None:
        settings |= family.gguf_layers.read(value_of, settings["num_hidden_layers"])
    settings = families.with_default_settings(settings)
    settings = {**family.fixed, **family.gguf_fixed(settings), **settings}
    for hf_key, key in family.gguf_keys.items():
        if hf_key not in settings:
            raise KeyError(key.format(arch=name))
    epsilon = settings[family.norm_eps[0]]
    if not (isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"the epsilon of its norms is {epsilon}, but must be positive; convert it again.")
    if "max_seq_len" in family.sizes and (context := settings[family.sizes["max_seq_len"][0]]) < 1:
        raise ConfigError(f"its context has {context} tokens; download or convert it again.")
    if not family.rotary:
        return settings
    rope = read_rope(family, settings, value_of, rope_factors)
    rope["rope_parameters"] = {**settings.get("rope_parameters", {}), **rope["rope_parameters"]}
    return {**settings, **rope}
