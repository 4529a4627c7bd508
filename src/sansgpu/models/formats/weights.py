"""Reads the weights of models one tensor at a time, and can quantize them on the way.

transformers first loads placeholders without memory. It checks their names and shapes, and initializes new heads. Then
`fill` replaces each placeholder with the stored tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.wording import truncate
from sansgpu.kernels.block_quantization import (
    FORMATS,
    WRITTEN,
    BlockFormat,
    Matrix,
    QuantizedWeight,
    format_for,
    quantize_rows,
)
from sansgpu.models.formats.safetensors_file import open_weights
from sansgpu.models.modules import INIT_STD
from sansgpu.models.quantized_layers import QuantizableMatrix, is_transposed, quantizable_matrices

BasePrecision = Literal["file", "bf16", "int8", "int4"]  # "file" keeps the quantization of a GGUF file
REQUANTIZED: Literal["int8"] = "int8"  # replaces quantizations of GGUF files for which there is no kernel
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # the data types that weights of a run may have
_RANDOM_ROWS = 16  # distinct quantized rows of a random weight, which repeats them


def set_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: Path, assign: bool = False) -> None:
    """Loads `weights` into a model. Raises ConfigError, naming their `source`, if they do not fit."""
    if odd := [name for name, weight in weights.items() if weight.is_floating_point() and weight.dtype not in _DTYPES]:
        raise ConfigError(
            f"{source} has the weight {odd[0]} in {str(weights[odd[0]].dtype).removeprefix('torch.')}, which cannot be "
            "computed with; train or export it again."
        )
    try:
        model.load_state_dict(weights, assign=assign)
    except (RuntimeError, TypeError) as error:
        reason = truncate(" ".join(str(error).split()))
        raise ConfigError(
            f"{source} does not match the model ({reason.removesuffix('.')}); train or export it again."
        ) from None


def weights_sha256(model: nn.Module) -> str:
    """Returns a hash of all weights in memory. It uses torch's threads, and is faster than reading a model."""
    tensors = dict(model.state_dict())
    for name, module in model.named_modules():
        quantized = {key: value for key, value in vars(module).items() if isinstance(value, QuantizedWeight)}
        tensors |= {f"{name}.{key} {value.format.name}": value.data for key, value in quantized.items()}
    names = sorted(tensors)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        hashes = pool.map(lambda name: _sha256(name, tensors[name]), names)
        return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _sha256(name: str, tensor: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a model's files that is read on demand, in transformers' layout.

    `blocks` returns a quantized matrix (outputs, inputs) as it is stored. It is None if the matrix is not quantized, or
    if there is no kernel for its quantization.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    blocks: Callable[[], QuantizedWeight] | None = None
    quantized_as: str | None = None  # name of the quantization, such as q4_k; None: not quantized


def as_stored(tensor: torch.Tensor | StoredTensor) -> StoredTensor:
    """Wraps a tensor in memory as a StoredTensor."""
    return tensor if isinstance(tensor, StoredTensor) else StoredTensor(tuple(tensor.shape), lambda: tensor)


def safetensors_weights(files: list[Path]) -> dict[str, StoredTensor]:
    """Returns the tensors of safetensors files by name. Raises ConfigError if a file is damaged."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        with open_weights(file) as opened:
            for name in opened.keys():  # noqa: SIM118  not a dict
                found[name] = StoredTensor(tuple(opened.get_slice(name).get_shape()), partial(_read, file, name))
    return found


def _read(file: Path, name: str) -> torch.Tensor:
    """Memory-maps the file for this tensor alone, so that freeing the tensor frees the pages that were read."""
    with open_weights(file) as opened:
        tensor: torch.Tensor = opened.get_tensor(name)
    return tensor


def format_of(
    precision: BasePrecision, inputs: int, quantized_as: str | None, is_table: bool = False
) -> BlockFormat | None:
    """Returns the quantized format in which to keep a matrix in memory; None if it is not quantized.

    The matrix has rows of `inputs` values, and is stored as `quantized_as`.
    """
    if precision == "bf16" or (precision == "file" and quantized_as is None):
        return None
    known = FORMATS.get(str(quantized_as)) if precision == "file" else None
    return known or format_for(REQUANTIZED if precision == "file" else precision, inputs, is_table)


@dataclass(frozen=True)
class MatrixFormat:
    """The shape of a matrix, and the quantized format in which it is kept in memory."""

    outputs: int
    inputs: int
    format: BlockFormat
    is_table: bool

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    @property
    def bytes(self) -> int:
        return self.outputs * self.format.row_bytes(self.inputs)


def matrix_formats(
    model: nn.Module, precision: BasePrecision, stored: Mapping[str, StoredTensor]
) -> dict[str, MatrixFormat]:
    """Returns the format of each matrix of a model that is quantized in memory, by name.

    `stored` are the tensors of a GGUF file. Layers that the file does not have get the first of its quantizations that
    sansgpu writes.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = [tensor.quantized_as for tensor in stored.values() if tensor.quantized_as]
    usual = next((kind for kind in kinds if kind in WRITTEN), REQUANTIZED if kinds else None)
    found: dict[str, MatrixFormat] = {}
    for key, matrix in quantizable_matrices(model).items():
        name, (outputs, inputs) = names[key], matrix.shape
        quantized_as = stored[name].quantized_as if name in stored else usual
        chosen = format_of(precision, inputs, quantized_as, matrix.is_table)
        if chosen is not None:
            found[name] = MatrixFormat(outputs, inputs, chosen, matrix.is_table)
    return found


def random_weights(
    model: nn.Module, precision: BasePrecision, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns quantized weights, random ones if sansgpu can write the format, for the matrices of `matrix_formats`."""
    found: dict[str, StoredTensor] = {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, matrix in matrix_formats(model, precision, stored).items():
        blocks = partial(_random_blocks, matrix)
        found[name] = StoredTensor(shapes[name], partial(torch.zeros, shapes[name]), blocks, matrix.format.name)
    return found


def _random_blocks(matrix: MatrixFormat) -> QuantizedWeight:
    if matrix.format.name not in WRITTEN:
        return QuantizedWeight(
            torch.zeros(matrix.outputs, matrix.bytes // matrix.outputs, dtype=torch.uint8), matrix.format
        )
    generator = torch.Generator().manual_seed(0)
    rows = quantize_rows(torch.randn(_RANDOM_ROWS, matrix.inputs, generator=generator) * INIT_STD, matrix.format)
    repeated = rows.repeat(-(-matrix.outputs // _RANDOM_ROWS), 1)[: matrix.outputs]
    return QuantizedWeight(repeated.contiguous(), matrix.format)


def placeholders(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns a tensor of the same shape for each stored one, without allocating memory for its values."""
    return {name: torch.empty((), dtype=dtype).expand(tensor.shape) for name, tensor in stored.items()}


def merged_sources(
    model: nn.Module, stored: Mapping[str, StoredTensor], given: Mapping[str, torch.Tensor], new: set[str]
) -> set[str]:
    """Returns the names of stored tensors that transformers merges into other weights, such as one tensor per expert.

    Empty if each weight of the model, except the `new` ones, is a stored tensor whose placeholder is in `given`.
    """
    sources = _sources(model, stored, given, new)
    if None not in sources.values():
        return set()
    taken = {id(source) for source in sources.values()}
    return {name for name in given if id(stored[name]) not in taken}


def _sources(
    model: nn.Module, stored: Mapping[str, StoredTensor], given: Mapping[str, torch.Tensor], new: set[str]
) -> dict[str, StoredTensor | None]:
    """Returns the stored tensor of each weight by name, without `new` ones; None if transformers has computed it."""
    by_place = {tensor.data_ptr(): stored[name] for name, tensor in given.items()}
    found: dict[str, StoredTensor | None] = {}
    for name, tensor in _weights(model).items():
        if name not in new:
            source = by_place.get(tensor.data_ptr()) or stored.get(name)
            found[name] = source if source is not None and source.shape == tuple(tensor.shape) else None
    return found


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters of a model and the buffers that its files contain, by name."""
    persistent = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return dict([*model.named_parameters(), *buffers])


def fill(
    model: nn.Module,
    stored: Mapping[str, StoredTensor],
    given: Mapping[str, torch.Tensor],
    precision: BasePrecision,
    new: set[str],
) -> None:
    """Replaces the placeholders `given` to transformers with the stored tensors.

    Skips `new`, the names of weights that transformers initialized, and weights that it computed from others.
    """
    matrices, weights = quantizable_matrices(model), _weights(model)
    for name, source in _sources(model, stored, given, new).items():
        tensor = weights[name]
        matrix = matrices.get(id(tensor))
        if source is None:
            source = as_stored(tensor.data)
        weight = None if matrix is None else _quantized(source, matrix, precision)
        if matrix is not None and weight is not None:
            matrix.quantize(weight)
        else:
            is_vector = isinstance(tensor, nn.Parameter) and tensor.ndim < 2  # biases and norms compute in fp32
            tensor.data = source.read().to(torch.float32 if is_vector else tensor.dtype, copy=True)


def _quantized(source: StoredTensor, matrix: QuantizableMatrix, precision: BasePrecision) -> QuantizedWeight | None:
    """Returns a matrix in the quantized format in which it is kept; None if it is not quantized."""
    wanted = format_of(precision, matrix.shape[1], source.quantized_as, matrix.is_table)
    return None if wanted is None else _in_blocks(source, wanted, is_transposed(matrix.layers[0]))


def _in_blocks(source: StoredTensor, wanted: BlockFormat, transposed: bool) -> QuantizedWeight:
    if source.blocks is not None and source.quantized_as == wanted.name:
        return source.blocks()
    values = source.read()
    return QuantizedWeight(quantize_rows(values.T if transposed else values, wanted), wanted)


def kept_blocks(source: StoredTensor, transposed: bool) -> Matrix:
    """Returns a quantized tensor of a GGUF file as stored, or requantized if there is no kernel for its quantization.

    Returns other tensors in fp32. `transposed` says that transformers' layout of the tensor is (inputs, outputs).
    """
    if source.quantized_as is None:
        return source.read()
    wanted = format_of("file", source.shape[0 if transposed else -1], source.quantized_as)
    return source.read() if wanted is None else _in_blocks(source, wanted, transposed)


def quantized_matrices(stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    """Returns the quantized matrices of a GGUF file."""
    return [tensor for tensor in stored.values() if tensor.quantized_as]
