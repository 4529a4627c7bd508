"""Completes the weights of a model that transformers has loaded, and checks that its files have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.models.huggingface.source import stored_weights

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

# First parts of the names of heads in models whose other weights are not in one module.
_HEADS = ("classification_head", "classifier", "qa_outputs", "score")


def require_weights(loaded: PreTrainedModel, model: ModelConfig, new: set[str], allows_new_head: bool) -> None:
    """Raises ConfigError if the `new` weights, which the model's files lack, are more than a pooler or a new head."""
    missing = sorted(key for key in new if not (allows_new_head and _may_be_new(loaded, key)))
    if not missing:
        return
    name, kind = model.name_or_path, type(loaded).__name__
    if all(parameter in new for parameter, _ in loaded.named_parameters()):
        raise ConfigError(
            f"{name} has none of the weights of a {kind}, which transformers names in a different way; choose another "
            "model or task."
        )
    if all("decoder" in key.split(".") for key in missing):
        raise ConfigError(
            f"{name} contains only an encoder, but a {kind} also has a decoder; choose another model or task."
        )
    raise ConfigError(
        f"{name}: the weights do not match config.json, because {missing[0]} is missing or has a different shape; "
        "download or export the model again."
    )


def keep_rows_of_labels(
    loaded: PreTrainedModel, model: ModelConfig, known: Sequence[str], labels: Sequence[str]
) -> None:
    """Copies the rows of the stored head to the labels of the same name, if a classifier's labels change."""
    kept = [(row, known.index(name)) for row, name in enumerate(labels) if name in known]
    if tuple(known) == tuple(labels) or not kept:
        return
    rows, stored_rows = map(list, zip(*kept, strict=True))
    try:
        stored = stored_weights(model)
    except ConfigError:
        raise ConfigError(
            f"{model.name_or_path} has no model.safetensors, from which its labels {', '.join(known)} could be kept; "
            "save the model with transformers, or rename the labels to train a new head."
        ) from None
    with torch.no_grad():
        for name, parameter in loaded.named_parameters():
            before = stored.get(name)
            if is_inside(loaded, name) or before is None or before.shape != (len(known), *parameter.shape[1:]):
                continue
            if len(parameter) == len(labels):
                parameter[rows] = before.read().to(parameter.dtype)[stored_rows]


def is_inside(loaded: PreTrainedModel, name: str) -> bool:
    """Returns False for weights of a model's head, by name."""
    if loaded.base_model is loaded:
        return name.partition(".")[0] not in _HEADS
    return name.startswith(loaded.base_model_prefix + ".")


def _may_be_new(loaded: PreTrainedModel, name: str) -> bool:
    """Returns True for weights of the head and the pooler, which a pretrained model may not have."""
    return "pooler." in name or not is_inside(loaded, name)
