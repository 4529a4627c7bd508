"""The settings of task tokens: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings, share
from sansgpu.data.settings import TaggedDataConfig
from sansgpu.tasks.settings import FINE_TUNED, LORA_LEARNING_RATE, SMALL_ENCODER, fine_tuning_problems, label_problems

_COMMAND = 'sansgpu predict MODEL --text "Ada Lovelace lived in London."'


TAG_METRICS = (
    share("entity_f1", "entity F1", "entity F1"),
    share("entity_precision", "precision", within="entity_f1"),
    share("entity_recall", "recall", within="entity_f1"),
    share("accuracy", "accuracy"),
    Metric("words", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)


def _tag_problems(config: Any) -> Iterator[str]:
    """Yields a message for each invalid setting of task tokens."""
    yield from fine_tuning_problems(config)
    yield from label_problems(config, noun="tags")


SETTINGS = TaskSettings(
    "tokens",
    ("windows", "packing", "pretrained", "rows", "adapter", "trained layers", "kept activations", "labels"),
    implementation="sansgpu.tasks.tokens.task:Tokens",
    description="tag words, e.g. find entities (token classification)",
    purpose=Purpose("Entities in text", "find entities in text", "sentences with tags", SMALL_ENCODER),
    sections=(TaggedDataConfig,),
    defaults={
        "training": {**FINE_TUNED, "learning_rate": 5e-5},
        "data": {"max_length": 128, "doc_stride": 32, "validation_split": 0.1},
    },
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    scales_rate=True,
    problems=_tag_problems,
    rows="tagged texts",
    metrics=TAG_METRICS,
    card=lambda model: CardText(
        "an encoder fine-tuned to tag words", "token-classification", "TokenClassification", _COMMAND
    ),
)
