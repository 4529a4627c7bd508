"""Chooses and computes the encodings of tensors in a GGUF file that is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Encoding
from gguf import LlamaFileType

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted
from sansgpu.kernels.block_quantization import FORMATS, SMALLER_BLOCKS, quantize_rows

GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k", "q4_1", "q4_0"]
TYPES: dict[GGUFType, tuple[Encoding, LlamaFileType]] = {  # encodings of matrices; vectors are always f32
    "f32": (Encoding.F32, LlamaFileType.ALL_F32),
    "f16": (Encoding.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (Encoding.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (Encoding.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q6_k": (Encoding.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "q4_k": (Encoding.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    "q4_1": (Encoding.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (Encoding.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
EMBEDDING, HEAD, POSITIONS = "token_embd.weight", "output.weight", "position_embd.weight"
_ENCODED_VALUES = 1 << 24  # converted to fp32 at a time, because a vocabulary may have a billion values


class EncodingChoice(NamedTuple):
    """The encoding of a tensor, and the one that it would have if its rows were whole blocks of it."""

    used: Encoding
    wanted: Encoding


def encoding_of(name: str, shape: Sequence[int], kind: GGUFType, is_head: bool) -> EncodingChoice:
    """Chooses the encoding of a tensor. A head is q6_k in files of 4 bits, as llama.cpp makes them."""
    if len(shape) < 2 or name == POSITIONS:  # llama.cpp adds these to activations in f32
        return EncodingChoice(Encoding.F32, Encoding.F32)
    wanted = Encoding.Q6_K if is_head and kind.startswith("q4") else TYPES[kind][0]
    smaller = SMALLER_BLOCKS.get(wanted.name.lower())
    tried = (wanted,) if smaller is None else (wanted, FORMATS[smaller].encoding)
    whole = (e for e in tried if shape[-1] % gguf.GGML_QUANT_SIZES[e][0] == 0)
    return EncodingChoice(next(whole, Encoding.F16), wanted)


def describe_substitutes(choices: Mapping[str, EncodingChoice]) -> str | None:
    """Returns a sentence about the matrices that do not have the wanted encoding, or None if all have it."""
    replaced = {name: choice for name, choice in choices.items() if choice.used != choice.wanted}
    if not replaced:
        return None
    counts = Counter((choice.used.name.lower(), choice.wanted.name.lower()) for choice in replaced.values())
    parts = [f"{count:,} as {used} instead of {wanted}" for (used, wanted), count in counts.items()]
    return (
        f"{counted(len(replaced), 'matrix is', 'matrices are')} stored in another type, because their rows are not "
        f"whole blocks of the usual one: {' and '.join(parts)}; the first is {next(iter(replaced))}."
    )


def encode(name: str, tensor: torch.Tensor, encoding: Encoding) -> np.ndarray:
    """Returns the bytes of a tensor in a file. Raises ConfigError if the file cannot hold its values."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    parts = rows.split(max(1, _ENCODED_VALUES // max(1, rows.shape[1])))
    encoded = np.concatenate([_encoded(name, part.float().cpu().contiguous(), encoding) for part in parts])
    return encoded.reshape(*tensor.shape[:-1], encoded.shape[-1])


def _encoded(name: str, values: torch.Tensor, encoding: Encoding) -> np.ndarray:
    if not values.isfinite().all():
        raise ConfigError(f"{name} has values that are NaN or infinite; export another snapshot or model.")
    if encoding.name.lower() in FORMATS:
        return quantize_rows(values, FORMATS[encoding.name.lower()]).numpy()
    array = values.numpy()
    if encoding == Encoding.F16 and not np.all(np.abs(array) <= np.finfo(np.float16).max):
        raise ConfigError(f"{name} has values that f16 cannot hold; choose --type bf16.")
    return np.asarray(gguf.quants.quantize(array, encoding))
