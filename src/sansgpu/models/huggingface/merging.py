"""Merges peft's adapters into the weights of their base models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.models.formats.folders import base_of
from sansgpu.models.formats.weights import StoredTensor, as_stored
from sansgpu.models.huggingface.pretrained import Head, meta_model, plain_name
from sansgpu.models.quantized_layers import QuantizedLayer, dequantize_layer, dequantize_layers, restore_conv1d

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


def merge_adapter(adapted: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Merges the adapter into the weights in fp32, rounds once to `dtype` and returns the plain model.

    A tied embedding and output head are separated if the adapter makes them differ. A layer without a bias gets one if
    the adapter has a bias for it.
    """
    for layer in adapted_layers(adapted).values():  # one by one, because the model in fp32 may not fit into memory
        base = layer.get_base_layer()
        merged = _merged(layer)
        weight = nn.Parameter(merged["weight"].to(dtype), requires_grad=False)
        if isinstance(base, QuantizedLayer):
            dequantize_layer(base, weight)
        base.weight = weight  # a new parameter, because another layer may share the current one
        if "bias" in merged:
            base.bias = nn.Parameter(merged["bias"], requires_grad=False)
    plain: PreTrainedModel = adapted.unload()
    dequantize_layers(plain, dtype)
    for module in plain.modules():
        if getattr(module, "transposed", False):
            restore_conv1d(module)
    plain.to(dtype)  # type: ignore[arg-type]
    _tie_if_equal(plain)
    return plain


def _tie_if_equal(model: PreTrainedModel) -> None:
    """Ties the embedding and the output head of a model that had them tied, or sets in its config that they differ."""
    settings, embedding, head = model.config.get_text_config(), model.get_input_embeddings(), None
    if getattr(settings, "tie_word_embeddings", False):
        head = model.get_output_embeddings()
    if head is None or embedding is None or head.weight is embedding.weight:
        return
    if torch.equal(cast(Any, head.weight), cast(Any, embedding.weight)):
        head.weight = embedding.weight
    else:
        settings.tie_word_embeddings = model.config.tie_word_embeddings = False


def merged_tensors(adapted: Any) -> dict[str, StoredTensor]:
    """Returns the tensors of a model with its adapter merged in. Weights with an adapter are merged when read."""
    model = adapted.get_base_model()
    found = {plain_name(name): as_stored(t) for name, t in model.state_dict().items() if "lora_" not in name}
    layers = adapted_layers(model)
    for name, module in model.named_modules():
        if name in layers:
            layer = layers[name]
            found[f"{name}.weight"] = _in_own_layout(layer.get_base_layer(), partial(_merged_weight, layer))
            if has_bias(layer):
                found[f"{name}.bias"] = as_stored(_merged(layer)["bias"])
        elif isinstance(module, QuantizedLayer) and not name.endswith(".base_layer"):
            found[f"{name}.weight"] = _in_own_layout(module, module.dequantize)
    return found


def _in_own_layout(base: Any, read: Callable[[], torch.Tensor]) -> StoredTensor:
    """Returns the weight of a layer, which `read` gives as (outputs, inputs) if quantized, in transformers' layout."""
    if not isinstance(base, QuantizedLayer):
        return StoredTensor(tuple(base.weight.shape), read)
    outputs, inputs = base.blocks.outputs, base.blocks.inputs
    if getattr(base, "transposed", False):
        return StoredTensor((inputs, outputs), lambda: read().T)
    return StoredTensor((outputs, inputs), read)


def adapted_layers(model: Any) -> dict[str, Any]:
    """Returns the layers that have an adapter, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


@torch.no_grad()
def _merged(layer: Any) -> dict[str, torch.Tensor]:
    """Returns the fp32 weight of a layer with its adapter merged in, and its bias if the adapter has one.

    Does not change the layer.
    """
    base = layer.get_base_layer()
    before, bias = base.weight, getattr(base, "bias", None)
    base.weight = nn.Parameter(base.dequantize() if before is None else before.float(), requires_grad=False)
    if has_bias(layer):
        base.bias = nn.Parameter(torch.zeros(layer.out_features) if bias is None else bias.float(), requires_grad=False)
    layer.merge(safe_merge=True)
    merged = {"weight": base.weight.detach()}
    base.weight = before
    if has_bias(layer):
        merged["bias"], base.bias = base.bias.detach(), bias
    layer.merged_adapters.clear()
    return merged


def _merged_weight(layer: Any) -> torch.Tensor:
    return _merged(layer)["weight"]


def has_bias(layer: Any) -> bool:
    """Returns True if the adapter of a layer has a bias (`lora_bias`)."""
    return any(getattr(layer, "lora_bias", {}).get(name) for name in layer.active_adapters)


def require_known_biases(names: Iterable[str], model: ModelConfig, head: Head) -> None:
    """Raises ConfigError if an adapter has given biases to layers that have none in the architecture.

    A folder or file with the merged model could not contain them. `names` are the names of the merged tensors.
    """
    if base_of(model) is None:
        return
    known = meta_model(model, head).state_dict()
    added = (name for name in names if name.endswith(".bias") and name not in known)
    if (first := next(added, None)) is not None:
        raise ConfigError(
            f"{model.name_or_path}: merging its adapter (lora_bias) adds {first}, which the model's architecture does "
            "not have; use the adapter without merging it."
        )
