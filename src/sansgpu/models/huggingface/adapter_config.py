"""Reads and writes the adapter_config.json of peft's adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.wording import shown
from sansgpu.files.reading import read_object
from sansgpu.models.formats.folders import (
    ADAPTER_CONFIG,
    DECODER_CLASSES,
    add_base,
    auto_mapping_of,
    base_of,
    validate_model_folder,
)
from sansgpu.models.huggingface.source import library_errors

if TYPE_CHECKING:  # peft takes a second to import, and transformers takes seconds
    from peft import LoraConfig
    from transformers import PreTrainedModel

# peft's `task_type` -> ends of the names of transformers' classes for it.
_CLASSES = {
    "CAUSAL_LM": DECODER_CLASSES,
    "SEQ_CLS": ("ForSequenceClassification",),
    "TOKEN_CLS": ("ForTokenClassification",),
    "QUESTION_ANS": ("ForQuestionAnswering",),
}
# Settings of LoRA that change more than the adapted layers, or that training does not support. They must be unset.
_NOT_CONTINUED = (
    "alora_invocation_tokens", "layer_replication", "target_parameters", "trainable_token_indices", "use_bdlora",
)  # fmt: skip
_CHANGES_THE_BASE = ("corda", "loftq", "olora", "pissa")  # values of init_lora_weights


def require_lora(folder: Path, loaded: PreTrainedModel) -> None:
    """Raises ConfigError if a folder's adapter is not LoRA or DoRA, or was trained for another class of model."""
    validate_model_folder(folder)
    settings, name = read_object(folder / ADAPTER_CONFIG), type(loaded).__name__
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{folder} contains an adapter of type {shown(kind)}, but sansgpu supports only LoRA and DoRA; merge it "
            "into its base model with peft, and pass the merged model."
        )
    trained = auto_mapping_of(settings).get("base_model_class")
    ends = _CLASSES.get(str(settings.get("task_type")), () if trained is None else (str(trained),))
    if ends and not name.endswith(ends):
        raise ConfigError(
            f"{folder} contains an adapter for {shown(trained or settings['task_type'])}, but this command needs one "
            f"for {name}; choose another adapter or task."
        )


def stored_lora_config(folder: Path, loaded: PreTrainedModel, new_heads: Sequence[str] | None) -> LoraConfig:
    """Reads the configuration of an adapter that is to be trained further with the model `loaded`.

    `new_heads` are the modules that must be trained, too. Raises ConfigError if sansgpu cannot train the adapter.
    """
    from peft import LoraConfig

    settings = read_object(folder / ADAPTER_CONFIG)
    used = [key for key in _NOT_CONTINUED if settings.get(key)]
    used += ["bias"] if settings.get("bias", "none") != "none" else []
    started = str(settings.get("init_lora_weights")).lower()
    used += ["init_lora_weights"] if started.startswith(_CHANGES_THE_BASE) else []
    used += ["modules_to_save"] if sorted(settings.get("modules_to_save") or ()) != sorted(new_heads or ()) else []
    if used:
        raise ConfigError(
            f"{folder} has an adapter with {used[0]} {shown(settings.get(used[0]))}, which sansgpu cannot train; set "
            "model.adapter to lora, which merges it and trains a new adapter."
        )
    if not isinstance(rank := settings.get("r"), int) or not isinstance(settings.get("lora_alpha"), (int, float)):
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} has the rank {shown(rank)}, or no lora_alpha; set r and lora_alpha to numbers."
        )
    before, now = auto_mapping_of(settings).get("labels"), list((loaded.config.id2label or {}).values())
    if before is not None and before != now:
        raise ConfigError(
            f"{folder} has an adapter with the labels {shown(before)}, but the data has {shown(now)}; set data.labels "
            "to those of the adapter."
        )
    with library_errors(f"{folder / ADAPTER_CONFIG} cannot be used"):
        found: LoraConfig = LoraConfig.from_pretrained(str(folder))
        found.inference_mode = False
    return found


def write_adapter_config(folder: Path, model: ModelConfig, labels: Sequence[str], problem_type: str | None) -> None:
    """Completes the file that peft has written to a folder: adds the base model, and the labels of a classifier.

    `model` is the configuration with which the adapter was trained.
    """
    settings = read_object(folder / ADAPTER_CONFIG)
    add_base(settings, base_of(model) or model)
    settings["inference_mode"] = True
    if labels:
        settings["auto_mapping"] |= {"labels": list(labels), "problem_type": problem_type}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
