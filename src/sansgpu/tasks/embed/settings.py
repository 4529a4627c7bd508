"""The settings of task embed: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from sansgpu.config.data import DataConfig
from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings
from sansgpu.config.training import PositiveInt, TrainingConfig
from sansgpu.tasks.settings import FINE_TUNED, LORA_LEARNING_RATE, fine_tuning_problems

PROMPTS = ("query", "document")  # names in data.prompts
COMMAND = "sansgpu embed MODEL --data TEXTS --output vectors.npy"


class EmbeddingDataConfig(DataConfig):
    """The section `data` of tasks that train embedding models."""

    score_scale: float | None = Field(
        None,
        gt=0,
        description="score of two texts with the same meaning; all scores are divided by it. Default: 1 if no "
        "training score is larger, 5 if the largest is a fraction between 2 and 5, otherwise the largest, rounded up",
    )
    pair_labels: Literal["auto", "similarity", "nli"] = Field(
        "auto",
        description="meaning of the numbers in a label column of two texts; similarity: scores; nli: 0 entailment, 1 "
        "neutral, 2 contradiction, from which triplets are made; auto: nli for exactly these three, similarity for 0 "
        "and 1 and for numbers with fractions; others need a choice",
    )

    prompts: Literal["auto", "none"] | dict[str, str] = Field(
        "auto",
        description="texts to put before the texts of rows, also in the trained model: auto: the model's own prompts, "
        "i.e. its query prompt before anchors and its document prompt before their positives and negatives, and its "
        "default prompt before other texts; none: no prompts; or an object with `query`, `document` or both",
    )

    @field_validator("prompts")
    @classmethod
    def _known_prompts(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        unknown = [name for name in value if name not in PROMPTS] if isinstance(value, dict) else []
        if unknown or value == {}:
            raise ValueError(
                f"it has {', '.join(unknown)[:100] or 'no prompts'}, but can have {' and '.join(PROMPTS)}; correct it"
            )
        return value


class EmbeddingTrainingConfig(TrainingConfig):
    """The section `training` of tasks that train embedding models."""

    embedding_loss: Literal["auto", "ranking", "cosine", "triplet"] = Field(
        "auto",
        description="ranking: pick a text's positive among all positives and negatives of the step (InfoNCE, multiple "
        "negatives ranking); cosine: squared error between cosine similarity and score; triplet: keep the negative "
        "farther away than the positive; auto: cosine for rows with scores, otherwise ranking",
    )
    matryoshka_dims: list[PositiveInt] | None = Field(
        None,
        min_length=1,
        description="also compute the loss for vectors truncated to these dimensions, so that truncated vectors can "
        "be used (Matryoshka)",
    )


EMBEDDING_METRICS = (
    Metric("spearman", "Spearman correlation", better="higher", short="Spearman"),
    Metric("pearson", "Pearson correlation", better="higher"),
    Metric("mrr", "MRR", better="higher", short="MRR"),
    Metric("ndcg_at_10", "NDCG@10", better="higher"),
    Metric("rows", form="{:,.0f}", text="{value} {label}", reported=False),
    Metric("skipped", form="{:.0f}", text="{value} {label}", reported=False),
)


SETTINGS = TaskSettings(
    "embed",
    ("texts", "pairs", "pooling", "packing", "pretrained", "rows", "adapter", "trained layers", "kept activations"),
    implementation="sansgpu.tasks.embed.task:TextEmbedding",
    description="train an embedding model for texts",
    purpose=Purpose(
        "Search by meaning",
        "turn texts into vectors for semantic search",
        "pairs of texts",
        "sentence-transformers/all-MiniLM-L6-v2",
        batch=128,
    ),
    sections=(EmbeddingDataConfig, EmbeddingTrainingConfig),
    defaults={"training": {**FINE_TUNED, "learning_rate": 2e-5}, "data": {"validation_split": 0.05}},
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    scales_rate=True,
    problems=fine_tuning_problems,
    rows="text groups",
    metrics=EMBEDDING_METRICS,
    card=lambda model: CardText(
        "a model that turns texts into vectors, so that texts of similar meaning have similar vectors",
        "sentence-similarity",
        "FeatureExtraction",
        COMMAND,
        library="sentence-transformers",
    ),
)
