"""Converts a config.json and a tokenizer to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, Keys, TokenType
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from sansgpu.config import ConfigError
from sansgpu.models.formats.layouts import LAYOUTS, Layout, Weights, rope_of, with_default_settings
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.formats.weights import as_stored

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _GPT4.replace("{1,3}", "")
_DIGIT = r"\p{N}"
# llama.cpp's names of pre-tokenizers, by (split patterns, ignore_merges). GPT-4's pattern has several names; dbrx is
# the one without side effects.
_PRE_TOKENIZERS = {
    ((_GPT4,), False): "dbrx",
    ((_GPT4,), True): "llama-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
}
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"  # stands for a space in tokens of llama.cpp's `llama` tokenizer, as in SentencePiece


def write_tokenizer(writer: GGUFWriter, parts: TokenizerParts, rows: int) -> None:
    """Writes a tokenizer, padded to the embedding's `rows`. Raises ConfigError if llama.cpp does not support it."""
    raw = json.loads(parts.json)
    model, added = raw["model"], {token["id"]: token for token in raw["added_tokens"]}
    if _is_character_level(model, added, raw["normalizer"]):
        tokenizer_model, pre, space = "llama", "default", _SPACE
    else:
        tokenizer_model, pre, space = "gpt2", _pre_tokenizer(raw), " "
    names = {index: name.replace(" ", space) for name, index in model["vocab"].items()}
    names |= {index: token["content"] for index, token in added.items()}

    def type_of(index: int) -> TokenType:
        if index in added:
            return TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        if index not in names:
            return TokenType.UNUSED
        return TokenType.BYTE if tokenizer_model == "llama" and _BYTE.fullmatch(names[index]) else TokenType.NORMAL

    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(rows)])
    writer.add_token_types([type_of(index) for index in range(rows)])
    if tokenizer_model == "llama":
        writer.add_token_scores([0.0] * rows)
        writer.add_add_space_prefix(False)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    if parts.bos_id is not None:
        writer.add_bos_token_id(parts.bos_id)
    if parts.eos_id is not None:
        writer.add_eos_token_id(parts.eos_id)
    if parts.pad_id is not None:
        writer.add_pad_token_id(parts.pad_id)
    writer.add_add_bos_token(parts.begins)
    if parts.chat_template is not None:
        writer.add_chat_template(parts.chat_template)
    writer.add_string(Keys.Tokenizer.HF_JSON, parts.json)


def read_tokenizer(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Reads the tokenizer from metadata. Raises ConfigError if there is none or it is not supported."""
    bos, eos, pad = (metadata.get(k) for k in (Keys.Tokenizer.BOS_ID, Keys.Tokenizer.EOS_ID, Keys.Tokenizer.PAD_ID))
    begins = bool(metadata.get(Keys.Tokenizer.ADD_BOS, metadata.get(Keys.Tokenizer.PRE) == "llama-bpe"))
    tokenizer_json = metadata.get(Keys.Tokenizer.HF_JSON) or _rebuild_json(metadata, bos if begins else None)
    return TokenizerParts(tokenizer_json, bos, eos, pad, begins, metadata.get(Keys.Tokenizer.CHAT_TEMPLATE))


def _rebuild_json(metadata: Mapping[str, Any], bos: int | None) -> str:
    """Builds a tokenizer.json from tokens and merges. Unless `bos` is None, it adds that id to the start of a text."""
    pre = metadata.get(Keys.Tokenizer.PRE)
    split = next((key for key, name in _PRE_TOKENIZERS.items() if name == pre), None)
    if metadata.get(Keys.Tokenizer.MODEL) != "gpt2" or split is None:
        raise ConfigError(f"its tokenizer ({pre}) is not supported, and the file contains no tokenizer.json.")
    patterns, ignore_merges = split
    names, types = metadata[Keys.Tokenizer.LIST], metadata[Keys.Tokenizer.TOKEN_TYPE]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[Keys.Tokenizer.MERGES]]
    vocabulary = {name: index for index, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence([*steps, as_bytes]), decoders.ByteLevel()
    added = {token_type: [n for n, t in zip(names, types, strict=True) if t == token_type] for token_type in _ADDED}
    backend.add_special_tokens(added[TokenType.CONTROL])
    backend.add_tokens([AddedToken(name, normalized=False) for name in added[TokenType.USER_DEFINED]])
    if bos is not None:
        first = names[bos]
        backend.post_processor = processors.TemplateProcessing(f"{first} $A", None, [(first, bos)])
    return str(backend.to_str())


def _is_character_level(model: Mapping[str, Any], added: Mapping[int, Any], normalizer: Any) -> bool:
    """Returns True if all tokens are characters or bytes. llama.cpp's SentencePiece then gives the same ids."""
    regular = [name for name, index in model["vocab"].items() if index not in added]
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and bool(model.get("byte_fallback"))
        and normalizer is None
        and all(len(name) == 1 or _BYTE.fullmatch(name) for name in regular)
        and _SPACE not in regular
    )


