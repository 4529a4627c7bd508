"""The section `data` of the configuration: the data, and how it is tokenized and split into windows."""

from __future__ import annotations

import codecs
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, StrictInt, field_validator
from pydantic_core import PydanticCustomError

from sansgpu.config.paths import PYTHON_STDLIB
from sansgpu.config.section import CHANGEABLE, INPUT_PATH, TUNABLE_DATA, Section
from sansgpu.config.training import TimeoutSeconds
from sansgpu.config.wording import shown

MIN_VOCABULARY = 257  # 256 bytes and the end of text
MAX_VOCABULARY = 1 << 20  # four times the largest in use; training a tokenizer allocates memory for all tokens
_TEMPLATE_INPUTS = "messages", "tools", "documents", "add_generation_prompt"  # variables that every rendering sets


def is_template_variable(name: str) -> bool:
    """Returns whether a name can be that of a user's variable for a chat template."""
    return name.isascii() and name.isidentifier() and not name.startswith("_") and name not in _TEMPLATE_INPUTS


class DataConfig(Section):
    """The data, and how it is tokenized and split into windows."""

    section_name: ClassVar[str] = "data"

    dataset_name: str = Field(
        PYTHON_STDLIB,
        description="a Hugging Face dataset, a local file or folder, or the built-in `python-stdlib`, "
        "`python-stdlib-graph`, `python-stdlib-chat` or `arithmetic`",
        json_schema_extra=INPUT_PATH,
    )
    dataset_config: str | None = Field(None, description="configuration (subset) of a Hugging Face dataset")
    validation_name: str | None = Field(
        None, description="validation dataset, specified like dataset_name", json_schema_extra=INPUT_PATH
    )
    text_column: str | StrictInt | None = Field(
        None,
        description="column with the text. Default: `text`, `content` or the only column. Use a number, counted from "
        "0, for .csv and .tsv files without a header",
    )
    separator: str = Field(
        "auto",
        description="character between the fields of .csv and .tsv files; auto: recognize commas, tabs, semicolons and "
        "bars (|)",
    )
    encoding: str = Field(
        "auto",
        description="encoding of text files and tables, such as cp1252; auto: recognize UTF-8, UTF-16 and usual "
        "encodings of single languages",
    )
    tokenizer: str = Field(
        "bpe",
        description="bpe: train a byte-level BPE tokenizer; char: use characters as tokens; otherwise a "
        "tokenizer.json file or a Hugging Face tokenizer",
        json_schema_extra=TUNABLE_DATA | INPUT_PATH,
    )
    vocab_size: int = Field(
        8192,
        ge=MIN_VOCABULARY,
        le=MAX_VOCABULARY,
        description="vocabulary size of a newly trained bpe tokenizer",
        json_schema_extra=TUNABLE_DATA,
    )
    tokenizer_sample_mb: int = Field(
        32, ge=1, description="maximum megabytes of text to train a new tokenizer on", json_schema_extra=TUNABLE_DATA
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description="maximum tokens per example; in training from scratch, the tokens of every window (leaves are not "
        "counted). Default: model.max_seq_len",
        json_schema_extra=TUNABLE_DATA,
    )
    pack_sequences: bool = Field(
        True,
        description="pack several documents or examples into a sequence instead of padding them; attention does not "
        "cross their boundaries",
    )
    long_rows: Literal["truncate", "drop"] = Field(
        "truncate",
        description="what to do with rows longer than max_length; truncate: remove the oldest turns of a conversation "
        "and the beginning of a text, and skip conversations whose last question and answer are too long; drop: skip "
        "all of them",
    )
    chat_template: str | None = Field(
        None,
        description="file with a Jinja chat template, or a built-in one; simple: names of roles and eos_token, for any "
        "model; native: the special tokens of Gemma or ChatML that the tokenizer has, such as `<start_of_turn>`. "
        "Default: the model's template, or native if it has none and the rows are conversations",
        json_schema_extra=INPUT_PATH,
    )
    system_column: str | StrictInt | None = Field(
        None,
        description="column with the system message of a chat. Default: `system`, `system_prompt` or `system_message`",
    )
    tools_column: str | StrictInt | None = Field(
        None,
        description="column with the tools of a chat, a list of JSON schemas or such a list as text. Default: `tools` "
        "or `functions`",
    )
    merge_turns: bool = Field(
        False,
        description="for chat templates that require alternating turns: merge turns of the same role that follow each "
        "other; a system message after the first turn, and an answer before the first question, become parts of the "
        "next question",
    )
    template_variables: dict[str, Any] = Field(
        {},
        description="variables for the chat template, e.g. `{enable_thinking: false}`. The trained model keeps them as "
        "the defaults of its template",
    )
    parse_special_tokens: bool = Field(
        False,
        description="read the texts of special tokens in messages as these tokens: only for trusted rows that contain "
        "them on purpose. By default they stay plain text, so that no message can end its turn and forge another",
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail",
        description="fail: stop at the first invalid row; skip: skip invalid rows and report their number. "
        "Evaluations of question answering always skip them",
    )
    max_bad_rows: float = Field(
        0.1,
        ge=0,
        le=1,
        description="largest share of a split's rows that on_bad_row: skip may skip; 10 rows may always be skipped",
    )
    doc_stride: int = Field(128, ge=0, description="overlap in tokens between consecutive windows of a long text")
    label_column: str | StrictInt | list[str] | None = Field(
        None,
        description="column with the label. Default: `label` or `labels`. In task classify also a list of columns, or "
        "a pattern such as `toxic_*`: one column with 0 or 1 for each label",
    )
    text_pair_column: str | StrictInt | None = Field(
        None, description="column with the second text of a pair. Default: `text_pair` if the rows have it"
    )
    labels: list[str] | None = Field(
        None, description="labels in the order of the model's outputs. Default: those of the training split, sorted"
    )
    preprocessing_num_workers: int = Field(
        2, ge=1, description="number of threads for tokenization", json_schema_extra=CHANGEABLE
    )
    # Below the default of training.timeout_seconds, so that an error names the slow worker before ranks time out.
    timeout_seconds: TimeoutSeconds = Field(
        240.0,
        description="seconds that a step waits for its batch before the run stops with an error",
        json_schema_extra=CHANGEABLE,
    )
    cache_dir: str | None = Field(
        None, description="folder for cached tokenized data. Default: ~/.cache/sansgpu", json_schema_extra=CHANGEABLE
    )
    validation_split: float = Field(
        0.01, gt=0, lt=1, description="fraction of tokens held out if the data has no validation split"
    )

    @field_validator("template_variables")
    @classmethod
    def _known_to_templates(cls, values: dict[str, Any]) -> dict[str, Any]:
        if (wrong := next((name for name in values if not is_template_variable(name)), None)) is not None:
            raise ValueError(f"{shown(wrong)} cannot be a variable for a chat template; remove it")
        return values

    @field_validator("separator")
    @classmethod
    def _one_character(cls, value: str) -> str:
        value = {"\\t": "\t", "tab": "\t"}.get(value, value)
        if value != "auto" and (len(value) != 1 or value.isalnum() or value in '"\r\n\0'):
            raise PydanticCustomError(
                "separator", 'Input should be auto or one character, such as "," ";" "|" or "\\t"'
            )
        return value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str) -> str:
        try:
            known = value == "auto" or codecs.lookup(value)._is_text_encoding
        except (LookupError, ValueError):
            known = False
        if not known:
            raise PydanticCustomError("encoding", "Input should be auto or an encoding that Python knows, e.g. cp1252")
        return value

    def for_dataset(self, name: str) -> Self:
        """Returns the settings to read all rows of a different dataset, e.g. to evaluate on it."""
        return self.model_copy(update={"dataset_name": name, "validation_name": None})
