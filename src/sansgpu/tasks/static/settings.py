"""The settings of task static: configuration keys, defaults, validation and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from sansgpu.config.model import ModelConfig
from sansgpu.config.tasks import CardText, Purpose, TaskSettings
from sansgpu.tasks.embed.settings import COMMAND, EMBEDDING_METRICS, EmbeddingDataConfig, EmbeddingTrainingConfig
from sansgpu.tasks.settings import FINE_TUNED, row_problems

_TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size", "data.tokenizer_sample_mb")
_DISTILLATION_KEYS = ("model.sif_coefficient", "model.revision", "model.trust_remote_code")

MAX_EMBEDDING_DIM = 65_536  # larger than the vectors of any encoder


class StaticModelConfig(ModelConfig):
    """The section `model` of task static."""

    embedding_dim: int | None = Field(
        None,
        ge=1,
        le=MAX_EMBEDDING_DIM,
        description="dimensions of static embeddings. Default: 256, or fewer if the vectors of the encoder that is "
        "distilled have fewer; for a static model that is trained further, its own",
    )
    sif_coefficient: float = Field(
        3e-4,
        ge=0,
        lt=1,
        description="weighting of tokens when an encoder is distilled to static embeddings; the vector of a token with "
        "probability p, estimated from its rank in the vocabulary by Zipf's law, is multiplied by sif_coefficient / "
        "(sif_coefficient + p) (smooth inverse frequency); 0: no weighting",
    )


def _static_problems(config: Any) -> Iterator[str]:
    """Yields a message for each invalid setting of task static."""
    yield from row_problems(config)
    if config.model.name_or_path is None:
        yield from config.without_effect(_DISTILLATION_KEYS, "model.name_or_path is not set")
    else:
        yield from config.without_effect(_TOKENIZER_KEYS, "model.name_or_path has its own tokenizer")
    if config.training.precision in ("int16", "int8"):
        yield (
            f"training.precision {config.training.precision} has no effect in task static, whose model multiplies no "
            "matrices; remove it"
        )


SETTINGS = TaskSettings(
    "static",
    ("texts", "pairs", "pretrained", "rows"),
    implementation="sansgpu.tasks.static.task:StaticEmbeddings",
    description="train static embeddings: vectors of tokens, whose mean is the vector of a text",
    purpose=Purpose(
        "Very fast search",
        "turn thousands of texts per second into vectors",
        "pairs of texts",
        "sentence-transformers/all-MiniLM-L6-v2",
        batch=None,
        epochs=10,
        trained="static embeddings",
    ),
    extra_keys=("model.vocab_size", *_TOKENIZER_KEYS),
    sections=(StaticModelConfig, EmbeddingDataConfig, EmbeddingTrainingConfig),
    defaults={
        "training": {
            **FINE_TUNED,
            "learning_rate": 0.01,
            "batch_size": 1024,
            "gradient_accumulation_steps": 1,
            "precision": "fp32",
        },
        "data": {"max_length": 512, "validation_split": 0.05},
    },
    problems=_static_problems,
    rows="text groups",
    metrics=EMBEDDING_METRICS,
    card=lambda model: CardText(
        "static embeddings: a text's vector is the mean of its tokens' vectors, so that many thousands of texts are "
        "embedded per second on a CPU",
        "sentence-similarity",
        command=COMMAND,
        library="sentence-transformers",
    ),
)