def _pre_tokenizer(raw: Mapping[str, Any]) -> str:
    model, split = raw["model"], _split(raw["pre_tokenizer"])
    if model["type"] == "BPE" and split is not None and model["merges"] and _is_nfc_or_none(raw["normalizer"]):
        affixed = any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
        name = _PRE_TOKENIZERS.get((split, bool(model.get("ignore_merges"))))
        if name is not None and not affixed:
            return name
    raise ConfigError(
        "llama.cpp does not support this tokenizer; --format gguf supports byte-level BPE with the pre-tokenizers of "
        "GPT-2, GPT-4, Llama 3, Qwen and sansgpu, and character tokenizers."
    )


def _is_nfc_or_none(normalizer: Any) -> bool:
    """Accepts NFC although llama.cpp does not apply it, as for Qwen, because most text is in NFC already."""
    return normalizer is None or normalizer["type"] == "NFC"


def _split(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """Returns the split patterns of a byte-level pre-tokenizer; None for other pre-tokenizers."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    patterns = []
    for step in steps:
        match step:
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(_DIGIT)
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                patterns += [_GPT2] if use_regex else []
            case _:
                return None
    return tuple(patterns) if steps and steps[-1]["type"] == "ByteLevel" else None


KNOWN = ", ".join(LAYOUTS)
_OPTIONAL = ("num_key_value_heads", "head_dim")  # may be missing from GGUF files and config.json
_ROPE_THETA = 10_000.0  # default if a file has none
# Llama 3's RoPE scaling: llama.cpp reads the factors of the wavelengths from this tensor. sansgpu reads the parameters
# from which they are computed, and stores them under its own key.
ROPE_FACTORS = "rope_freqs.weight"
_ROPE_KEY = "sansgpu.rope_parameters"
# Parameters of xIELU (arXiv 2411.13010): Hugging Face's name -> (GGUF's key, the value with which xIELU equals ReLU
# squared). With these values softplus(alpha_p) is 1 and softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}


def require_expressible(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError if llama.cpp does not support a setting of the model."""
    architecture = settings["model_type"]
    if architecture not in LAYOUTS:
        raise ConfigError(f"--format gguf supports {KNOWN}, but this model has the architecture {architecture}.")
    layout = LAYOUTS[architecture]
    if (activation := settings.get(layout.activation_key)) not in layout.gguf_activations:
        supported = " or ".join(layout.gguf_activations)
        raise ConfigError(
            f"llama.cpp supports only {supported} in {architecture}, but this model uses {activation}; use --format hf."
        )
    required = {**layout.fixed, **dict.fromkeys(layout.biases, False)}
    bad = [key for key, value in required.items() if settings.get(key, value) != value]
    rope_types = ("default", "llama3") if layout.gguf_rope_scaling else ("default",)
    bad += ["rope_parameters"] if rope_of(settings).get("rope_type", "default") not in rope_types else []
    if bad:
        raise ConfigError(f"GGUF does not support {bad[0]} {settings.get(bad[0])} in {architecture}; use --format hf.")


def write_settings(writer: GGUFWriter, settings: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Writes the settings as metadata, with the parameters of xIELU, which GGUF does not store as tensors."""
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
    """Returns the settings for a config.json, except those that follow from the tensors.

    Raises KeyError if one is missing, and ConfigError if the RoPE scaling is not supported.
    """
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
