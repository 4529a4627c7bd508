"""Reads models that are split into several GGUF files, and recognizes GGUF files that are not models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gguf import Keys

from sansgpu.config import ConfigError
from sansgpu.config.wording import counted, shown
from sansgpu.models.formats.folders import gguf_parts
from sansgpu.models.formats.gguf_reader import GGUFTensor, read_gguf

_PIECE = re.compile(r"(?P<stem>.*)(\.part\d+of\d+|-split-[a-z]+)")  # names of pieces to join with `cat`
_MODEL = "pass the GGUF file of the model"
_OTHER_KINDS = {  # `general.type` or `general.architecture` of files that are not models: what they are, and advice
    "adapter": ("a LoRA adapter", f"{_MODEL} that it was trained on, or the adapter as a folder of peft"),
    "imatrix": ("an importance matrix, which llama.cpp uses to quantize a model", _MODEL),
    "mmproj": ("a projector of images or audio for a model (mmproj)", f"{_MODEL} itself"),
    "clip": ("a projector of images or audio for a model (mmproj)", f"{_MODEL} itself"),
    "controlvector": ("a control vector", f"{_MODEL} that it was made for"),
    "vocab": ("only a vocabulary", _MODEL),
}


def read_model(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns the metadata and tensors of a model, of which `path` is the only file or one of several parts.

    Raises ConfigError if the file is damaged or not a model, or if another part is missing.
    """
    metadata, tensors = _read(path)
    count = metadata.get(Keys.Split.LLM_KV_SPLIT_COUNT, 1)
    if isinstance(count, int) and count > 1:
        metadata, tensors = _read_parts(path, metadata, count)
    kinds = (metadata.get(Keys.General.TYPE), metadata.get(Keys.General.ARCHITECTURE))
    if (kind := next((str(one) for one in kinds if str(one) in _OTHER_KINDS), None)) is not None:
        name, advice = _OTHER_KINDS[kind]
        raise ConfigError(f"{path} is not a model, but {name}; {advice}.")
    if not tensors:
        raise ConfigError(f"{path} has no weights, only metadata; {_MODEL} with its weights.")
    return metadata, tensors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        return read_gguf(path)
    except (ValueError, OSError) as error:
        if (piece := _PIECE.fullmatch(path.name)) is not None:
            stem = piece["stem"]
            raise ConfigError(
                f"{path} is a piece of a GGUF file; download all pieces and join them: cat {stem}?* > {stem}."
            ) from None
        raise ConfigError(f"{path} is a damaged GGUF file ({error}); download or export it again.") from None


def _read_parts(path: Path, metadata: dict[str, Any], count: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Returns the metadata of all parts, most of which are in the first one, and the tensors of all parts."""
    index, parts = metadata.get(Keys.Split.LLM_KV_SPLIT_NO), gguf_parts(path)
    number = index + 1 if isinstance(index, int) else 0
    if len(parts) != count or number > count or parts[number - 1] != path:
        raise ConfigError(
            f"{path} is part {number} of {count} of a model, but its name does not say so; name all parts like "
            f"model-{number:05}-of-{count:05}.gguf."
        )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(
            f"{path} is part {number} of {count} of a model, and {counted(len(missing), 'part is', 'parts are')} "
            f"missing beside it; download {missing[0]}{' and the others' * (len(missing) > 1)}."
        )
    whole: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for index, part in enumerate(parts):
        own, found = _read(part)
        if (own.get(Keys.Split.LLM_KV_SPLIT_NO), own.get(Keys.Split.LLM_KV_SPLIT_COUNT)) != (index, count):
            raise ConfigError(f"{part} is not part {index + 1} of {count}, as its name says; download it again.")
        if twice := next(iter(tensors.keys() & found.keys()), None):
            raise ConfigError(f"{part} contains {twice[:80]}, which another part has, too; download all parts again.")
        whole, tensors = {**own, **whole}, {**tensors, **found}
    if (wanted := whole.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)) != len(tensors):
        raise ConfigError(
            f"{path}: its {count} parts have {len(tensors):,} tensors instead of {shown(wanted)}, so they belong to "
            "different models; download all parts again."
        )
    return whole, tensors
