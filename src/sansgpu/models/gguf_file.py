"""GGUF, the file format of llama.cpp (github.com/ggml-org/ggml/blob/master/docs/gguf.md): a model in one file.

It holds what a Hugging Face folder does, under other names; both ways go by Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding
from gguf import Keys, LlamaFileType

from sansgpu.config import ConfigError
from sansgpu.models.gguf_tokenizer import TokenizerParts, read_tokenizer, write_tokenizer
from sansgpu.models.layouts import TRANSPOSED, Weights, module_names, rope_of
from sansgpu.models.whole_folder import written_whole_file

GGUFType = Literal["f32", "f16", "bf16", "q8_0"]
TYPES: dict[GGUFType, tuple[Encoding, LlamaFileType]] = {  # of matrices; vectors are f32 always
    "f32": (Encoding.F32, LlamaFileType.ALL_F32),
    "f16": (Encoding.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Encoding.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Encoding.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
# model_type of config.json, which llama.cpp has for its architecture's name too: the activations it computes.
_ACTIVATIONS = {
    "gpt2": ("gelu_new", "gelu_pytorch_tanh"),
    "llama": ("silu",),
    "qwen2": ("silu",),
    "qwen3": ("silu",),
    "apertus": ("relu2", "xielu"),
}
_KNOWN = ", ".join(_ACTIVATIONS)
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
# xIELU (arXiv 2411.13010) of each layer: Hugging Face's parameter, GGUF's key, and the value that makes it ReLU
# squared: softplus(alpha_p) is 1, softplus(alpha_n) is 0.
_XIELU = {
    "alpha_p": (Keys.xIELU.ALPHA_P, float(np.log(np.e - 1))),
    "alpha_n": (Keys.xIELU.ALPHA_N, -200.0),
    "beta": (Keys.xIELU.BETA, 0.0),
    "eps": (Keys.xIELU.EPS, -1e-6),
}
_EMBEDDING, _HEAD, _POSITIONS = "token_embd.weight", "output.weight", "position_embd.weight"


@dataclass(frozen=True)
class About:
    """What a file says of itself."""

    name: str
    description: str
    dataset: str
    base_model: str | None = None


def is_gguf(target: str) -> bool:
    """Whether a model is given as a file, or by a name that ends as one's."""
    path = Path(target).expanduser()
    return path.is_file() or (path.suffix == ".gguf" and not path.is_dir())


