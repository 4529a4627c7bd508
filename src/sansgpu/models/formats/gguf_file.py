"""Reads and writes models as GGUF files, the format of llama.cpp (github.com/ggml-org/ggml/blob/master/docs/gguf.md).

A GGUF file has the same contents as a Hugging Face folder, but under other names. The functions here take and return
Hugging Face's names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding
from gguf import Keys

from sansgpu.config import ConfigError, SansGPUError
from sansgpu.config.wording import truncate
from sansgpu.files.atomic import atomic_write, write_failures_as
from sansgpu.kernels.block_quantization import FORMATS, BlockFormat, Matrix, QuantizedWeight, dequantize_rows
from sansgpu.machine.untrusted.sandbox import is_panic
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_flaw
from sansgpu.models import families
from sansgpu.models.family import TENSOR_NAMES, Family, Settings, Weights
from sansgpu.models.formats.divided_weights import divide, join
from sansgpu.models.formats.folders import require_layers
from sansgpu.models.formats.gguf_layout import from_file, has_own_layout, rows_from_file, to_file
from sansgpu.models.formats.gguf_metadata import (
    language_model_of,
    read_settings,
    require_expressible,
    require_sizes,
    write_settings,
)
from sansgpu.models.formats.gguf_names import gguf_architecture, gguf_names, hugging_face_names, layer_count
from sansgpu.models.formats.gguf_parts import read_model
from sansgpu.models.formats.gguf_reader import (
    EMBEDDING,
    HEAD,
    TYPES,
    EncodingChoice,
    GGUFTensor,
    GGUFType,
    encode,
    encoding_of,
)
from sansgpu.models.formats.gguf_rope import ROPE_TENSORS, rope_tensors
from sansgpu.models.formats.gguf_tokenizer import read_tokenizer, write_tokenizer
from sansgpu.models.formats.tokenizers import TokenizerParts
from sansgpu.models.formats.weights import StoredTensor, as_stored, kept_blocks

# Raised when metadata has unexpected types, or contains JSON that is invalid or nested too deeply.
METADATA_ERRORS = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PLAIN = (Encoding.F32, Encoding.F16, Encoding.BF16, Encoding.F64)  # not quantized


@dataclass(frozen=True)
class ModelDescription:
    """Descriptive metadata of a GGUF file."""

    name: str
    description: str
    dataset: str | None
    base_model: str | None = None


def write_gguf(
    path: Path,
    settings: Settings,
    weights: Mapping[str, torch.Tensor | StoredTensor],
    tokenizer: TokenizerParts,
    gguf_type: GGUFType,
    description: ModelDescription,
) -> dict[str, EncodingChoice]:
    """Writes a model atomically, one tensor at a time. `settings` is the content of its config.json.

    Returns the encoding of each tensor by name. Raises ConfigError if llama.cpp would not compute the same results as
    transformers.
    """
    settings, weights = language_model_of(settings, weights)
    settings = families.with_default_settings(settings)
    require_expressible(settings)
    family = families.get(settings["model_type"])
    tensors = _renamed(settings, weights)
    count = sum(prod(tensor.shape) for tensor in tensors.values())
    if family.gguf_needs_head and HEAD not in tensors:
        tensors[HEAD] = tensors[EMBEDDING]
    tensors |= {name: as_stored(factors) for name, factors in rope_tensors(settings).items()}
    rows = tensors[EMBEDDING].shape[0]
    head = HEAD if HEAD in tensors else EMBEDDING
    choices = {
        name: encoding_of(tensor.shape, gguf_type, name == head, name.endswith(family.gguf_precise))
        for name, tensor in tensors.items()
    }

    def write_metadata(writer: gguf.GGUFWriter) -> None:
        _describe(writer, description, gguf_type, count)
        write_settings(writer, settings, weights)
        writer.add_vocab_size(rows)
        write_tokenizer(writer, tokenizer, rows)

    encodings = {name: choice.used for name, choice in choices.items()}
    write_file(path, gguf_architecture(settings), write_metadata, tensors, encodings)
    return choices


def write_file(
    path: Path,
    architecture: str,
    write_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: Mapping[str, StoredTensor],
    encodings: Mapping[str, Encoding],
) -> None:
    """Writes a file atomically and one tensor at a time, because all together may not fit into memory."""
    with write_failures_as(SansGPUError, path), atomic_write(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        try:
            write_metadata(writer)
            for name, tensor in tensors.items():
                block, size = gguf.GGML_QUANT_SIZES[encodings[name]]
                nbytes = prod(tensor.shape) // block * size
                writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), nbytes, encodings[name])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in tensors.items():
                writer.write_tensor_data(encode(name, tensor.read(), encodings[name]))
        finally:
            writer.close()


def _family_of(path: Path, architecture: str, metadata: Mapping[str, Any]) -> Family:
    """Returns the family of a file with this architecture of llama.cpp. Raises ConfigError if there is none."""
    named = [family for family in families.with_gguf() if family.llama_cpp_name == architecture]
    own = [family for family in named if family.gguf_recognizes is not None and family.gguf_recognizes(metadata)]
    others = [family for family in named if family.gguf_recognizes is None]
    if not named:
        known = ", ".join(dict.fromkeys(family.llama_cpp_name for family in families.with_gguf()))
        raise ConfigError(f"{path} has the unsupported architecture {architecture}; use a model with one of {known}.")
    if not (found := [*own, *others]):
        titles = " or ".join(family.title for family in named)
        raise ConfigError(
            f"{path} has another kind of {architecture} than {titles}, which alone is supported; use such a one."
        )
    return found[0]


class GGUFFile:
    """Reads a model from a GGUF file: its settings, weights and tokenizer, under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata, self._tensors = read_model(path)
        self._architecture = str(self._metadata.get(Keys.General.ARCHITECTURE))
        self._family = _family_of(path, self._architecture, self._metadata)
        try:
            self.settings = self._settings()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except METADATA_ERRORS as error:
            reason = truncate(str(error))
            raise ConfigError(
                f"{path}: the model's metadata are incomplete ({reason} is missing or invalid); download or export it "
                "again."
            ) from None

    @property
    def tokenizer(self) -> TokenizerParts:
        """The file's tokenizer. Raises ConfigError if there is none or it is invalid."""
        try:
            foreign = self._metadata.get(Keys.Tokenizer.HF_JSON)
            flaw = None if foreign is None else tokenizer_flaw(str(foreign))
            parts = None if flaw else read_tokenizer(self._metadata)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        except BaseException as error:  # `tokenizers` raises a bare Exception for invalid merges, or panics in Rust
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ConfigError(
                f"{self.path}: its tokenizer is invalid ({truncate(str(error))}); download or export it again."
            ) from None
        if parts is None:
            raise ConfigError(f"{self.path}: its tokenizer is invalid ({flaw}); download or export it again.")
        return parts

    @property
    def tokenizer_metadata(self) -> dict[str, Any]:
        return {key: value for key, value in self._metadata.items() if key.startswith("tokenizer.")}

    @property
    def has_chat_template(self) -> bool:
        return Keys.Tokenizer.CHAT_TEMPLATE in self._metadata

    def weights(self) -> Weights:
        """Returns all weights in fp32. Raises ConfigError if the name or type of a tensor is not supported."""
        return {name: tensor.read() for name, tensor in self.stored_weights().items()}

    def matrices(self) -> dict[str, Matrix]:
        """Returns the weights, quantized ones without dequantizing them and, if possible, memory-mapped.

        Raises ConfigError like `weights`.
        """
        stored = self.stored_weights()
        return {name: kept_blocks(tensor, self._family.is_transposed(name)) for name, tensor in stored.items()}

    @property
    def epsilon_key(self) -> str:
        """The key in `settings` of the norms' epsilon, such as rms_norm_eps."""
        return self._family.norm_eps[0]

    @property
    def is_quantized(self) -> bool:
        """True if any matrix in the file is quantized."""
        return any(len(tensor.shape) == 2 and tensor.tensor_type not in _PLAIN for tensor in self._tensors.values())

    def stored_weights(self) -> dict[str, StoredTensor]:
        """Returns the tensors, which are read on demand. Raises ConfigError if a name is not supported."""
        names, layers = hugging_face_names(self.settings), layer_count(self.settings)
        found: dict[str, StoredTensor] = {}
        in_settings = rope_tensors(self.settings)
        for name, tensor in self._tensors.items():
            number = _BLOCK.match(name)
            if name in in_settings or (number is not None and int(number[1]) >= layers):
                continue  # blocks after the last one predict several tokens at once; transformers does not have them
            hf_name = names(name)
            if hf_name is None:
                raise ConfigError(
                    f"{self.path}: the weight {name} does not belong to the architecture {self._architecture}; "
                    "download or export the file again."
                )
            found[hf_name] = self._stored(name, hf_name, tensor)
        join(found, self._family.gguf_divided(self.settings), self._family.gguf_alternating_experts)
        if (activation := self._family.gguf_learned_activation) is not None:
            for hf_name, value in activation.read(self._metadata)[1].items():
                found[hf_name] = StoredTensor(tuple(value.shape), partial(torch.clone, value))
        return found

    def _stored(self, name: str, hf_name: str, tensor: GGUFTensor) -> StoredTensor:
        empty = torch.empty(tensor.shape, device="meta")
        try:
            shape, tensor_type = tuple(from_file(hf_name, empty, self.settings).shape), tensor.tensor_type
        except (RuntimeError, IndexError):
            raise ConfigError(
                f"{self.path}: the shape of {name}, {tensor.shape}, does not match its metadata; download or convert "
                "it again."
            ) from None
        if tensor_type in _PLAIN or len(shape) != 2:
            return StoredTensor(shape, partial(self._read, name, hf_name, tensor))
        known = FORMATS.get(tensor_type.name.lower())
        is_kept = known is not None and not has_own_layout(hf_name, self.settings)
        blocks = partial(self._blocks, hf_name, tensor, known) if known is not None and is_kept else None
        return StoredTensor(shape, partial(self._read, name, hf_name, tensor), blocks, tensor_type.name.lower())

    def _read(self, name: str, hf_name: str, tensor: GGUFTensor) -> torch.Tensor:
        """Returns a tensor in fp32 in transformers' layout. Raises ConfigError if its type is not supported."""
        if (known := FORMATS.get(tensor.tensor_type.name.lower())) is not None:
            rows = _as_tensor(tensor.data).flatten(0, -2)
            return from_file(hf_name, dequantize_rows(rows, known).view(tensor.shape), self.settings)
        try:
            values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError:
            encoding = tensor.tensor_type.name
            raise ConfigError(
                f"{self.path}: the tensor {name} has the type {encoding}, which cannot be read; use a file in another "
                "quantization, e.g. Q4_K_M or Q8_0."
            ) from None
        return from_file(hf_name, torch.from_numpy(values), self.settings)

    def _blocks(self, hf_name: str, tensor: GGUFTensor, known: BlockFormat) -> QuantizedWeight:
        """Returns a quantized matrix (outputs, inputs): a view of the mapped file, or a copy with permuted rows."""
        return QuantizedWeight(rows_from_file(hf_name, _as_tensor(tensor.data), self.settings), known)

    def _settings(self) -> dict[str, Any]:
        embedding, head = self._tensors[EMBEDDING], self._tensors.get(HEAD)
        tied = head is None or (self._family.gguf_needs_head and np.array_equal(head.data, embedding.data))
        stored = ((name, self._tensors[name]) for name in ROPE_TENSORS if name in self._tensors)
        rope_factors = {name: tensor.data for name, tensor in stored if tensor.tensor_type == Encoding.F32}
        require_sizes(self._family, self._metadata, {name: t.shape for name, t in self._tensors.items()})
        known = {"vocab_size": embedding.shape[0], "tie_word_embeddings": tied}
        metadata = {**self._metadata, TENSOR_NAMES: self._tensors.keys()}
        settings = read_settings(self._family.model_type, metadata, rope_factors, known)
        require_layers(layer_count(settings), len(self._tensors), "its metadata")
        return settings


