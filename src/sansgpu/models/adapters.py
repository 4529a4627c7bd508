"""Adds, merges and saves adapters with peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.models.folder_writer import write_folder_atomically
from sansgpu.models.pretrained import is_inside, save_tokenizer, seeded
from sansgpu.models.quantized_layers import QuantizedLinear, dequantize_layer, restore_conv1d

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
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):  # layer by layer, because the full model in fp32 may not fit into memory
            base: Any = layer.get_base_layer()
            if isinstance(base, QuantizedLinear):
                dequantize_layer(base, torch.float32)
            base.float()
            layer.merge(safe_merge=True)
            base.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*adapters.*merged")
        plain: PreTrainedModel = adapted.merge_and_unload()
    for layer in plain.modules():
        if isinstance(layer, QuantizedLinear):  # without an adapter
            dequantize_layer(layer, dtype)
        if getattr(layer, "transposed", False):
            restore_conv1d(layer)
    plain.to(dtype)  # type: ignore[arg-type]
    return plain


def save_adapter(adapted: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the adapter, without its base model, to a folder that peft loads, atomically."""

    def write(partial: Path) -> None:
        for config in adapted.peft_config.values():
            if isinstance(config.target_modules, set):  # its order differs between processes
                config.target_modules = sorted(config.target_modules)
        adapted.save_pretrained(partial, save_embedding_layers=False)
        save_tokenizer(tokenizer, partial)

    write_folder_atomically(folder, write)
