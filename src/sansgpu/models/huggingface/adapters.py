"""Adds, loads and saves adapters with peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from sansgpu.config import ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.section import AUTO
from sansgpu.config.wording import first_line, shown
from sansgpu.models import families
from sansgpu.models.formats.folders import adapter_folder, base_of, frozen_base, write_folder_atomically
from sansgpu.models.frozen_layers import FrozenLayers
from sansgpu.models.generation.sampling import reading
from sansgpu.models.huggingface.adapter_config import require_lora, stored_lora_config, write_adapter_config
from sansgpu.models.huggingface.loaded_weights import is_inside
from sansgpu.models.huggingface.merging import adapted_layers, has_bias, merge_adapter, require_known_biases
from sansgpu.models.huggingface.pretrained import (
    Head,
    configure_for_training,
    load_pretrained,
    merges_adapter,
    plain_name,
    seeded,
    stored_dtype,
)
from sansgpu.models.huggingface.probes import autocast_of, body_of, probe_tokens, towers_of
from sansgpu.models.huggingface.tokenizer_files import end_ids_of, save_tokenizer
from sansgpu.models.modules import blocks_of
from sansgpu.models.quantized_layers import matrix_of

if TYPE_CHECKING:  # functions import these when they need them, because that takes seconds
    from peft import LoraConfig
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
FROZEN_PROBE = 8  # tokens of the pass that finds what runs before the first trained block


def adapter_targets(loaded: PreTrainedModel, asked: list[str] | str) -> list[str] | str:
    """Returns peft's `target_modules` for `model.lora_targets`.

    For `all-linear`, the result lists the layers by name if some linear layers of the model cannot have an adapter.
    """
    if asked != ALL_LINEAR:
        return asked
    special = _has_experts(loaded) or _lora_excludes(loaded) or towers_of(loaded)
    return _adaptable_layers(loaded) if special else ALL_LINEAR


def adaptable_names(loaded: PreTrainedModel) -> str:
    """Returns the names that `model.lora_targets` may contain, for a message: the last part of each layer's name."""
    return f"[{','.join(sorted({_last_part(name) for name in _adaptable_layers(loaded)}))}]"


def require_lora_targets(loaded: PreTrainedModel, model: ModelConfig) -> None:
    """Raises ConfigError if `model.lora_targets` is an invalid regular expression or names a missing layer.

    Also raises it if the blocks of the model have no linear layers.
    """
    asked = model.lora_targets
    if asked == ALL_LINEAR:
        inside = {id(module) for block in blocks_of(loaded) for module in block.modules()}
        if not any(id(loaded.get_submodule(name)) in inside for name in _adaptable_layers(loaded)):
            raise ConfigError(
                f"model.adapter: the blocks of {model.name_or_path} have no linear layers for an adapter; set "
                "model.adapter to none."
            )
        return
    names = [name for name, _ in loaded.named_modules()]
    if isinstance(asked, str):
        try:
            missing = [] if any(re.fullmatch(asked, name) for name in names) else [asked]
        except re.error as error:
            raise ConfigError(
                f"model.lora_targets {shown(asked)} is not a regular expression ({error}); write one, or a list of "
                "names of layers."
            ) from None
    else:
        ends = {name[start:] for name in names for start in _part_starts(name)}
        missing = [name for name in asked if name not in ends]
    if missing or not asked:
        found = f"{model.name_or_path} has no layer {shown(missing[0])}" if missing else "no layers are named"
        raise ConfigError(
            f"model.lora_targets: {found}; set it to {ALL_LINEAR}, or to some of {adaptable_names(loaded)}."
        )