def _describe(writer: gguf.GGUFWriter, description: ModelDescription, gguf_type: GGUFType, parameters: int) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_size_label(gguf.size_label(parameters, parameters, 0, 0))
    describe(writer, description, gguf_type)


def describe(writer: gguf.GGUFWriter, description: ModelDescription, gguf_type: GGUFType) -> None:
    """Writes the descriptive metadata that models and adapters share."""
    writer.add_name(description.name)
    writer.add_description(description.description)
    if description.dataset is not None:
        writer.add_dataset_count(1)
        writer.add_dataset_name(0, description.dataset)
    if description.base_model is not None:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, description.base_model)
    writer.add_file_type(TYPES[gguf_type][1])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _renamed(settings: Settings, weights: Mapping[str, torch.Tensor | StoredTensor]) -> dict[str, StoredTensor]:
    """Renames weights to llama.cpp's names and converts them to its layout when they are read."""
    names, family = gguf_names(settings), families.get(settings["model_type"])
    tensors: dict[str, StoredTensor] = {}
    for hf_name, weight in divide(weights, family.gguf_divided(settings), family.gguf_alternating_experts):
        module = hf_name.rpartition(".")[0]
        if module.endswith(".act_fn") or (module == "lm_head" and settings.get("tie_word_embeddings")):
            continue
        name = names(hf_name)
        if name is None:
            raise ConfigError(
                f"llama.cpp's architecture {settings['model_type']} has no weight {hf_name}; use --format hf."
            )
        tensors[name] = _converted_when_read(hf_name, as_stored(weight), settings)
    return tensors


def _converted_when_read(name: str, weight: StoredTensor, settings: Settings) -> StoredTensor:
    shape = to_file(name, torch.empty(weight.shape, device="meta"), settings).shape
    return StoredTensor(tuple(shape), lambda: to_file(name, weight.read().detach(), settings))


def _as_tensor(data: np.ndarray) -> torch.Tensor:
    """Returns a tensor that shares the memory of a read-only array."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(data)
