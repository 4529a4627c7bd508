"""The settings of task sft: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from sansgpu.config.data import DataConfig
from sansgpu.config.paths import PYTHON_STDLIB_CHAT
from sansgpu.config.tasks import CardText, Purpose, TaskSettings
from sansgpu.tasks.settings import (
    CHAT_COMMAND,
    FINE_TUNED,
    LORA_LEARNING_RATE,
    SMALL_CHAT_MODEL,
    TEXT_METRICS,
    DistilledTrainingConfig,
    distillation_problems,
    fine_tuning_problems,
)

_ROW_KEYS = (
    "data.long_rows", "data.chat_template", "data.template_variables", "data.parse_special_tokens", "data.on_bad_row",
    "data.system_column",
    "data.tools_column", "data.merge_turns", "data.learn",
)  # fmt: skip


class ConversationDataConfig(DataConfig):
    """The section `data` of task sft."""

    learn: Literal["all", "last"] = Field(
        "all",
        description="answers of a conversation to learn; all: those without `weight: 0` or `train: false`; last: only "
        "the last one",
    )


def _sft_problems(config: Any) -> Iterator[str]:
    if config.training.distillation.teacher is None or config.model.name_or_path is None:
        yield from fine_tuning_problems(config)
    yield from config.without_effect(("training.distillation.token_share",), "only task pretrain selects tokens")
    yield from distillation_problems(config, _ROW_KEYS)


SETTINGS = TaskSettings(
    "sft",
    (
        "text generation",
        "samples",
        "packing",
        "pretrained",
        "rows",
        "adapter",
        "trained layers",
        "kept activations",
        "chat template",
        "long rows",
    ),
    sections=(DistilledTrainingConfig, ConversationDataConfig),
    implementation="sansgpu.tasks.sft.task:SFT",
    description="supervised fine-tuning on conversations",
    purpose=Purpose(
        "An assistant", "chat", "conversations", SMALL_CHAT_MODEL, built_in=PYTHON_STDLIB_CHAT, is_decoder=True
    ),
    defaults={"training": {**FINE_TUNED, "learning_rate": 2e-5}, "data": {"max_length": 1024}},
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    scales_rate=True,
    problems=_sft_problems,
    rows="conversations",
    metrics=TEXT_METRICS,
    card=lambda model: CardText("a decoder fine-tuned on conversations", "text-generation", "CausalLM", CHAT_COMMAND),
)
