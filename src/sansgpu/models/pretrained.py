"""Models of the hub and of Hugging Face folders: loaded, given adapters, saved; all by transformers and peft."""

from __future__ import annotations

import json
import warnings
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer as Backend
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from sansgpu.config import SIMPLE_TEMPLATE, ConfigError, ModelConfig, fold_seed
from sansgpu.config.plain import first_line, shown
from sansgpu.machine.contained import is_panic
from sansgpu.machine.disk import file_sha256
from sansgpu.machine.hub import quiet_hub
from sansgpu.machine.inputs import read_text, require_ordinary
from sansgpu.machine.tokenizer_trial import tokenizer_flaw
from sansgpu.models.gguf_file import GGUFFile, is_gguf, open_gguf
from sansgpu.models.gguf_tokenizer import TokenizerParts
from sansgpu.models.model_folder import require_sound_folder
from sansgpu.models.whole_folder import written_whole

Head = Literal["causal", "qa", "masked"]
_AUTO: dict[Head, Any] = {
    "causal": AutoModelForCausalLM,
    "qa": AutoModelForQuestionAnswering,
    "masked": AutoModelForMaskedLM,
}
_WHAT: dict[Head, str] = {
    "causal": "a causal model",
    "qa": "a model for questions",
    "masked": "a model that fills gaps",
}
_SIMPLE = Path(__file__).parent / "templates/simple.jinja"
WEIGHT_FILES = ("*.safetensors", "*.bin")


def pretrained_config(model: ModelConfig) -> PreTrainedConfig:
    """Its config.json. Raises ConfigError where there is none."""
    if (file := _gguf_file(model)) is not None:
        return _config_of(file)
    name, options = _source(model)
    with _one_sentence(f"{name} cannot be loaded"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **options)
    return config


def load_tokenizer_of(model: ModelConfig, chat_template: str | None = None) -> Any:
    """Its tokenizer, with the chat template of a file where one is given. Raises ConfigError."""
    if (file := _gguf_file(model)) is not None:
        tokenizer: Any = _tokenizer_of(file)
    else:
        name, options = _source(model)
        _require_sound_tokenizer(Path(name) / "tokenizer.json")
        with _one_sentence(f"the tokenizer of {name} cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{model.name_or_path} has no tokenizer.json; convert it with transformers first.")
    _require_number_of_tokens(tokenizer, model.name_or_path)
    if chat_template is not None:
        ours = chat_template == SIMPLE_TEMPLATE
        path = _SIMPLE if ours else Path(chat_template).expanduser()
        tokenizer.chat_template = read_text(path)
    return tokenizer


def tokenizer_parts(tokenizer: Any) -> TokenizerParts:
    """A tokenizer of transformers, to be written elsewhere."""
    bos, template = tokenizer.bos_token_id, tokenizer.chat_template
    begins = bos is not None and tokenizer("a").input_ids[:1] == [bos]
    template = template.get("default") if isinstance(template, dict) else template
    whole = tokenizer.backend_tokenizer.to_str()
    return TokenizerParts(whole, bos, tokenizer.eos_token_id, tokenizer.pad_token_id, begins, template)


def load_pretrained(model: ModelConfig, head: Head, seed: int) -> PreTrainedModel:
    """The model with its weights: in fp32 to be trained whole, as they are stored under an adapter.

    A head for questions or gaps that it has not yet is drawn from `seed`. Raises ConfigError where it cannot be loaded,
    or weights are missing.
    """
    name: str | None = None
    loader: Any = _AUTO[head]
    if (file := _gguf_file(model)) is None:
        name, options = _source(model)
    elif head == "causal":
        config = _config_of(file)
        loader = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the automatic classes take no weights from memory
        options = {"config": config, "state_dict": file.weights()}
    else:
        raise ConfigError(f"{model.name_or_path} holds a causal model, not {_WHAT[head]}.")
    dtype = torch.float32 if model.adapter == "none" else "auto"
    with _one_sentence(f"{model.name_or_path} cannot be loaded as {_WHAT[head]}"), _seeded(seed, "head"):
        loaded, info = loader.from_pretrained(name, **options, dtype=dtype, output_loading_info=True)
    missing = sorted(key for key in info["missing_keys"] if head == "causal" or _is_inside(loaded, key))
    if missing or info["mismatched_keys"]:
        what = missing[0] if missing else str(sorted(info["mismatched_keys"])[0])
        raise ConfigError(
            f"{model.name_or_path} is not whole: its weights do not fit its config.json, beginning with {what}."
        )
    return prepared_for_training(loaded, model)


