"""Loads and saves models with transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from sansgpu.config import ConfigError, derive_seed
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.machine.disk import file_sha256
from sansgpu.models.formats.folders import adapter_folder, base_of, gguf_parts, write_folder_atomically
from sansgpu.models.formats.weights import (
    BasePrecision,
    StoredTensor,
    fill,
    merged_sources,
    placeholders,
    random_weights,
)
from sansgpu.models.generation.answer_end import EndTokens, end_tokens, token_ids
from sansgpu.models.huggingface.loaded_weights import keep_rows_of_labels, require_weights
from sansgpu.models.huggingface.older_versions import complete_config
from sansgpu.models.huggingface.probes import autocast_of, sees_later_tokens, towers_of
from sansgpu.models.huggingface.source import (
    base_precision,
    gguf_file_of,
    is_base_quantized,
    library_errors,
    own_labels,
    pretrained_config,
    set_labels,
    source_of,
    stored_weights,
)
from sansgpu.models.huggingface.tokenizer_files import copy_processors, end_ids_of, save_tokenizer
from sansgpu.models.modules import blocks_of

if TYPE_CHECKING:  # transformers takes seconds to import, so functions import it when they need it
    from transformers import PreTrainedConfig, PreTrainedModel


HeadType = Literal["causal", "qa", "masked", "sequence", "tokens", "none"]
AUTO_CLASSES: dict[HeadType, str] = {
    "causal": "AutoModelForCausalLM",
    "qa": "AutoModelForQuestionAnswering",
    "masked": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "none": "AutoModel",
}
_DESCRIPTION: dict[HeadType, str] = {
    "causal": "a causal language model",
    "qa": "a question answering model",
    "masked": "a masked language model",
    "sequence": "a sequence classification model",
    "tokens": "a token classification model",
    "none": "an encoder",
}
WEIGHT_FILES = ("*.safetensors", "*.bin")
# Values of `problem_type` in a transformers config.
ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


@dataclass(frozen=True)
class Head:
    """The head of a model: its type and, for a classifier, its labels in the order of the logits."""

    type: HeadType
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None

    def set_labels(self, config: PreTrainedConfig) -> None:
        """Sets labels and problem type in the config of a classifier, and a padding token, which decoders need."""
        if self.labels:
            set_labels(config, self.labels, self.problem_type)
        text = config.get_text_config()
        padding = getattr(text, "pad_token_id", None)
        if self.type == "sequence" and padding is None:  # a decoder finds the end of each row by it
            ends = getattr(text, "eos_token_id", None)
            config.pad_token_id = text.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0


def load_pretrained(model: ModelConfig, head: Head, seed: int, frozen: bool = False) -> PreTrainedModel:
    """Loads a model with its weights: in fp32 for full fine-tuning, or as `base_precision` says for an adapter.

    With `frozen`, for inference, `base_precision` applies to models without an adapter, too: the matrices of a
    quantized GGUF file stay quantized.

    A head or pooler that is missing or has other labels is initialized from `seed`. Raises ConfigError if the model
    cannot be loaded or any other weight is missing.
    """
    file = gguf_file_of(model)
    if file is not None and head.type != "causal":
        raise ConfigError(
            f"{model.name_or_path} contains a causal language model instead of {_DESCRIPTION[head.type]}; use a "
            "different model."
        )
    dtype = torch.float32 if model.adapter == "none" else "auto"
    known = own_labels(pretrained_config(model)) if head.labels else ()
    if (precision := base_precision(model, frozen)) is not None:
        config = pretrained_config(model)
        loaded, new = _load_one_by_one(model, head, seed, config, stored_weights(model), precision)
    elif file is not None:
        options = {"config": pretrained_config(model), "state_dict": file.weights()}
        loaded, new = _load(model, head, seed, None, options, dtype)
    else:
        name, options = source_of(model)
        if head.labels:
            config = pretrained_config(model)
            head.set_labels(config)
            options |= {"config": config, "ignore_mismatched_sizes": True}
        loaded, new = _load(model, head, seed, name, options, dtype)
    if head.type == "causal" and sees_later_tokens(loaded):
        raise ConfigError(
            f"{model.name_or_path} is an encoder, whose tokens attend to later ones, but this needs a decoder; train "
            "it with task classify, tokens, qa or embed."
        )
    keep_rows_of_labels(loaded, model, known, head.labels)
    require_weights(loaded, model, new, allows_new_head=head.type != "causal")
    return configure_for_training(loaded, model)


def _auto_class(head: Head, config: PreTrainedConfig) -> Any:
    """Returns the class of transformers that loads a model. Without a head, T5 and its relatives have no decoder."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(config.model_type, "")
    is_part = head.type == "none" and encoder.endswith("EncoderModel")
    return getattr(transformers, "AutoModelForTextEncoding" if is_part else AUTO_CLASSES[head.type])


