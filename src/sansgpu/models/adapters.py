"""Adds, merges and saves adapters with peft."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.models.folder_writer import write_folder_atomically
from sansgpu.models.pretrained import is_inside, plain_name, save_tokenizer, seeded
from sansgpu.models.quantized_layers import QuantizedLinear, dequantize_layer, restore_conv1d
from sansgpu.models.stored_weights import StoredTensor, as_stored

if TYPE_CHECKING:  # functions import transformers when they need it, because that takes seconds
    from transformers import PreTrainedModel

# Ends of the names of models whose head is made for the task, so that it is trained even beside an adapter.
HEADS_OF_TASKS = ("QuestionAnswering", "SequenceClassification", "TokenClassification")


def add_adapter(loaded: PreTrainedModel, model: ModelConfig, seed: int) -> Any:
    """Wraps a model in a trainable LoRA or DoRA adapter (arXiv 2106.09685, 2402.09353). A new head is trained, too."""
    from peft import LoraConfig, get_peft_model  # takes a second to import, and full fine-tuning does not need it

    heads = {name.split(".")[0]: None for name, _ in loaded.named_parameters() if not is_inside(loaded, name)}
    trained_heads = list(heads) if type(loaded).__name__.endswith(HEADS_OF_TASKS) else None
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=cast(Any, model.lora_alpha),  # annotated int, but floats work
        lora_dropout=model.lora_dropout,
        target_modules=model.lora_targets,
        use_dora=model.adapter == "dora",
        modules_to_save=trained_heads,
    )
    try:
        with seeded(seed, "adapter"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft warns that it corrects this setting
            return get_peft_model(loaded, config)
    except ValueError as error:
        raise ConfigError(f"model.lora_targets: {' '.join(str(error).split())[:300]}") from None


def merge_adapter(adapted: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Merges the adapter into the weights in fp32, rounding once to `dtype`; returns the model without the adapter."""
    for layer in _adapted_layers(adapted).values():  # one by one, because the model in fp32 may not fit into memory
        weight, base = _merged_weight(layer).to(dtype), layer.get_base_layer()
        if isinstance(base, QuantizedLinear):
            dequantize_layer(base, weight)
        base.weight.data = weight
    plain: PreTrainedModel = adapted.unload()
    for module in plain.modules():
        if isinstance(module, QuantizedLinear):  # it has no adapter
            dequantize_layer(module, module.dequantize(dtype))
        if getattr(module, "transposed", False):
            restore_conv1d(module)
    plain.to(dtype)  # type: ignore[arg-type]
    return plain


def merged_tensors(adapted: Any) -> dict[str, StoredTensor]:
    """Returns the tensors of a model with its adapter merged in; those of linear layers are computed when read."""
    model = adapted.get_base_model()
    found = {plain_name(name): as_stored(t) for name, t in model.state_dict().items() if "lora_" not in name}
    layers = _adapted_layers(model)
    for name, module in model.named_modules():
        if name in layers:
            base = layers[name].get_base_layer()
            found[f"{name}.weight"] = _in_own_layout(base, partial(_merged_weight, layers[name]))
        elif isinstance(module, QuantizedLinear) and not name.endswith(".base_layer"):
            found[f"{name}.weight"] = _in_own_layout(module, module.dequantize)
    return found


def _in_own_layout(base: Any, read: Callable[[], torch.Tensor]) -> StoredTensor:
    """Returns the weight of a layer in the layout of transformers."""
    if not isinstance(base, QuantizedLinear):
        return StoredTensor(tuple(base.weight.shape), read)
    if base.transposed:
        return StoredTensor((base.in_features, base.out_features), lambda: read().T)
    return StoredTensor((base.out_features, base.in_features), read)


def _adapted_layers(model: Any) -> dict[str, Any]:
    """Returns the layers with an adapter by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, BaseTunerLayer)}


@torch.no_grad()
def _merged_weight(layer: Any) -> torch.Tensor:
    """Returns the fp32 weight of a layer with its adapter merged in; the layer does not change."""
    base = layer.get_base_layer()
    before: nn.Parameter | None = base.weight
    base.weight = nn.Parameter(base.dequantize() if before is None else before.float(), requires_grad=False)
    layer.merge(safe_merge=True)
    merged: torch.Tensor = base.weight.detach()
    base.weight = before
    layer.merged_adapters.clear()
    return merged


def save_adapter(adapted: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the adapter, without its base model, to a folder that peft loads, atomically."""

    def write(partial: Path) -> None:
        for config in adapted.peft_config.values():
            if isinstance(config.target_modules, set):  # its order differs between processes
                config.target_modules = sorted(config.target_modules)
        adapted.save_pretrained(partial, save_embedding_layers=False)
        save_tokenizer(tokenizer, partial)

    write_folder_atomically(folder, write)