def made_up(model: ModelConfig, head: Head, layers: int | None = None) -> PreTrainedModel:
    """A model of the same shape, or with other layers, whose weights are drawn at random: to be timed."""
    return prepared_for_training(_from_config(model, head, layers), model)


def shape_only(model: ModelConfig, head: Head) -> PreTrainedModel:
    """The model without memory for its weights (meta device), with its adapter: to be counted."""
    with torch.device("meta"):
        loaded = _from_config(model, head)
        if model.adapter != "none":
            with_adapter(loaded, model, 0)
        return loaded


def _from_config(model: ModelConfig, head: Head, layers: int | None = None) -> PreTrainedModel:
    config = pretrained_config(model)
    if layers is not None:
        config = with_layers(config, layers)
    options = {"trust_remote_code": True} if model.trust_remote_code else {}
    with _one_sentence(f"{model.name_or_path} makes no {_WHAT[head].split(' ', 1)[1]}"), _seeded(0, "shape"):
        made: PreTrainedModel = _AUTO[head].from_config(config, **options)
    return made


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The config of a model with so many blocks."""
    text = config.get_text_config()
    if types := getattr(text, "layer_types", None):
        text.layer_types = list(islice(cycle(types), layers))  # models that are timed may have more than the whole one
    text.num_hidden_layers = layers
    return config


def prepared_for_training(loaded: PreTrainedModel, model: ModelConfig) -> PreTrainedModel:
    """The model as our steps take it, its activations as the configuration wants them."""
    if model.gradient_checkpointing:
        if not loaded.supports_gradient_checkpointing:
            raise ConfigError(
                f"{model.name_or_path} cannot recompute its activations; set model.gradient_checkpointing to false."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is not in every transformers 5
            loaded.gradient_checkpointing_enable({"use_reentrant": False})
    loaded.config.use_cache = False
    for parameter in loaded.parameters():  # products are cast by autocast, sums and norms are not
        if parameter.ndim < 2:
            parameter.data = parameter.data.float()
    return loaded


def with_adapter(loaded: PreTrainedModel, model: ModelConfig, seed: int) -> Any:
    """peft's model around `loaded`, whose layers get low-rank matrices beside them that alone are trained, with a head
    that is new (arXiv 2106.09685; DoRA: 2402.09353).
    """
    from peft import LoraConfig, get_peft_model  # a second of imports that whole training never needs

    outside = {name.split(".")[0]: None for name, _ in loaded.named_parameters() if not _is_inside(loaded, name)}
    new = list(outside) if type(loaded).__name__.endswith("QuestionAnswering") else None
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=cast(Any, model.lora_alpha),  # any number works
        lora_dropout=model.lora_dropout,
        target_modules=model.lora_targets,
        use_dora=model.adapter == "dora",
        modules_to_save=new,
    )
    try:
        with _seeded(seed, "adapter"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # which peft sees by itself
            return get_peft_model(loaded, config)
    except ValueError as error:
        raise ConfigError(f"model.lora_targets: {' '.join(str(error).split())[:300]}") from None


def _is_inside(loaded: PreTrainedModel, name: str) -> bool:
    return name.startswith(loaded.base_model_prefix + ".")


def weights_fingerprint(model: ModelConfig) -> str:
    """Names the weights that a run goes on from, to notice on resume that they changed."""
    folder = Path(str(model.name_or_path)).expanduser()
    if folder.is_file():
        return file_sha256(folder)[:16]
    if not folder.is_dir():
        return str(getattr(pretrained_config(model), "_commit_hash", None) or model.revision or "main")
    files = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    return "-".join(file_sha256(path)[:16] for path in files)


def stored_dtype(model: ModelConfig) -> torch.dtype:
    """The type that the model's config.json names, in which trained weights are exported; fp32 if it names none."""
    dtype: torch.dtype | None = getattr(pretrained_config(model), "dtype", None)
    return dtype or torch.float32


def restore_frozen(loaded: PreTrainedModel, model: ModelConfig, head: Head, seed: int) -> None:
    """Reads the frozen weights again from the model's files, in the type that they are stored in.

    The memory of the present values is freed first, so that at no time two whole models are held.
    """
    frozen = {n: p for n, p in loaded.named_parameters(remove_duplicate=False) if not p.requires_grad}
    for parameter in frozen.values():
        parameter.data = parameter.data.new_empty(0)
    original = dict(load_pretrained(model, head, seed).named_parameters(remove_duplicate=False))
    for name, parameter in frozen.items():
        parameter.data = original[plain_name(name)].data


