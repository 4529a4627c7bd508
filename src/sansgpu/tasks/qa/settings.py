"""The settings of task qa: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from pydantic import Field

from sansgpu.config.data import DataConfig
from sansgpu.config.section import CHANGEABLE
from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings, percentage
from sansgpu.tasks.settings import FINE_TUNED, LORA_LEARNING_RATE, SMALL_ENCODER, fine_tuning_problems

_COMMAND = 'sansgpu predict MODEL --question "Who wrote it?" --context "It was written by Ada."'


class AnswerDataConfig(DataConfig):
    """The section `data` of task qa."""

    n_best_size: int = Field(
        20, ge=1, description="number of best candidate answers to consider per question", json_schema_extra=CHANGEABLE
    )
    max_answer_length: int = Field(
        30, ge=1, description="maximum length of an answer in tokens", json_schema_extra=CHANGEABLE
    )
    null_answers: bool | None = Field(
        None,
        description="allow the answer to be empty. Default: true if the training split has questions without an answer",
        json_schema_extra=CHANGEABLE,
    )
    null_score_diff_threshold: float = Field(
        0.0,
        description="predict an empty answer if its score exceeds that of the best answer by more than this",
        json_schema_extra=CHANGEABLE,
    )


QUESTION_METRICS = (
    percentage("exact_match", "exact match", "exact match"),
    percentage("f1", "F1", "F1"),
    Metric("questions", form="{:.0f}", text="{value} {label}", reported=False),
    Metric("answerable", form="{:.0f}", text="{value} {label}", reported=False),
    Metric("unanswerable", form="{:.0f}", text="{value} not", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
    percentage("no_answer_exact_match", "no answer exact match"),
    percentage("has_answer_exact_match", "has answer exact match"),
    percentage("has_answer_f1", "has answer F1"),
)


SETTINGS = TaskSettings(
    "qa",
    ("windows", "packing", "pretrained", "rows", "adapter", "trained layers", "kept activations"),
    implementation="sansgpu.tasks.qa.task:QA",
    description="extractive question answering",
    purpose=Purpose(
        "Answers from documents",
        "find answers in text",
        "questions with contexts and answers, as in SQuAD",
        SMALL_ENCODER,
    ),
    sections=(AnswerDataConfig,),
    defaults={"training": {**FINE_TUNED, "learning_rate": 3e-5}, "data": {"max_length": 384}},
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    scales_rate=True,
    problems=fine_tuning_problems,
    rows="questions",
    metrics=QUESTION_METRICS,
    card=lambda model: CardText(
        "an encoder fine-tuned for extractive question answering",
        "question-answering",
        "QuestionAnswering",
        _COMMAND,
    ),
)