def write_gguf(
    path: Path, settings: Mapping[str, Any], weights: Weights, tokenizer: TokenizerParts, kind: GGUFType, about: About
) -> list[str]:
    """Write a model of config.json's `settings`; whole, or not at all. Returns the matrices that q8_0 could not hold.

    Raises ConfigError where llama.cpp would not compute the same.
    """
    settings = _completed(settings)
    _require_expressible(settings)
    architecture = settings["model_type"]
    tensors = _renamed(settings, weights)
    if architecture == "apertus" and _HEAD not in tensors:  # which llama.cpp wants there, tied or not
        tensors[_HEAD] = tensors[_EMBEDDING]
    rows = tensors[_EMBEDDING].shape[0]
    encodings = {name: _encoding(name, tensor, kind) for name, tensor in tensors.items()}

    def write(partial: Path) -> None:
        writer = gguf.GGUFWriter(partial, architecture)
        try:
            _describe(writer, about, kind, tensors)
            _write_settings(writer, settings, weights)
            writer.add_vocab_size(rows)
            write_tokenizer(writer, tokenizer, rows)
            for name, tensor in tensors.items():
                block, size = gguf.GGML_QUANT_SIZES[encodings[name]]
                nbytes = tensor.numel() // block * size
                writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), nbytes, encodings[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():  # one at a time: a copy of all need not fit
                writer.write_tensor_data(_encoded(name, tensor, encodings[name]))
        finally:
            writer.close()

    written_whole_file(path, write)
    wanted = TYPES[kind][0]
    return [n for n, encoding in encodings.items() if encoding not in (wanted, Encoding.F32)]


class GGUFFile:
    """A model in a GGUF file, by Hugging Face's names. Raises ConfigError where it is none, or of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; give a GGUF file.")
        try:
            reader = gguf.GGUFReader(path)
            self._metadata = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever a file that is no such, or is torn, makes it raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{path} is no whole GGUF file: {reason}.") from None
        self._architecture = str(self._metadata.get(Keys.General.ARCHITECTURE))
        if self._architecture not in _ACTIVATIONS:
            raise ConfigError(f"{path} holds a model of architecture {self._architecture}; known are {_KNOWN}.")
        try:
            self.settings = self._settings()
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"{path}: its metadata make no model ({error} is missing or odd).") from None

    @property
    def tokenizer(self) -> TokenizerParts:
        """Its tokenizer. Raises ConfigError where it has none that can be read."""
        try:
            return read_tokenizer(self._metadata)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None

    def weights(self) -> Weights:
        """Weights in fp32, by Hugging Face's names. Raises ConfigError where one has no place, or cannot be read."""
        names = {theirs: ours for ours, theirs in _names(self.settings).items()}
        found: Weights = {}
        for name, tensor in self._tensors.items():
            module, _, kind = name.rpartition(".")
            if module not in names:
                raise ConfigError(f"{self.path}: the weight {name} has no place in {self._architecture}.")
            if name == _HEAD and self.settings["tie_word_embeddings"]:
                continue
            try:
                values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            except NotImplementedError:
                what = tensor.tensor_type.name
                raise ConfigError(f"{self.path}: {name} is of type {what}, which cannot be read.") from None
            theirs = f"{names[module]}.{kind}"
            found[theirs] = _from_file(theirs, torch.from_numpy(values), self.settings)
        if self.settings.get("hidden_act") == "xielu":
            found |= {
                f"model.layers.{layer}.mlp.act_fn.{parameter}": torch.tensor([value] if "alpha" in parameter else value)
                for parameter, (key, _) in _XIELU.items()
                for layer, value in enumerate(self._metadata[key])
            }
        return found

    def _settings(self) -> dict[str, Any]:
        metadata, sizes = self._metadata, _sizes(self._architecture)
        embedding, head = self._tensors[_EMBEDDING], self._tensors.get(_HEAD)
        tied = head is None or (head.tensor_type == embedding.tensor_type and np.array_equal(head.data, embedding.data))
        named = {ours: metadata.get(key.format(arch=self._architecture)) for ours, key in sizes.items()}
        settings = {
            "model_type": self._architecture,
            "vocab_size": int(embedding.shape[-1]),
            "tie_word_embeddings": tied,
            "bos_token_id": metadata.get(Keys.Tokenizer.BOS_ID),
            "eos_token_id": metadata.get(Keys.Tokenizer.EOS_ID),
            "pad_token_id": metadata.get(Keys.Tokenizer.PAD_ID),
            "dtype": "float32",
            **{ours: _shortest(value) for ours, value in named.items() if value is not None},
        }
        if self._architecture == "gpt2":
            return _completed({**settings, "activation_function": "gelu_new"})
        theta = _shortest(metadata.get(Keys.Rope.FREQ_BASE.format(arch=self._architecture), 10_000.0))
        settings |= {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        return _completed({**settings, "hidden_act": self._activation()})

    def _activation(self) -> str:
        if self._architecture != "apertus":
            return "silu"
        squared = all(
            np.float32(value) == np.float32(wanted) for key, wanted in _XIELU.values() for value in self._metadata[key]
        )
        return "relu2" if squared else "xielu"


def _sizes(architecture: str) -> dict[str, str]:
    return _CLASSIC if architecture == "gpt2" else _MODERN


def _completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the sizes that config.json may leave out."""
    done = {key: value for key, value in settings.items() if value is not None}
    if done["model_type"] == "gpt2":
        return {"n_inner": 4 * done["n_embd"], **done}
    if done["model_type"] not in _ACTIVATIONS:
        return done
    heads = done["num_attention_heads"]
    return {"head_dim": done["hidden_size"] // heads, "num_key_value_heads": heads, **done}


def _require_expressible(settings: Mapping[str, Any]) -> None:
    architecture = settings["model_type"]
    if architecture not in _ACTIVATIONS:
        raise ConfigError(f"--format gguf knows {_KNOWN}, but this model is of architecture {architecture}.")
    activation = settings.get("activation_function" if architecture == "gpt2" else "hidden_act")
    if activation not in _ACTIVATIONS[architecture]:
        computed = " or ".join(_ACTIVATIONS[architecture])
        raise ConfigError(
            f"llama.cpp computes {computed} in {architecture}, but this model has {activation}; use --format hf."
        )
    options = ("use_sliding_window", "attention_bias", "mlp_bias", "scale_attn_by_inverse_layer_idx")
    odd = [key for key in options if settings.get(key)]
    odd += ["scale_attn_weights"] if not settings.get("scale_attn_weights", True) else []
    odd += ["rope_parameters"] if rope_of(settings).get("rope_type", "default") != "default" else []
    if odd:
        raise ConfigError(f"GGUF has no place for {odd[0]} {settings.get(odd[0])} in {architecture}; use --format hf.")


def _describe(writer: gguf.GGUFWriter, about: About, kind: GGUFType, tensors: Weights) -> None:
    count = sum(tensor.numel() for tensor in tensors.values())
    writer.add_type("model")
    writer.add_name(about.name)
    writer.add_description(about.description)
    writer.add_size_label(gguf.size_label(count, count, 0, 0))
    writer.add_dataset_count(1)
    writer.add_dataset_name(0, about.dataset)
    if about.base_model is not None:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, about.base_model)
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_settings(writer: gguf.GGUFWriter, settings: Mapping[str, Any], weights: Weights) -> None:
    architecture = settings["model_type"]
    for ours, key in _sizes(architecture).items():
        value, name = settings[ours], key.format(arch=architecture)
        writer.add_float32(name, value) if isinstance(value, float) else writer.add_uint32(name, value)
    if architecture == "gpt2":
        return
    writer.add_value_length(settings["head_dim"])
    writer.add_rope_dimension_count(settings["head_dim"])
    writer.add_rope_freq_base(rope_of(settings).get("rope_theta", 10_000.0))
    if architecture == "apertus":
        for parameter, (key, squared) in _XIELU.items():
            names = (f"model.layers.{n}.mlp.act_fn.{parameter}" for n in range(settings["num_hidden_layers"]))
            learned = settings["hidden_act"] == "xielu"
            writer.add_array(key, [float(weights[name]) if learned else squared for name in names])


def _names(settings: Mapping[str, Any]) -> dict[str, str]:
    """Modules by Hugging Face's names, and llama.cpp's of the same."""
    architecture, layers = settings["model_type"], settings["n_layer" if "n_layer" in settings else "num_hidden_layers"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, layers)
    return {module: name for module in module_names(architecture, layers) if (name := table.get_name(module))}


def _renamed(settings: Mapping[str, Any], weights: Weights) -> Weights:
    names, tensors = _names(settings), {}
    for theirs, tensor in weights.items():
        module, _, kind = theirs.rpartition(".")
        if module.endswith(".act_fn") or (module == "lm_head" and settings.get("tie_word_embeddings")):
            continue
        if module not in names:
            raise ConfigError(f"the weight {theirs} has no place in llama.cpp's {settings['model_type']}.")
        tensors[f"{names[module]}.{kind}"] = _to_file(theirs, tensor.detach(), settings)
    return tensors


def _to_file(name: str, tensor: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """A weight as llama.cpp lays it out: (out, in), and Llama's rotary pairs beside each other."""
    if settings["model_type"] == "gpt2":
        return tensor.T if TRANSPOSED.search(name) else tensor
    if (heads := _rotated_heads(name, settings)) is None:
        return tensor
    return tensor.reshape(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


def _from_file(name: str, tensor: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """The inverse."""
    if (heads := _rotated_heads(name, settings)) is None:
        return _to_file(name, tensor, settings).contiguous()
    return tensor.reshape(heads, -1, 2, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


def _rotated_heads(name: str, settings: Mapping[str, Any]) -> int | None:
    """Heads of a matrix whose rows llama.cpp rotates in pairs; None of any other."""
    if settings["model_type"] != "llama":
        return None
    if name.endswith("q_proj.weight"):
        return int(settings["num_attention_heads"])
    return int(settings["num_key_value_heads"]) if name.endswith("k_proj.weight") else None


def _encoding(name: str, tensor: torch.Tensor, kind: GGUFType) -> Encoding:
    if tensor.ndim < 2 or name == _POSITIONS:  # which llama.cpp adds to others in f32
        return Encoding.F32
    wanted = TYPES[kind][0]
    return wanted if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else Encoding.F16


def _encoded(name: str, tensor: torch.Tensor, encoding: Encoding) -> np.ndarray:
    values = tensor.float().cpu().contiguous().numpy()
    if encoding == Encoding.F16 and not np.all(np.abs(values) <= np.finfo(np.float16).max):
        raise ConfigError(f"{name} has values that f16 cannot hold; choose --type bf16.")
    return np.asarray(gguf.quants.quantize(values, encoding))


def _shortest(value: Any) -> Any:
    """A number that was stored in fp32 as it was written: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
