"""The configuration schema: type, default and description of every key. Help, docs and errors are generated from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, ClassVar, Literal

from pydantic import Field, ModelWrapValidatorHandler, StrictInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sansgpu.config.model import ModelConfig
from sansgpu.config.other_names import with_own_names
from sansgpu.config.section import TOP_LEVEL_KEYS, Section, all_keys
from sansgpu.config.tasks import (
    DEFAULT_TASK,
    PYTHON_STDLIB,
    TASKS,
    TaskSettings,
    as_values,
    is_outside,
    is_section,
    kind_of,
    labels,
    settings_of,
    tasks_with,
    with_defaults,
)
from sansgpu.config.training import Device, TimeoutSeconds, TrainingConfig, default_learning_rate
from sansgpu.config.wording import truncate

CLASS_NAME = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
MIN_VOCABULARY = 257  # 256 bytes and the end of text
MAX_VOCABULARY = 1 << 20  # four times the largest in use; training a tokenizer allocates memory for all tokens
MAX_GIGABYTES = 1_000_000
_SECTIONS = ("model", "training", "data")


class DataConfig(Section):
    """The data, and how it is tokenized, masked and split into windows."""

    section_name: ClassVar[str] = "data"

    dataset_name: str = Field(
        PYTHON_STDLIB,
        description="a Hugging Face dataset, a local file or folder, or the built-in `python-stdlib`, "
        "`python-stdlib-graph`, `python-stdlib-chat` or `arithmetic`",
    )
    dataset_config: str | None = Field(None, description="configuration (subset) of a Hugging Face dataset")
    validation_name: str | None = Field(None, description="validation dataset, specified like dataset_name")
    max_tokens: int | None = Field(
        None, ge=1, description="maximum tokens to read from the data, before validation data are split off"
    )
    max_gb: float | None = Field(
        None,
        gt=0,
        le=MAX_GIGABYTES,
        description="maximum gigabytes of text to read from the data, before duplicates are left out and validation "
        "data are split off; 1 GB is 10^9 bytes of UTF-8",
    )
    streaming: bool = Field(
        False,
        description="download only as much of a Hugging Face dataset's training split as max_tokens or max_gb needs; "
        "validation data are then split off, unless validation_name is set",
    )
    deduplicate: Literal["none", "exact", "near"] = Field(
        "none",
        description="leave out documents that repeat an earlier one, or one of the validation data; exact: if their "
        "texts are equal; near: also if most of their sequences of five words are the same, as estimated by MinHash",
    )
    quality_model: str | None = Field(
        None,
        description="text classifier that chooses the documents to train on: the folder of a finished run of task "
        "classify, or of a transformers model for sequence classification",
    )
    quality_label: str | None = Field(
        None,
        description="label of quality_model; documents to which it gives this label with the highest probability are "
        "kept. Default: the score of a regression model",
    )
    quality_share: float = Field(0.5, gt=0, lt=1, description="fraction of the documents that quality_model keeps")
    text_column: str | StrictInt | None = Field(
        None,
        description="column with the text. Default: `text`, `content` or the only column. Use a number, counted from "
        "0, for .csv and .tsv files without a header",
    )
    tag_column: int | None = Field(
        None,
        description="number of the column with the tags in CoNLL files, counted from 0, or from the end if negative; "
        "if set, all files are read as CoNLL, whatever their suffix. Default: -1 for .conll files",
    )
    tokenizer: str = Field(
        "bpe",
        description="bpe: train a byte-level BPE tokenizer; char: use characters as tokens; otherwise a "
        "tokenizer.json file or a Hugging Face tokenizer",
    )
    vocab_size: int = Field(
        8192, ge=MIN_VOCABULARY, le=MAX_VOCABULARY, description="vocabulary size of a newly trained bpe tokenizer"
    )
    tokenizer_sample_mb: int = Field(32, ge=1, description="maximum megabytes of text to train a new tokenizer on")
    max_length: int | None = Field(
        None,
        ge=2,
        description="maximum tokens per example; in training from scratch, the tokens of every window (leaves are not "
        "counted). Default: model.max_seq_len",
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
        description="file with a Jinja chat template, or `simple` for a built-in one. Default: the model's template",
    )
    parse_special_tokens: bool = Field(
        False,
        description="read the texts of special tokens in messages as these tokens: only for trusted rows that contain "
        "them on purpose. By default they stay plain text, so that no message can end its turn and forge another",
    )
    on_bad_row: Literal["fail", "skip"] = Field(
        "fail",
        description="fail: stop at the first invalid row; skip: skip invalid rows and report their number. "
        "Evaluations of task qa always skip them",
    )
    triples: Literal["all", "first"] = Field(
        "all",
        description="what to do with several triples of the same head, since a window can contain only one of them; "
        "all: repeat the window for each triple; first: drop the others and report their number",
    )
    inverse_relations: bool = Field(
        False, description="also train on the inverse of each triple whose tail has a text in the data"
    )
    mask_ratio: float = Field(0.15, ge=0, lt=1, description="fraction of text tokens that are masked and predicted")
    max_span: int | None = Field(
        None,
        ge=1,
        description="maximum length of a masked span in tokens; 1: mask single tokens. Default: model.leaves",
    )
    leaf_mask_ratio: float = Field(0.15, ge=0, le=1, description="fraction of triples whose tails are masked")
    min_leaf_groups: Literal[0, 1] = Field(
        0, description="minimum number of masked tails in each window that contains a tail"
    )
    entity_query_ratio: float = Field(
        0.8,
        ge=0,
        le=1,
        description="fraction of a knowledge graph's triples, resampled in each epoch, for which the model "
        "predicts the tail among all entities; the other triples show or mask the tail's tokens",
    )
    kge_triples: int = Field(
        4,
        ge=0,
        description="number of triples sampled per example for knowledge graph embedding, i.e. to predict the tail "
        "only from the embeddings of head and relation",
    )
    long_tails: Literal["refuse", "drop"] = Field(
        "refuse",
        description="what to do with training triples whose tail has more tokens than model.leaves; refuse: stop if "
        "they are more than 1% of all triples; drop: drop them and report their number",
    )
    doc_stride: int = Field(128, ge=0, description="overlap in tokens between consecutive windows of a long text")
    n_best_size: int = Field(20, ge=1, description="number of best candidate answers to consider per question")
    max_answer_length: int = Field(30, ge=1, description="maximum length of an answer in tokens")
    null_answers: bool | None = Field(
        None,
        description="allow the answer to be empty. Default: true if the training split has questions without an answer",
    )
    null_score_diff_threshold: float = Field(
        0.0, description="predict an empty answer if its score exceeds that of the best answer by more than this"
    )
    label_column: str | StrictInt | None = Field(
        None, description="column with the label. Default: `label` or `labels`"
    )
    text_pair_column: str | StrictInt | None = Field(
        None, description="column with the second text of a pair. Default: `text_pair` if the rows have it"
    )
    label_kind: Literal["auto", "single", "multiple", "regression"] = Field(
        "auto",
        description="single: one label per row; multiple: a list of labels per row; regression: a number per row; "
        "auto: multiple for lists, regression for numbers with fractions or more than 30 distinct numbers, otherwise "
        "single",
    )
    labels: list[str] | None = Field(
        None, description="labels in the order of the model's outputs. Default: those of the training split, sorted"
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="balanced: weight the loss of each row by rows / (labels x rows with its label), so that rare "
        "labels count as much as frequent ones",
    )
    score_scale: float | None = Field(
        None,
        gt=0,
        description="score of two texts with the same meaning; all scores are divided by it. Default: 1 if no "
        "training score is larger, otherwise the largest training score, rounded up",
    )
    preprocessing_num_workers: int = Field(2, ge=1, description="number of threads for tokenization")
    # Below the default of training.timeout_seconds, so that an error names the slow worker before ranks time out.
    timeout_seconds: TimeoutSeconds = Field(
        240.0, description="seconds that a step waits for its batch before the run stops with an error"
    )
    cache_dir: str | None = Field(None, description="folder for cached tokenized data. Default: ~/.cache/sansgpu")
    validation_split: float = Field(
        0.01, gt=0, lt=1, description="fraction of tokens held out if the data has no validation split"
    )

    @property
    def has_header(self) -> bool:
        """Returns whether .csv and .tsv files start with a header row, i.e. no column key is set to a number."""
        columns = {key: field for key, field in type(self).model_fields.items() if key.endswith("_column")}
        return not any(isinstance(getattr(self, key), int) for key, field in columns.items() if field.default is None)

    def for_dataset(self, name: str) -> DataConfig:
        """Returns the settings to read all rows of a different dataset, e.g. to evaluate on it."""
        return self.model_copy(update={"dataset_name": name, "validation_name": None})


def _without_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """Removes a `sampling` section, as in oxidizr's files, if it has no effect in training.

    Raises ValueError if it sets any sampling option.
    """
    sampling = values.get("sampling")
    if not isinstance(sampling, dict):
        return values
    if sampling.get("stream"):
        raise ValueError(
            "sampling.stream is not supported in training; remove it, and use `sansgpu generate` or `sansgpu chat` to "
            "stream text"
        )
    if others := [str(key) for key in sampling if key != "stream"]:
        raise ValueError(
            f"sampling.{truncate(others[0])} has no effect in training; remove it, and set the options of `sansgpu "
            "generate` instead"
        )
    return {key: value for key, value in values.items() if key != "sampling"}


class Config(Section):
    """The configuration of one run. A file may also set `TOP_LEVEL_KEYS` at the top level."""

    task: str = Field(
        DEFAULT_TASK,
        description="kind of run",
    )
    objective: str | None = Field(
        None,
        pattern=CLASS_NAME,
        description="`package.module:Class`, a subclass of the task's built-in class to use instead of it",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    data: DataConfig = Field(default_factory=DataConfig)

    @model_validator(mode="wrap")
    @classmethod
    def _with_defaults(cls, values: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        """Moves top-level keys to `training` and adds the defaults of the task."""
        if not isinstance(values, dict):
            return validate(values)
        values = _without_sampling(with_own_names(values)[0])
        top = {key: values[key] for key in TOP_LEVEL_KEYS if key in values}
        rest = {key: value for key, value in values.items() if key not in top}
        training = as_values(rest.get("training"))
        if top and is_section(rest.get("training")):
            clash = [key for key in top if training.get(key, top[key]) != top[key]]
            if clash:
                raise ValueError(f"{clash[0]} has different values at the top level and in training; remove one")
            rest["training"] = {**training, **top}
        config = validate(with_defaults(str(rest.get("task", DEFAULT_TASK)), rest))
        if "learning_rate" not in as_values(rest.get("training")):
            rate = config.training.learning_rate if "learning_rate" in config.training.model_fields_set else None
            rate = default_learning_rate(config.training.optimizer, config.model.d_model, rate)
            config.training.__dict__["learning_rate"] = rate
        for name in _SECTIONS:  # so that assigning the task changes the defaults, too
            getattr(config, name).model_fields_set.intersection_update(as_values(rest.get(name)))
        return config

    def __setattr__(self, key: str, value: Any) -> None:
        if key in TOP_LEVEL_KEYS:
            setattr(self.training, key, value)
        else:
            super().__setattr__(key, value)

    def _take(self, other: Section, before: Section) -> None:
        super()._take(other, self)  # copies the defaults as well, because `other` may have a different task

    @field_validator("task")
    @classmethod
    def _is_task(cls, task: str) -> str:
        if task in TASKS:
            return task
        if not re.match(CLASS_NAME, task):
            known = f"{', '.join(map(repr, TASKS))} or your own class as 'package.module:Class'"
            raise PydanticCustomError("unknown_task", "Input should be {known}", {"known": known})
        return task

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        found = [*self._unused_keys(), *self.settings.problems(self)]
        if is_outside(self.task) and self.objective not in (None, self.task):
            found.append(f"objective has no effect, because task {self.task} is already your own class; remove it")
        if found:
            raise ValueError("; ".join(found))
        return self

    def _unused_keys(self) -> Iterator[str]:
        """Yields a clause for every key that is set although it has no effect in this kind of run."""
        here = self.settings
        for key, default in self._defaults():
            if not here.acts(key) and attrgetter(key)(self) != default:
                known = labels(tasks_with(key), here)
                remedy = "remove it" if "task" in self.model_fields_set else "set task, or remove it"
                yield f"{key} is for task {known}, and has no effect in {here.shown}; {remedy}"

    def without_effect(self, keys: Iterable[str], reason: str) -> Iterator[str]:
        """Yields a clause for every one of `keys` that is set although it has no effect."""
        for key, default in self._defaults():
            if key in keys and attrgetter(key)(self) != default:
                yield f"{key} has no effect because {reason}; remove it"

    def _defaults(self) -> Iterator[tuple[str, Any]]:
        """Yields (dotted key, default in this task) for every key of the sections."""
        for name in _SECTIONS:
            for key, field in all_keys(type(getattr(self, name))):
                yield f"{name}.{key}", self.settings.default(name, key, field.default)

    @property
    def settings(self) -> TaskSettings:
        """The settings that the task's class declares."""
        return settings_of(self.kind)

    @property
    def kind(self) -> str:
        """The task, or the name of its variant that the configuration selects, e.g. by naming a pretrained model."""
        return kind_of(self.task, self)

    @property
    def outside_class(self) -> str | None:
        """The class outside the package that implements the task, as `package.module:Class`."""
        return self.objective or (self.task if is_outside(self.task) else None)

    @property
    def roots(self) -> int:
        """Text tokens of one training example."""
        return self.data.max_length or self.model.max_seq_len

    @property
    def leaf_slots(self) -> int:
        """Leaf slots per token, or 0 if the task's examples have none."""
        return self.model.leaf_slots if self.settings.has_leaves else 0

    @property
    def max_span(self) -> int:
        """Longest masked span in tokens."""
        return self.data.max_span or self.leaf_slots or 1

    @property
    def device(self) -> Device:
        return self.training.device

    def get_effective_device(self) -> Any:
        """Returns the torch.device to train on. Raises ConfigError if a GPU is requested but not available."""
        return self.training.get_effective_device()

    @property
    def window(self) -> int:
        """Tokens of one training example, including the leaves of a graph."""
        return self.roots * (1 + self.leaf_slots)


Section.root = Config
