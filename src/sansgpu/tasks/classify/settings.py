"""The settings of task classify: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, StrictBool

from sansgpu.config.data import DataConfig
from sansgpu.config.parse import Values
from sansgpu.config.section import FIXED
from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings, Variant, interval, share
from sansgpu.config.training import TrainingConfig
from sansgpu.tasks.settings import FINE_TUNED, LORA_LEARNING_RATE, SMALL_ENCODER, fine_tuning_problems, label_problems

# Defaults of few-shot classification: the run takes seconds, has few steps per epoch and is evaluated at its end.
_FEW_SHOT_DEFAULTS: Values = {
    "learning_rate": 5e-5,
    "warmup_steps": 2,
    "gradient_accumulation_steps": 32,
    "num_epochs": 20,
    "eval_steps": 0,
}
_COMMAND = 'sansgpu predict MODEL --text "I liked it."'


class LabelDataConfig(DataConfig):
    """The section `data` of task classify, with or without training.few_shot."""

    label_kind: Literal["auto", "single", "multiple", "regression"] = Field(
        "auto",
        description="single: one label per row; multiple: several labels per row; regression: a number per row; auto: "
        "multiple for lists, 0/1 vectors and columns with separators, regression for numbers with fractions and for "
        "more than 30 distinct whole numbers with few rows each, otherwise single",
    )


class WeightedDataConfig(LabelDataConfig):
    """The section `data` of task classify without training.few_shot."""

    label_separator: str | None = Field(
        None,
        min_length=1,
        description="text between several labels in a cell, such as `|`. Default: `|`, `;` or `,` if the parts of "
        "cells recur in different combinations",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="balanced: weight the loss so that rare labels count as much as frequent ones: that of each row by "
        "rows / (labels x rows with its label), or, if rows may have several labels, that of rows with a label by rows "
        "without it / rows with it (pos_weight). Evaluations stay unweighted",
    )


class ClassifyTrainingConfig(TrainingConfig):
    """The section `training` of task classify."""

    few_shot: StrictBool = Field(
        False,
        description="learn from a few examples per label, as SetFit does: train an embedding model so that examples "
        "with the same label have similar vectors, then fit a linear classifier to the vectors",
        json_schema_extra=FIXED,
    )


CLASS_METRICS = (
    share("accuracy", short="accuracy"),
    interval("accuracy_interval", "accuracy"),
    share("macro_f1", "macro F1"),
    share("micro_f1", "micro F1"),
    Metric("matthews", "Matthews correlation", better="higher"),
    Metric("spearman", "Spearman correlation", better="higher", short="Spearman"),
    Metric("pearson", "Pearson correlation", better="higher"),
    Metric("rows", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)


def _classify_problems(config: Any) -> Iterator[str]:
    """Yields a message for each invalid setting of task classify."""
    yield from fine_tuning_problems(config)
    unused = {
        "single": ("data.label_separator",),
        "multiple": ("training.label_smoothing",),
        "regression": ("data.label_separator", "data.class_weights", "training.label_smoothing"),
    }
    kind = config.data.label_kind
    yield from config.without_effect(unused.get(kind, ()), f"data.label_kind is {kind}")
    if config.data.label_kind != "regression":
        yield from label_problems(config, 1 if config.data.label_kind == "multiple" else 2)


def _few_shot_problems(config: Any) -> Iterator[str]:
    """Yields a message for each invalid setting of task classify with training.few_shot."""
    yield from fine_tuning_problems(config)
    if config.data.label_kind in ("multiple", "regression"):
        yield (
            f"training.few_shot requires rows with one label each, but data.label_kind is {config.data.label_kind}; "
            "remove training.few_shot, or set data.label_kind to single"
        )
    if config.model.merge_adapter is False:
        yield "training.few_shot fits a classifier to the merged model; set model.merge_adapter to true"
    if config.model.base_precision in ("int8", "int4"):
        yield "training.few_shot fits a classifier to the merged model; set model.base_precision to auto or bf16"
    yield from label_problems(config)


FEW_SHOT = TaskSettings(
    "classify",
    ("texts", "pooling", "packing", "pretrained", "rows", "adapter", "trained layers", "kept activations", "labels"),
    implementation="sansgpu.tasks.classify.few_shot:FewShot",
    kind="few_shot",
    extra_keys=("data.label_column",),
    sections=(LabelDataConfig, ClassifyTrainingConfig),
    defaults={
        "training": {**FINE_TUNED, **_FEW_SHOT_DEFAULTS},
        "data": {"max_length": 256, "validation_split": 0.1},
    },
    adapter_defaults={"training": {"learning_rate": 2e-4}},
    problems=_few_shot_problems,
    rows="labeled texts",
    label="classify with training.few_shot",
    metrics=CLASS_METRICS,
    card=lambda model: CardText(
        "a text classifier, fine-tuned on pairs of labeled examples",
        "text-classification",
        command=_COMMAND,
        library="sentence-transformers",
    ),
)

SETTINGS = TaskSettings(
    "classify",
    ("texts", "pairs", "packing", "pretrained", "rows", "adapter", "trained layers", "kept activations", "labels"),
    implementation="sansgpu.tasks.classify.task:Classify",
    description="classify texts, or predict scores for them",
    purpose=Purpose("A classifier", "classify or score texts", "texts with labels", SMALL_ENCODER, batch=32),
    extra_keys=("training.label_smoothing",),
    sections=(WeightedDataConfig, ClassifyTrainingConfig),
    variants=(Variant("training.few_shot", True, FEW_SHOT),),
    defaults={
        "training": {**FINE_TUNED, "learning_rate": 5e-5},
        "data": {"max_length": 256, "validation_split": 0.1},
    },
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    scales_rate=True,
    problems=_classify_problems,
    rows="labeled texts",
    metrics=CLASS_METRICS,
    card=lambda model: CardText(
        "an encoder fine-tuned to classify texts", "text-classification", "SequenceClassification", _COMMAND
    ),
)
