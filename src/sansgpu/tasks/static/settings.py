"""The settings of task static: configuration keys, defaults, validation and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sansgpu.config.tasks import CardText, Purpose, TaskSettings
from sansgpu.tasks.embed.settings import EMBEDDING_KEYS, EMBEDDING_METRICS
from sansgpu.tasks.embed.settings import SETTINGS as EMBED
from sansgpu.tasks.settings import FINE_TUNED, row_problems

_TOKENIZER_KEYS = ("data.tokenizer", "data.vocab_size", "data.tokenizer_sample_mb")
_DISTILLATION_KEYS = ("model.sif_coefficient", "model.revision", "model.trust_remote_code")

STATIC_KEYS = (
    *(key for key in EMBEDDING_KEYS if key != "model.pooling"), *_TOKENIZER_KEYS, "model.vocab_size",
    "model.embedding_dim", "model.sif_coefficient",
)  # fmt: skip


def _problems(config: Any) -> Iterator[str]:
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
    ("pretrained", "rows"),
    implementation="sansgpu.tasks.static.task:StaticEmbeddings",
    description="train static embeddings: vectors of tokens, whose mean is the vector of a text",
    purpose=Purpose(
        "turn thousands of texts per second into vectors",
        "pairs of texts",
        "sentence-transformers/all-MiniLM-L6-v2",
        batch=None,
        epochs=10,
        trained="static embeddings",
    ),
    own_keys=STATIC_KEYS,
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
    problems=_problems,
    rows=EMBED.rows,
    metrics=EMBEDDING_METRICS,
    card=lambda model: CardText(
        "static embeddings: a text's vector is the mean of its tokens' vectors, so that many thousands of texts are "
        "embedded per second on a CPU",
        "sentence-similarity",
        command="sansgpu embed MODEL --data TEXTS --output vectors.npy",
        library="sentence-transformers",
    ),
)
