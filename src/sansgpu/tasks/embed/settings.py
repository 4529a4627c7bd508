"""The settings of task embed: configuration keys, defaults, validation, metrics and model card."""

from __future__ import annotations

from sansgpu.config.tasks import CardText, Metric, Purpose, TaskSettings
from sansgpu.tasks.settings import FINE_TUNED, LORA_LEARNING_RATE, fine_tuning_problems

_EMBED = "sansgpu embed MODEL --data TEXTS --output vectors.npy"


EMBEDDING_KEYS = (
    "data.text_column", "data.text_pair_column", "data.label_column", "data.score_scale", "model.pooling",
    "training.embedding_loss", "training.matryoshka_dims",
)  # fmt: skip


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
    ("packing", "pretrained", "rows", "adapter"),
    implementation="sansgpu.tasks.embed.task:TextEmbedding",
    description="train an embedding model for texts",
    purpose=Purpose(
        "turn texts into vectors for semantic search",
        "pairs of texts",
        "sentence-transformers/all-MiniLM-L6-v2",
        batch=128,
    ),
    own_keys=EMBEDDING_KEYS,
    defaults={"training": {**FINE_TUNED, "learning_rate": 2e-5}, "data": {"validation_split": 0.05}},
    adapter_defaults={"training": {"learning_rate": LORA_LEARNING_RATE}},
    problems=fine_tuning_problems,
    rows="text groups",
    metrics=EMBEDDING_METRICS,
    card=lambda model: CardText(
        "a model that turns texts into vectors, so that texts of similar meaning have similar vectors",
        "sentence-similarity",
        "FeatureExtraction",
        _EMBED,
        library="sentence-transformers",
    ),
)