def _load(
    model: ModelConfig, head: Head, seed: int, name: str | None, options: dict[str, Any], dtype: torch.dtype | str
) -> tuple[PreTrainedModel, set[str]]:
    """Loads a model from `name` or, if that is None, from the state_dict in `options`.

    Also returns the names of the weights that were newly initialized, because they are missing or have another shape.
    """
    loader: Any = _auto_class(head, options.get("config") or pretrained_config(model))
    if name is None:
        loader = type(_from_config(model, head, options["config"], "meta"))  # Auto classes do not take a state_dict
    with library_errors(f"{model.name_or_path} cannot be loaded as {_DESCRIPTION[head.type]}"), seeded(seed, "head"):
        loaded, info = loader.from_pretrained(name, **options, dtype=dtype, output_loading_info=True)
    return loaded, {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}


def _load_one_by_one(
    model: ModelConfig,
    head: Head,
    seed: int,
    config: PreTrainedConfig,
    stored: Mapping[str, StoredTensor],
    precision: BasePrecision,
) -> tuple[PreTrainedModel, set[str]]:
    """Loads a model in bf16, one tensor at a time, and quantizes its matrices if `precision` says so."""
    head.set_labels(config)
    given = placeholders(stored, torch.bfloat16)
    options = {"config": config, "state_dict": given, "ignore_mismatched_sizes": True}
    loaded, new = _load(model, head, seed, None, options, torch.bfloat16)
    if merged := merged_sources(loaded, stored, given, new):
        del loaded
        options["state_dict"] = {**given, **{name: stored[name].read() for name in merged}}
        loaded, new = _load(model, head, seed, None, options, torch.bfloat16)
        given = {name: tensor for name, tensor in given.items() if name not in merged}
    with library_errors(f"{model.name_or_path} cannot be loaded as {_DESCRIPTION[head.type]}"):
        fill(loaded, stored, given, precision, new)
    return loaded, new


def random_model(model: ModelConfig, head: Head, layers: int | None = None) -> PreTrainedModel:
    """Builds a model with random weights to time its training steps.

    It has `layers` blocks if they are given. If it does not run with so few, it has one more, or else all.
    """
    for config in () if layers is None else shortened_configs(model, head, layers):
        try:
            shorter = _random_model(model, head, config)
            with torch.no_grad(), autocast_of(shorter):
                shorter(input_ids=torch.ones(1, 2, dtype=torch.long))
            return shorter
        except Exception:  # anything that the code of a model with an unusual number of blocks may raise
            continue
    return _random_model(model, head, pretrained_config(model))


def _random_model(model: ModelConfig, head: Head, config: PreTrainedConfig) -> PreTrainedModel:
    if (precision := base_precision(model)) is None:
        return configure_for_training(_from_config(model, head, config), model)
    from_file = stored_weights(model) if precision == "file" else {}
    random = random_weights(_from_config(model, head, config, "meta"), precision, from_file)
    return configure_for_training(_load_one_by_one(model, head, 0, config, random, precision)[0], model)


def meta_model(model: ModelConfig, head: Head) -> PreTrainedModel:
    """Builds a model on the meta device, to count its parameters."""
    return _from_config(model, head, pretrained_config(model), "meta")


def _from_config(model: ModelConfig, head: Head, config: PreTrainedConfig, device: str = "cpu") -> PreTrainedModel:
    head.set_labels(config)
    options = {"trust_remote_code": True} if model.trust_remote_code else {}
    with (
        library_errors(f"{model.name_or_path} cannot be built as {_DESCRIPTION[head.type]}"),
        seeded(0, "shape"),
        torch.device(device),
    ):
        built: PreTrainedModel = _auto_class(head, config).from_config(config, **options)
    return _with_frozen_towers(built)


