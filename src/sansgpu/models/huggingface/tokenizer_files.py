"""Loads, converts and saves the tokenizers of Hugging Face models."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sansgpu.config import NATIVE_TEMPLATE, SIMPLE_TEMPLATE, ConfigError
from sansgpu.config.model import ModelConfig
from sansgpu.config.paths import local_path
from sansgpu.config.plain_data import read_text
from sansgpu.config.schema import Config
from sansgpu.config.wording import shown
from sansgpu.files.reading import read_object
from sansgpu.machine.untrusted.tokenizer_trial import tokenizer_flaw
from sansgpu.models.formats.folders import base_of, frozen_base
from sansgpu.models.formats.tokenizers import TokenizerParts, with_rows
from sansgpu.models.generation.answer_end import end_tokens, stop_strings, token_ids
from sansgpu.models.generation.template_variables import set_template_variables
from sansgpu.models.huggingface.older_versions import complete_tokenizer_config
from sansgpu.models.huggingface.source import (
    gguf_file_of,
    library_errors,
    model_file,
    source_of,
)

if TYPE_CHECKING:  # transformers takes seconds to import, so functions import it when they need it
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedModel

    from sansgpu.models.formats.gguf_file import GGUFFile

_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TEMPLATES = Path(__file__).parent / "templates"
# Built-in templates with the tokens that start and end their turns; `turns` is Gemma's form. Llama 3's form is missing,
# because its base models have never trained the embeddings of such tokens, so that an adapter could not learn to end
# an answer.
_NATIVE = {"turns": ("<start_of_turn>", "<end_of_turn>"), "chatml": ("<|im_start|>", "<|im_end|>")}


def load_chat_tokenizer(config: Config) -> Any:
    """Loads the tokenizer of a configuration's model, with its chat template and the template's variables.

    Raises ConfigError if the tokenizer or the template cannot be used.
    """
    tokenizer = load_tokenizer_of(config.model, config.data.chat_template)
    set_template_variables(tokenizer, config.data.template_variables)
    return tokenizer


def load_tokenizer_of(model: ModelConfig, chat_template: str | None = None) -> Any:
    """Loads the tokenizer of a model. `chat_template` replaces its own template; see data.chat_template.

    Raises ConfigError if the tokenizer or the template cannot be used.
    """
    if (base := base_of(model)) is not None and model_file(model, "tokenizer_config.json") is None:
        model = base  # peft does not save a tokenizer
    if (file := gguf_file_of(model)) is not None:
        tokenizer: Any = _tokenizer_of(file)
    else:
        from transformers import AutoTokenizer

        name, options = source_of(model)
        _require_sound_tokenizer(Path(name) / "tokenizer.json")
        with library_errors(f"the tokenizer of {name} cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"{model.name_or_path} has no tokenizer.json; convert it with transformers first.")
    _require_finite_length(tokenizer, model.name_or_path)
    if chat_template is not None:
        tokenizer.chat_template = _template(tokenizer, model, chat_template)
    if (rows := _embedding_rows(base_of(model) or model)) is not None:
        roles = (getattr(tokenizer, role) for role in tokenizer.SPECIAL_TOKENS_ATTRIBUTES)
        used = {*roles, *map(str, tokenizer.extra_special_tokens)}
        template = str(tokenizer.chat_template)
        tokenizer._tokenizer = with_rows(
            tokenizer.backend_tokenizer, rows, str(model.name_or_path), lambda token: token in used or token in template
        )
    return tokenizer


def native_template(tokenizer: Any) -> str | None:
    """Returns the built-in template whose special tokens a tokenizer has, or None."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values()}
    found = (name for name, tokens in _NATIVE.items() if names.issuperset(tokens))
    return next((read_text(_TEMPLATES / f"{name}.jinja") for name in found), None)


def _template(tokenizer: Any, model: ModelConfig, chosen: str) -> str:
    if chosen == NATIVE_TEMPLATE:
        if (native := native_template(tokenizer)) is not None:
            return native
        known = " or ".join(start for start, _ in _NATIVE.values())
        raise ConfigError(
            f"the tokenizer of {model.name_or_path} has no special tokens for turns, such as {known}; set "
            "data.chat_template to simple or to a Jinja file."
        )
    path = _TEMPLATES / "simple.jinja" if chosen == SIMPLE_TEMPLATE else local_path(chosen)
    text = read_text(path)
    if not text.strip():
        raise ConfigError(f"{path} is empty; set data.chat_template to a file with a Jinja template, or to simple.")
    return text