def plain_name(name: str) -> str:
    """A parameter's name in the model without adapter; peft wraps layers and copies a new head."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def merged(adapted: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Adds each adapter to its layer's weights in fp32 and rounds the sum once, to `dtype`; returns the plain model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer):  # one after the other: the whole model in fp32 might not fit
            base: Any = layer.get_base_layer()
            base.float()
            layer.merge(safe_merge=True)
            base.to(dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*adapters.*merged")
        plain: PreTrainedModel = adapted.merge_and_unload()
    plain.to(dtype)  # type: ignore[arg-type]
    return plain


def save_adapter(adapted: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the adapter without its model, in a folder that peft loads; whole, or not at all."""

    def write(partial: Path) -> None:
        adapted.save_pretrained(partial, save_embedding_layers=False)
        save_tokenizer(tokenizer, partial)

    written_whole(folder, write)


def save_pretrained(whole: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Writes a model in a folder that transformers loads; whole, or not at all."""

    def write(partial: Path) -> None:
        whole.config.use_cache = True
        whole.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)

    written_whole(folder, write)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Writes a tokenizer that neither truncates nor pads by itself; its last call may have left it doing so."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)


def _gguf_file(model: ModelConfig) -> GGUFFile | None:
    name = str(model.name_or_path)
    return open_gguf(Path(name).expanduser()) if is_gguf(name) else None


def _config_of(file: GGUFFile) -> PreTrainedConfig:
    _quieten()
    config: PreTrainedConfig = AutoConfig.for_model(**file.settings)
    return config


def _require_sound_tokenizer(file: Path) -> None:
    if file.is_file() and (flaw := tokenizer_flaw(read_text(file))) is not None:
        raise ConfigError(f"{file} is no tokenizer that can be used: {flaw}.")


def _require_number_of_tokens(tokenizer: Any, name: str | None) -> None:
    """Raises ConfigError if the longest text is no number: transformers compares with it only when it tokenizes."""
    longest = tokenizer.model_max_length
    if not isinstance(longest, (int, float)) or not -inf < longest < inf:
        raise ConfigError(f"{name}: model_max_length in tokenizer_config.json is {shown(longest)}; give a number.")


def _tokenizer_of(file: GGUFFile) -> Any:
    parts = file.tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(parts.json),
        bos_token=parts.token(parts.bos_id),
        eos_token=parts.token(parts.eos_id),
        pad_token=parts.token(parts.pad_id),
        chat_template=parts.chat_template,
    )


def _quieten() -> None:
    quiet_hub()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _source(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """(name, what from_pretrained is to be told). Raises ConfigError where a path does not exist."""
    name = str(model.name_or_path)
    path = Path(name).expanduser()
    _quieten()
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise ConfigError(f"model.name_or_path {name} does not exist; give a folder, or a model's name on the hub.")
    if path.is_dir() and not any((path / known).is_file() for known in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{name} is no model's folder: it has no config.json.")
    if path.is_dir():
        require_sound_folder(path)
        _require_no_import(path / "adapter_config.json")
    else:
        require_ordinary(path)
    options = {"revision": model.revision} if model.revision else {}
    return str(path) if path.is_dir() else name, {**options, "trust_remote_code": model.trust_remote_code}


def _require_no_import(adapter: Path) -> None:
    """Raises ConfigError if an adapter's settings would have peft import a module that they name."""
    if not adapter.is_file():
        return
    with _one_sentence(f"{adapter} cannot be read"):
        settings = json.loads(adapter.read_text(encoding="utf-8"))
    if isinstance(settings, dict) and settings.get("megatron_config"):
        raise ConfigError(f"{adapter} names a Python module to import (megatron_core); set megatron_config to null.")


class _one_sentence:  # noqa: N801  read as a statement
    """Turns what a library raises into ConfigError with its first line."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, ConfigError):
            return
        if isinstance(error, Exception) or is_panic(error):
            if "trust_remote_code" in str(error):
                raise ConfigError(
                    f"{self._what}: it comes with Python code of its own; read that code, and allow it with "
                    "--trust-remote-code."
                ) from None
            raise ConfigError(f"{self._what}: {first_line(error)}.") from None


class _seeded:  # noqa: N801
    """torch's generator as a seed leaves it, and afterwards as it was."""

    def __init__(self, seed: int, what: str) -> None:
        self._seed, self._fork = fold_seed(seed, what), torch.random.fork_rng(devices=[])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)
