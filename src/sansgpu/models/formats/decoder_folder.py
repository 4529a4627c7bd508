"""Loads decoders from Hugging Face folders and GGUF files, and saves them as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from sansgpu.config import ConfigError
from sansgpu.config.schema import Config
from sansgpu.config.section import problems
from sansgpu.config.wording import first_line
from sansgpu.kernels.block_quantization import Matrix, QuantizedWeight
from sansgpu.kernels.norm import LayerNorm, RMSNorm
from sansgpu.models.architectures import ARCHITECTURES, DecoderConfig
from sansgpu.models.decoder import TransformerLM
from sansgpu.models.formats.decoder_weights import from_hugging_face, hugging_face_config, model_config, to_hugging_face
from sansgpu.models.formats.folders import folder_settings, require_layers, write_folder_atomically
from sansgpu.models.formats.gguf_source import is_gguf, open_gguf
from sansgpu.models.formats.safetensors_file import load_weights, readable_weights
from sansgpu.models.formats.tokenizers import TextCodec
from sansgpu.models.quantized_layers import QuantizableMatrix

if TYPE_CHECKING:
    from sansgpu.models.formats.gguf_file import GGUFFile


def export_model(model: TransformerLM, tokenizer: TextCodec, folder: Path) -> None:
    """Writes a folder that AutoModelForCausalLM and AutoTokenizer load, atomically."""
    write_folder_atomically(folder, lambda partial: _write_model(model, tokenizer, partial))


def _write_model(model: TransformerLM, tokenizer: TextCodec, partial: Path) -> None:
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    save_file(to_hugging_face(model.config, weights), partial / "model.safetensors", metadata={"format": "pt"})
    _write_json(partial / "config.json", hugging_face_config(model.config, tokenizer.end_id))
    generation = {"bos_token_id": tokenizer.end_id, "eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.end_id}
    _write_json(partial / "generation_config.json", {**generation, "do_sample": True, "temperature": 0.8})
    tokenizer.save(partial)


def load_decoder(folder: Path) -> TransformerLM | None:
    """Loads a Hugging Face folder as a TransformerLM; returns None if TransformerLM does not support its architecture.

    Raises ConfigError if the folder holds no model or its weights do not match its config.
    """
    config = decoder_config(folder)
    if config is None:
        return None
    files = sorted(folder.glob("*.safetensors"))
    return _build_decoder(config, {name: tensor for file in files for name, tensor in _fp32_weights(file)}, folder)


def _fp32_weights(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in load_weights(file).items():
        with readable_weights(file):  # torch cannot convert some exotic dtypes to fp32
            converted = tensor.float()
        yield name, converted


def load_gguf_decoder(file: GGUFFile) -> TransformerLM | None:
    """Loads a GGUF file as a TransformerLM; returns None if TransformerLM does not support its architecture.

    Quantized matrices stay quantized, so the model cannot be trained. The norms may have any epsilon. Raises
    ConfigError like `load_decoder`.
    """
    name, key = file.settings["model_type"], file.epsilon_key
    if name not in ARCHITECTURES:
        return None
    config = _config_from({**file.settings, key: ARCHITECTURES[name].norm_eps}, file.path)
    if config is None:
        return None
    model = _build_decoder(config, file.matrices(), file.path)
    for module in model.modules():
        if isinstance(module, (RMSNorm, LayerNorm)):
            module.eps = float(file.settings.get(key, module.eps))
    return model


def _build_decoder(config: DecoderConfig, weights: Mapping[str, Matrix], source: Path) -> TransformerLM:
    require_layers(config.n_layers, len(weights), source)
    try:
        model = TransformerLM(config, seed=None)
        plain = {name: _plain(model, name, value) for name, value in from_hugging_face(config, weights).items()}
        model.load_state_dict({name: value for name, value in plain.items() if value is not None}, assign=True)
    except (RuntimeError, MemoryError, ValueError, AssertionError, AttributeError, ConfigError) as error:
        reason = " ".join(str(error).split())[:300]  # torch lists every missing weight
        raise ConfigError(
            f"{source}: the weights do not match the model's config ({reason.removesuffix('.')}); download or "
            "export it again."
        ) from None
    return model


def _plain(model: TransformerLM, name: str, value: Matrix) -> torch.Tensor | None:
    """Returns a weight to load. Puts a quantized weight into its layer instead and returns None."""
    if not isinstance(value, QuantizedWeight):
        return value
    layer: Any = model.get_submodule(name.removesuffix(".weight"))
    if layer is model.position:  # position embeddings are added, and quantized weights are only for matmuls
        return value.dequantized(torch.float32)
    if tuple(layer.weight.shape) != (value.outputs, value.inputs):
        raise ValueError(f"{name} has shape {(value.outputs, value.inputs)}, expected {tuple(layer.weight.shape)}")
    QuantizableMatrix((layer,), is_table=False).quantize(value)
    return None


def decoder_config(source: Path) -> DecoderConfig | None:
    """Reads the model configuration of a Hugging Face folder or GGUF file; None for an unsupported architecture.

    Raises ConfigError if `source` is not a model.
    """
    if is_gguf(str(source)):
        return _config_from(open_gguf(source).settings, source)
    if not (source / "config.json").exists():
        raise ConfigError(
            f"{source} is not a Hugging Face model folder: it has no config.json; pass the folder that contains it."
        )
    return _config_from(folder_settings(source), source)


def _config_from(settings: dict[str, Any], source: Path) -> DecoderConfig | None:
    try:
        return model_config(settings)
    except KeyError as error:
        raise ConfigError(f"{source}: config.json has no {error.args[0]}; save the model again.") from None
    except ValidationError as error:
        raise ConfigError(
            f"{source}: config.json is not valid ({'; '.join(problems(error, Config))}); correct these values."
        ) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{source}: config.json has a value of an unexpected type ({first_line(error)}); download the model again."
        ) from None


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
