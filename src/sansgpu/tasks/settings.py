"""Parts that the settings of several tasks share. Imports no torch, so that a configuration is validated quickly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from sansgpu.config.parse import Values
from sansgpu.config.paths import PYTHON_STDLIB
from sansgpu.config.section import INPUT_PATH, Section
from sansgpu.config.tasks import BITS_PER_BYTE, Metric
from sansgpu.config.training import TrainingConfig

LORA_LEARNING_RATE = 5e-4  # at a width of 2,048; more than for all weights, because LoRA's product starts at zero
# Base models that `sansgpu init` suggests.
SMALL_CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL_ENCODER = "distilbert-base-uncased"
# Defaults for fine-tuning: AdamW, with which most models were pretrained, no weight decay, and no shorter windows.
FINE_TUNED: Values = {
    "lr_scheduler": "linear",
    "window_warmup_ratio": 0.0,
    "optimizer": "adamw",
    "weight_decay": 0.0,
    "beta2": 0.999,
    "muon_momentum_start": 0.95,
    "muon_embedding_rate": 1.0,
}
# Keys that select the data and split it.
TEXT_KEYS = "data.dataset_name", "data.dataset_config", "data.validation_name", "data.validation_split"
CHAT_COMMAND = 'sansgpu chat MODEL --prompt "Hello!"'  # for model cards
TEXT_METRICS = (
    Metric("perplexity", form="{:.2f}", plotted=False),
    BITS_PER_BYTE,
    Metric("kl", "KL divergence from the teacher", short="KL"),  # in training, with training.distillation
)


def fine_tuning_problems(config: Any, data: str = "rows") -> Iterator[str]:
    """Yields a message if the pretrained model or the `data` is not configured."""
    if config.model.name_or_path is None:
        yield f"task {config.task} fine-tunes a pretrained model; set model.name_or_path"
    yield from row_problems(config, data)


def row_problems(config: Any, data: str = "rows") -> Iterator[str]:
    """Yields a message if the `data` is not configured, or has several label columns but the task reads only one."""
    if isinstance(config.data.label_column, list) and config.task != "classify":
        yield f"data.label_column must be a single column in task {config.task}; set it to one name"
    if config.data.dataset_name == config.settings.default("data", "dataset_name", PYTHON_STDLIB):
        yield f"task {config.task} requires {data}; set data.dataset_name"


class DistillationConfig(Section):
    """Learning from a teacher's predictions."""

    teacher: str | None = Field(
        None,
        description="folder written by `sansgpu distill`, with the training text and the teacher's prediction of each "
        "token",
        json_schema_extra=INPUT_PATH,
    )
    weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of the KL divergence from the teacher; the cross-entropy loss has the weight 1 - weight",
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="softmax temperature T of teacher and student in the KL divergence, which is multiplied by T^2",
    )
    token_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="task pretrain: share of the tokens of a micro-batch that the loss includes: those with the "
        "largest excess loss, which is the student's cross-entropy minus the teacher's (Rho-1)",
    )

    @model_validator(mode="after")
    def _only_keys_with_an_effect(self) -> DistillationConfig:
        for key in ("weight", "temperature", "token_share"):
            if self.teacher is None and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect without a teacher; set teacher to a folder, or remove it")
        if self.weight == 0 and not self.selects_tokens:
            raise ValueError(
                "weight is 0, with which the teacher has an effect only if it selects tokens; raise weight, or lower "
                "token_share"
            )
        if self.weight == 0 and self.temperature != type(self).model_fields["temperature"].default:
            raise ValueError("temperature has no effect with weight 0; remove it")
        return self

    @property
    def selects_tokens(self) -> bool:
        """Returns True if the loss includes only some of the tokens."""
        return self.token_share < 1


class DistilledTrainingConfig(TrainingConfig):
    """The section `training` of tasks that can learn from a teacher."""

    distillation: DistillationConfig = Field(
        default_factory=DistillationConfig, description="learning from a teacher's predictions"
    )


def distillation_problems(config: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """Yields a message for each of `keys` that is set although a teacher's folder determines it."""
    if config.training.distillation.teacher is not None:
        yield from config.without_effect(
            (*TEXT_KEYS, *keys), "training.distillation.teacher provides the text and its tokens"
        )
        yield from config.without_effect(("training.label_smoothing",), "training.distillation.teacher is set")


def window_problems(config: Any) -> Iterator[str]:
    """Yields a message if windows are longer than the model's context."""
    if config.roots > config.model.max_seq_len:
        yield (
            f"data.max_length {config.roots} is longer than model.max_seq_len {config.model.max_seq_len}; "
            "lower it or raise model.max_seq_len"
        )


def label_problems(config: Any, minimum: int = 2, noun: str = "labels") -> Iterator[str]:
    """Yields a message if data.labels has a duplicate, or fewer than `minimum` labels. It calls them `noun`."""
    labels = config.data.labels
    if labels is not None and len(set(labels)) < max(minimum, len(labels)):
        yield f"data.labels needs at least two distinct {noun}; add the missing ones, or remove it"