def end_ids_of(model: PreTrainedModel) -> list[int] | None:
    """Returns the tokens that end a text by a model's own settings; None if it does not generate text."""
    settings: Any = getattr(model, "generation_config", None)
    return None if settings is None else token_ids(settings.eos_token_id)


def _embedding_rows(model: ModelConfig) -> int | None:
    """Returns the number of rows of a model's embedding, or None if its config does not say it."""
    if (file := gguf_file_of(model)) is not None:
        return int(file.settings["vocab_size"])
    if (path := model_file(model, "config.json")) is None:
        return None
    settings = read_object(path)
    text = settings.get("text_config")
    rows = (text if isinstance(text, dict) else settings).get("vocab_size")
    return rows if isinstance(rows, int) else None


def tokenizer_parts(
    tokenizer: Any, known_ends: Sequence[int] | None = None, file: GGUFFile | None = None
) -> TokenizerParts:
    """Converts a transformers tokenizer for export as GGUF. `known_ends` are the end tokens in the model's settings.

    `file` is the one that the tokenizer comes from, if it does; its tokens are then written as they are there.
    """
    bos, template = tokenizer.bos_token_id, tokenizer.chat_template
    adds_bos = bos is not None and tokenizer("a").input_ids[:1] == [bos]
    template = template.get("default") if isinstance(template, dict) else template
    ends = end_tokens(tokenizer, known_ends or ())
    text = next(iter(stop_strings(tokenizer)), "")
    return TokenizerParts(
        tokenizer.backend_tokenizer,
        bos,
        ends.eos,
        tokenizer.pad_token_id,
        adds_bos,
        template,
        ends.turn,
        text,
        ends.ids,
        None if file is None else file.tokenizer_metadata,
    )


def copy_processors(model: ModelConfig, folder: Path) -> None:
    """Copies the settings with which a multimodal model prepares images and sounds, without which it does not load."""
    for name in _PROCESSORS:
        if (file := model_file(frozen_base(model), name)) is not None:
            shutil.copyfile(file, folder / name)


def save_tokenizer(tokenizer: Any, folder: Path, known_ends: Sequence[int] | None = None) -> None:
    """Writes a tokenizer without the truncation and padding that an earlier call may have enabled.

    If `known_ends`, the end tokens of a model that generates text, do not contain the chat template's, it becomes the
    eos_token: only in the files, because in training, texts without a template still end with the model's own.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    own = tokenizer.eos_token
    eos = tokenizer.eos_token_id if known_ends is None else end_tokens(tokenizer, known_ends).eos
    if eos != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    try:
        tokenizer.save_pretrained(folder)
        complete_tokenizer_config(tokenizer, folder)
    finally:
        tokenizer.eos_token = own


def _require_sound_tokenizer(file: Path) -> None:
    if file.is_file() and (flaw := tokenizer_flaw(read_text(file))) is not None:
        raise ConfigError(f"{file} is not a usable tokenizer: {flaw}; download or save it again.")


def _require_finite_length(tokenizer: Any, name: str | None) -> None:
    """Raises ConfigError if model_max_length is not a finite number, which transformers notices only later."""
    length = tokenizer.model_max_length
    if not isinstance(length, (int, float)) or not -inf < length < inf:
        raise ConfigError(f"{name}: model_max_length in tokenizer_config.json is {shown(length)}; set it to a number.")


class _Owned:
    """A tokenizer that copy.deepcopy does not copy, which takes seconds with a large vocabulary."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Backend:
        return self._backend


def _tokenizer_of(file: GGUFFile) -> Any:
    from transformers import PreTrainedTokenizerFast

    parts = file.tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=_Owned(parts.backend),
        bos_token=parts.token(parts.bos_id),
        eos_token=parts.token(parts.eos_id),
        pad_token=parts.token(parts.pad_id),
        chat_template=parts.chat_template,
    )
