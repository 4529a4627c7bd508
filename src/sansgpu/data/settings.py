"""Sections of the configuration with keys that this package reads, but only some tasks have."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sansgpu.config.data import DataConfig
from sansgpu.config.section import CHANGEABLE, FIXED, INPUT_PATH, also_named
from sansgpu.config.training import TrainingConfig

MAX_GIGABYTES = 1_000_000


class CorpusDataConfig(DataConfig):
    """The section `data` of tasks that read a corpus: how much of it, and which of its documents."""

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
        json_schema_extra=also_named("remove_duplicates"),
    )
    quality_model: str | None = Field(
        None,
        description="text classifier that chooses the documents to train on: the folder of a finished run of task "
        "classify, or of a transformers model for sequence classification",
        json_schema_extra=CHANGEABLE | INPUT_PATH,
    )
    quality_label: str | None = Field(
        None,
        description="label of quality_model; documents to which it gives this label with the highest probability are "
        "kept. Default: the score of a regression model",
    )
    quality_share: float = Field(0.5, gt=0, lt=1, description="fraction of the documents that quality_model keeps")


class TaggedDataConfig(DataConfig):
    """The section `data` of tasks that read CoNLL files."""

    tag_column: int | None = Field(
        None,
        description="number of the column with the tags in CoNLL files, counted from 0, or from the end if negative; "
        "if set, all files are read as CoNLL, whatever their suffix. Default: in .conll files the column with entity "
        "tags such as B-PER, otherwise the last one",
    )
    span_offsets: Literal["auto", "characters", "utf16", "bytes", "graphemes"] = Field(
        "auto",
        description="what `start` and `end` of spans count: characters, UTF-16 units (JavaScript, Java), UTF-8 bytes "
        "or grapheme clusters; auto: what fits the spans' texts or the words' boundaries best in all rows",
    )


class WindowedTrainingConfig(TrainingConfig):
    """The section `training` of tasks whose windows become longer during training."""

    window_warmup_ratio: float = Field(
        0.4,
        ge=0,
        lt=1,
        description="fraction of the steps in which windows are shorter: they are split into pieces of 32, then 64, "
        "128, ... tokens",
        json_schema_extra=FIXED,
    )
