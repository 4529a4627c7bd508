"""Chooses the layers of a model that get an adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from sansgpu.config import ConfigError, ModelConfig
from sansgpu.config.plain_data import shown

if TYPE_CHECKING:  # its import is slow, and it is optional
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
# Kinds of models whose mixers read the weights of these layers directly, without calling the layers, so an adapter
# beside them would have no effect. peft refuses the first, and adapters of the second get no gradient.
_STATE_SPACE_MODELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_READ_DIRECTLY = ("out_proj", "dt_proj")


def adapter_targets(loaded: PreTrainedModel, asked: list[str] | str) -> list[str] | str:
    """Returns peft's `target_modules` for `model.lora_targets`.

    For `all-linear` these are the linear layers that can have an adapter, by name if some of the model's cannot.
    """
    if asked != ALL_LINEAR:
        return asked
    special = _has_experts(loaded) or _is_state_space_model(loaded)
    return _adaptable_layers(loaded) if special else ALL_LINEAR


def adaptable(loaded: PreTrainedModel) -> str:
    """Returns the names of the layers that can have an adapter, without those of their blocks, for a message."""
    return f"[{','.join(sorted({_last(name) for name in _adaptable_layers(loaded)}))}]"


def require_layers(loaded: PreTrainedModel, model: ModelConfig) -> None:
    """Raises ConfigError if `model.lora_targets` is no regular expression, or names a layer that the model lacks."""
    asked = model.lora_targets
    if asked == ALL_LINEAR:
        return
    names = [name for name, _ in loaded.named_modules()]
    if isinstance(asked, str):
        try:
            missing = [] if any(re.fullmatch(asked, name) for name in names) else [asked]
        except re.error as error:
            raise ConfigError(f"model.lora_targets {shown(asked)} is not a regular expression: {error}.") from None
    else:
        ends = {name[start:] for name in names for start in _starts(name)}
        missing = [name for name in asked if name not in ends]
    if missing or not asked:
        found = f"{model.name_or_path} has no layer {shown(missing[0])}" if missing else "it names no layer"
        raise ConfigError(f"model.lora_targets: {found}; set it to {ALL_LINEAR}, or to some of {adaptable(loaded)}.")


def _starts(name: str) -> list[int]:
    """Returns where the parts of a dotted name start."""
    return [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _linear_layers(loaded: PreTrainedModel) -> list[str]:
    """Returns the names of the linear layers below the head."""
    from transformers.pytorch_utils import Conv1D

    inside = {id(module) for module in loaded.base_model.modules()}
    return [n for n, m in loaded.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and id(m) in inside]


def _adaptable_layers(loaded: PreTrainedModel) -> list[str]:
    names = _without_experts(loaded, _linear_layers(loaded)) if _has_experts(loaded) else _linear_layers(loaded)
    if _is_state_space_model(loaded):
        names = [name for name in names if _last(name) not in _READ_DIRECTLY]
    return names


def _has_experts(loaded: PreTrainedModel) -> bool:
    return any("Experts" in type(module).__name__ for module in loaded.modules())


def _is_state_space_model(loaded: PreTrainedModel) -> bool:
    return loaded.config.get_text_config().model_type in _STATE_SPACE_MODELS


def _without_experts(loaded: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Leaves out the layers in whose place peft would adapt the stacked experts or the router.

    For some mixtures of experts, peft takes the name of a layer such as `gate_proj`, also of one that is no expert,
    for the name that the experts had in an earlier release of transformers. A router that is a linear layer returns
    several tensors, to which the output of an adapter cannot be added.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted: Any = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(converted, model=loaded, conversions=None)
    return [name for name in names if name in converted.target_modules and _last(name) != "router"]