def _part_starts(name: str) -> list[int]:
    """Returns the index at which each part of a dotted name starts."""
    return [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _linear_layers(loaded: PreTrainedModel) -> list[str]:
    """Returns the names of all linear layers that compute something for a text, except the head."""
    from transformers.pytorch_utils import Conv1D

    idle = {id(module) for tower in towers_of(loaded).values() for module in tower.modules()}
    inside = {id(module) for module in body_of(loaded).modules()} - idle
    return [n for n, m in loaded.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and id(m) in inside]


def _adaptable_layers(loaded: PreTrainedModel) -> list[str]:
    names = _without_experts(loaded, _linear_layers(loaded)) if _has_experts(loaded) else _linear_layers(loaded)
    return [name for name in names if _last_part(name) not in _lora_excludes(loaded)]


def _has_experts(loaded: PreTrainedModel) -> bool:
    return any("Experts" in type(module).__name__ for module in loaded.modules())


def _lora_excludes(loaded: PreTrainedModel) -> tuple[str, ...]:
    """Returns the last parts of the names of layers without adapters, because the model never calls them."""
    family = families.find(loaded.config.get_text_config().model_type)
    return () if family is None else family.lora_excludes


def _without_experts(loaded: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Removes names for which peft would adapt the stacked experts instead, and routers.

    For some mixtures of experts, peft interprets a name such as `gate_proj` as the experts' name in an earlier release
    of transformers, even if it belongs to another layer. Routers cannot have an adapter: they may be linear layers that
    return several tensors.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted: Any = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(converted, model=loaded, conversions=None)
    return [name for name in names if name in converted.target_modules and _last_part(name) != "router"]


# Endings of model classes whose head is new for the task, so that it is trained together with an adapter.
HEADS_OF_TASKS = ("QuestionAnswering", "SequenceClassification", "TokenClassification")


def add_adapter(loaded: PreTrainedModel, model: ModelConfig, seed: int) -> Any:
    """Adds a trainable LoRA or DoRA adapter (arXiv 2106.09685, 2402.09353) to a model. A new head is trained, too."""
    from peft import get_peft_model  # imported here because it takes a second

    if not merges_adapter(model):
        _require_recordable_base(model)
    config, can_have_one = _lora_config(loaded, model), adaptable_names(loaded)
    try:
        with seeded(seed, "adapter"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name from transformers
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft warns that it corrects this setting
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings")  # `_require_mergeable` raises for it
            adapted = get_peft_model(loaded, config)
    except ValueError as error:
        reason = re.sub(r"^\[PEFT:.*?\] ", "", " ".join(str(error).split())).split(". ")[0].rstrip(".")
        if model.adapter == "continue":
            raise _does_not_match(model, reason) from None
        raise ConfigError(
            f"model.lora_targets: {reason}; set it to {ALL_LINEAR}, or to some of {can_have_one}."
        ) from None
    _require_mergeable(loaded, model, can_have_one)
    return adapted


def _lora_config(loaded: PreTrainedModel, model: ModelConfig) -> LoraConfig:
    """Returns peft's configuration of the adapter: as in `model`, or as in the folder of one to train further."""
    from peft import LoraConfig

    heads = {name.split(".")[0]: None for name, _ in loaded.named_parameters() if not is_inside(loaded, name)}
    trained_heads = list(heads) if type(loaded).__name__.endswith(HEADS_OF_TASKS) else None
    if model.adapter == "continue":
        require_lora(_folder_of(model), loaded)
        return stored_lora_config(_folder_of(model), loaded, trained_heads)
    require_lora_targets(loaded, model)
    return LoraConfig(
        r=model.lora_rank,
        lora_alpha=cast(Any, model.lora_alpha),  # peft annotates it as int, but floats work
        lora_dropout=model.lora_dropout,
        target_modules=adapter_targets(loaded, model.lora_targets),
        exclude_modules=_names_in_frozen_blocks(loaded, model),
        use_dora=model.adapter == "dora",
        modules_to_save=trained_heads,
    )


def _names_in_frozen_blocks(loaded: PreTrainedModel, model: ModelConfig) -> str | None:
    """Returns a regular expression for the names of modules in blocks that are never trained; None without such blocks.

    Raises ConfigError if the model has fewer blocks than `model.trained_layers`.
    """
    blocks = blocks_of(loaded)
    trained = model.trained_blocks(len(blocks))
    frozen = {id(block) for block in blocks[: len(blocks) - trained if model.freezes_at_start else 0]}
    names = [re.escape(name) for name, module in loaded.named_modules() if id(module) in frozen]
    return rf"({'|'.join(names)})\..*" if names else None


def load_adapter_weights(adapted: Any, model: ModelConfig) -> None:
    """Loads the weights of an adapter that is trained further, in place. Raises ConfigError if some do not match."""
    with _checking_keys(model):
        result = adapted.load_adapter(str(_folder_of(model)), "default", is_trainable=True)
    if wrong := [
        *(f"{key} is missing" for key in result.missing_keys),
        *map("{} is unknown".format, result.unexpected_keys),
    ]:
        raise _does_not_match(model, wrong[0])


def _folder_of(model: ModelConfig) -> Path:
    frozen_base(model)  # raises ConfigError if there is no adapter
    folder = adapter_folder(model)
    assert folder is not None
    return folder


def _does_not_match(model: ModelConfig, reason: str) -> ConfigError:
    base = base_of(model)
    assert base is not None
    return ConfigError(
        f"the adapter in {model.name_or_path} does not match its base model {base.name_or_path} ({reason}); set "
        "base_model_name_or_path in its adapter_config.json to the model that it was trained on."
    )


@contextmanager
def _checking_keys(model: ModelConfig) -> Iterator[None]:
    """Context for loading an adapter's weights. Raises ConfigError if some are missing or have a different shape."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            # `merge_adapter` handles both
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings|.*lora_bias")
            warnings.filterwarnings("error", message="Found missing adapter keys")
            yield
    except ConfigError:
        raise
    except Exception as error:  # peft raises KeyError, ValueError, RuntimeError or a warning
        raise _does_not_match(model, first_line(error)) from None


def _require_recordable_base(model: ModelConfig) -> None:
    """Raises ConfigError if the base of a new adapter is a model with another adapter merged in, which has no name."""
    if model.adapter != "continue" and base_of(model) is not None:
        raise ConfigError(
            f"the new adapter cannot be saved alone, because it is trained on a base model with the adapter in "
            f"{model.name_or_path} merged in; merge it, too (model.merge_adapter=true), or set model.adapter to "
            "continue."
        )


def _require_mergeable(loaded: PreTrainedModel, model: ModelConfig, can_have_one: str) -> None:
    """Raises ConfigError if the adapter of a layer could not be merged into the layer's weight.

    The message lists `can_have_one`, the names of possible layers.
    """
    tables = [loaded.get_input_embeddings(), loaded.get_output_embeddings()]
    bases = [getattr(table, "base_layer", table) for table in tables if table is not None]
    tied = len(bases) == 2 and len({id(matrix_of(base)) for base in bases}) == 1
    for name, layer in adapted_layers(loaded).items():
        base = layer.get_base_layer()
        if not hasattr(base, "weight"):
            raise ConfigError(
                f"model.lora_targets: {plain_name(name)} contains the experts of a layer, whose adapters sansgpu "
                f"cannot merge; set it to {ALL_LINEAR}, or to some of {can_have_one}."
            )
        if tied and any(base is table for table in bases):
            if model.adapter == "continue":
                raise ConfigError(
                    f"{model.name_or_path} adapts {plain_name(name)}, which shares its weight with another layer, and "
                    "sansgpu cannot train that; set model.adapter to lora, which merges it and trains a new adapter."
                )
            raise ConfigError(
                f"model.lora_targets: {plain_name(name)} shares its weight with another layer, which the adapter "
                "would also change; remove the embedding and the output head from model.lora_targets."
            )
        if has_bias(layer) and base.bias is None and merges_adapter(model):
            raise ConfigError(
                f"{model.name_or_path} has a bias (lora_bias) for {plain_name(name)}, which has none, so it cannot be "
                "merged; set model.merge_adapter=false."
            )


def load_model(model: ModelConfig, head: Head, seed: int, frozen: bool = False) -> PreTrainedModel:
    """Loads a model like `load_pretrained`. An adapter is merged into its base model unless it is trained further."""
    base = base_of(model)
    if base is None:
        return load_pretrained(model, head, seed, frozen)
    if model.adapter != "continue":
        merged = _load_merged(model, base, head, seed)
        if not frozen:
            require_known_biases(merged.state_dict(), model, head)
        return merged
    return load_pretrained(frozen_base(model), head, seed)


def lower_layers(loaded: PreTrainedModel, model: ModelConfig) -> FrozenLayers | None:
    """Returns what is below the last `model.trained_layers` blocks; None if all blocks are always trained.

    It is frozen if it is not trained first. Raises ConfigError if the model has fewer blocks.
    """
    if model.trained_layers in (None, AUTO):
        return None
    blocks, tokens = blocks_of(loaded), probe_tokens(loaded, FROZEN_PROBE)[None].to(loaded.device)
    trained = model.trained_blocks(len(blocks))
    autocast = nullcontext() if loaded.device.type == "meta" else autocast_of(loaded)
    with reading(loaded), torch.enable_grad(), autocast:
        layers = FrozenLayers(loaded, blocks, trained, lambda: body_of(loaded)(input_ids=tokens))
    if model.freezes_at_start:
        layers.freeze(learned=False)
    return layers


def restore_frozen(loaded: PreTrainedModel, model: ModelConfig, head: Head, seed: int) -> None:
    """Reloads the frozen weights from the model's files, in their stored dtype.

    Frees the current values first, so that there are never two models in memory.
    """
    frozen = {n: p for n, p in loaded.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for parameter in frozen.values():
        parameter.data = parameter.data.new_empty(0)
    original = dict(load_model(model, head, seed).named_parameters(remove_duplicate=False))
    for name, parameter in frozen.items():
        parameter.data = original[plain_name(name)].data


def _load_merged(model: ModelConfig, base: ModelConfig, head: Head, seed: int) -> PreTrainedModel:
    from peft import PeftModel

    folder = adapter_folder(model)
    assert folder is not None
    loaded = load_pretrained(base, head, seed)
    require_lora(folder, loaded)
    with _checking_keys(model):
        adapted = PeftModel.from_pretrained(loaded, str(folder))
        dtype = torch.float32 if model.adapter == "none" else stored_dtype(model)
        merged = merge_adapter(adapted, dtype)
    merged.requires_grad_(True)  # peft has frozen it
    return configure_for_training(merged, model)


def save_adapter(
    adapted: Any, tokenizer: Any, folder: Path, model: ModelConfig, head: Head, write_more: Callable[[Path], None]
) -> None:
    """Writes the adapter without its base model to a folder that peft loads, atomically.

    `model` is the configuration with which it was trained. `write_more` can add files to the folder.
    """
    _require_recordable_base(model)

    def write(partial: Path) -> None:
        for config in adapted.peft_config.values():
            if isinstance(config.target_modules, set):  # the order of a set differs between processes
                config.target_modules = sorted(config.target_modules)
        adapted.save_pretrained(partial, save_embedding_layers=False)
        write_adapter_config(partial, model, head.labels, head.problem_type)
        save_tokenizer(tokenizer, partial, end_ids_of(adapted.get_base_model()))
        write_more(partial)

    write_folder_atomically(folder, write)