def shortened_configs(model: ModelConfig, head: Head, layers: int) -> Iterator[PreTrainedConfig]:
    """Yields the configs of a model with `layers` blocks and with one more, unless no such model can be built.

    RWKV needs two blocks, for instance, and BART's config has a separate number of decoder blocks.
    """
    for count in (layers, layers + 1):
        try:
            config = with_layers(pretrained_config(model), count)
            fits = len(blocks_of(_from_config(model, head, config, "meta"))) == count
        except Exception:  # anything that the code of a model with an unusual number of blocks may raise
            continue
        if fits:
            yield config


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """Sets the number of blocks of a config and the lengths of its lists with a value per block, in place."""
    text = config.get_text_config()
    for key, values in list(vars(text).items()):
        if isinstance(values, (list, tuple)) and len(values) == text.num_hidden_layers and values:
            setattr(text, key, list(islice(cycle(values), layers)))
    text.num_hidden_layers = layers
    if getattr(text, "num_kv_shared_layers", 0):
        text.num_kv_shared_layers = 0  # the first layers of Gemma share no keys and values with others
    return config


def _with_frozen_towers(loaded: PreTrainedModel) -> PreTrainedModel:
    for tower in towers_of(loaded).values():
        tower.requires_grad_(False)
    return loaded


def configure_for_training(loaded: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
    """Enables gradient checkpointing if configured, disables the KV cache, and converts biases and norms to fp32.

    Freezes the parts of a multimodal model that read no text.
    """
    if model.gradient_checkpointing:
        if not loaded.supports_gradient_checkpointing:
            raise ConfigError(
                f"{model.name_or_path} does not support gradient checkpointing; set model.gradient_checkpointing=false."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # some releases do not have the method's new name yet
            loaded.gradient_checkpointing_enable({"use_reentrant": False})
    loaded.config.use_cache = False
    for parameter in loaded.parameters():
        if parameter.ndim < 2:  # autocast does not cover biases and norms; a copy also frees the mapped file
            parameter.data = parameter.data.to(torch.float32, copy=True)
    return _with_frozen_towers(loaded)


def weights_fingerprint(model: ModelConfig) -> str:
    """Returns a fingerprint of a run's initial weights, which reveals on resume that they have changed."""
    folder = adapter_folder(model) or local_path(str(model.name_or_path))
    if folder.is_file():
        return "-".join(file_sha256(part)[:16] for part in gguf_parts(folder))
    if not folder.is_dir():
        return str(getattr(pretrained_config(model), "_commit_hash", None) or model.revision or "main")
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    base = base_of(model)
    return "-".join([*([weights_fingerprint(base)] if base else []), *(file_sha256(path)[:16] for path in files)])


def stored_dtype(model: ModelConfig) -> torch.dtype:
    """Returns the dtype in which trained weights are exported.

    It is the dtype in the model's config.json, or fp32 if that has none, and bf16 for a quantized GGUF file.
    """
    base = None if model.adapter == "continue" else base_of(model)
    if base_precision(base or model) == "file":
        return torch.bfloat16
    dtype: torch.dtype | None = getattr(pretrained_config(model), "dtype", None)
    return dtype or torch.float32


def merges_adapter(model: ModelConfig) -> bool:
    """Returns whether to export the model with its adapter merged in; by default only if its base is not quantized."""
    return not is_base_quantized(model) if model.merge_adapter is None else model.merge_adapter


def plain_name(name: str) -> str:
    """Returns a parameter's name without the parts that peft inserts for wrapped layers and copied heads."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    source: ModelConfig,
    write_more: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a model, which came from `source`, to a folder that transformers loads, atomically.

    `write_more` can add files to it.
    """
    known_ends = end_ids_of(model)

    def write(partial: Path) -> None:
        model.config.use_cache = True
        if known_ends is not None:
            _set_end_tokens(model, end_tokens(tokenizer, known_ends))
        model.save_pretrained(partial)
        complete_config(partial)
        save_tokenizer(tokenizer, partial, known_ends)
        if towers_of(model):
            copy_processors(source, partial)
        write_more(partial)

    write_folder_atomically(folder, write)


def _set_end_tokens(model: PreTrainedModel, ends: EndTokens) -> None:
    """Adds the chat template's end token to a model's settings, as transformers' Trainer does for a tokenizer's."""
    generation: Any = model.generation_config
    if ends.turn is not None and ends.turn not in token_ids(generation.eos_token_id):
        generation.eos_token_id = list(ends.ids)
        model.config.get_text_config().eos_token_id = ends.eos


class seeded:  # noqa: N801
    """Context that seeds torch's generator from a seed and a purpose, and restores its state on exit."""

    def __init__(self, seed: int, purpose: str) -> None:
        self._seed, self._fork = derive_seed(seed, purpose), torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)
